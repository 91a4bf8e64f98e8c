// A fake CUDA driver for tests. It records launches and attributes, and returns the status codes of a real driver.
// Each device has one context, number 1000 + device.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

struct launch {
  int64_t function, grid, block, shared, stream, context;
  unsigned char words[768];
};

static _Thread_local int64_t current;
static struct launch launches[32];
static int num_launches, refuse_next;
static int64_t attributes[8][3];
static int num_attributes;
static char loaded[64], absent[64];

API int cuInit(unsigned flags) { return flags != 0; }
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(intptr_t)(1000 + device);
  return 0;
}
API int cuCtxGetCurrent(void** context) {
  *context = (void*)(intptr_t)current;
  return 0;
}
API int cuCtxSetCurrent(void* context) {
  current = (intptr_t)context;
  return 0;
}
API int cuModuleLoadData(void** module, const void* image) {
  if (!current) return 201;
  memcpy(loaded, image, 5);
  *module = loaded;
  return 0;
}
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (module != loaded || !strcmp(name, absent)) return 500;
  *function = (void*)(intptr_t)(name[strlen(name) - 1]);  // a function is identified by the last letter of its name
  return 0;
}
API int cuFuncSetAttribute(void* function, int attribute, int value) {
  int64_t* entry = attributes[num_attributes++];
  entry[0] = (intptr_t)function, entry[1] = attribute, entry[2] = value;
  return 0;
}
API int cuLaunchKernel(void* function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block, unsigned block_y,
                       unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
  if (refuse_next) {
    refuse_next = 0;
    return 700;
  }
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra) return 1;
  struct launch* launch = &launches[num_launches++];
  launch->function = (intptr_t)function, launch->grid = grid, launch->block = block, launch->shared = shared;
  launch->stream = (intptr_t)stream, launch->context = current;
  // The kernels of the tests have 10 words, and GEMMs, with blocks of 384 threads, up to 96.
  memcpy(launch->words, arguments[0], (block == 384 ? 96 : 10) * 8);
  return 0;
}
// Writes the matrix as 16 words: address, dtype, rank, 3 sizes, 2 strides, 3 sides of the box, and the options.
API int cuTensorMapEncodeTiled(int64_t* map, int dtype, unsigned rank, void* at, const uint64_t* sizes,
                               const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                               int swizzle, int promotion, int fill) {
  if ((intptr_t)map % 64 || (intptr_t)at % 16 || steps[0] != 1 || steps[1] != 1 || steps[2] != 1) return 1;
  const int64_t words[16] = {(intptr_t)at,     dtype,      rank,   sizes[0], sizes[1],   sizes[2], strides[0],
                             strides[1],       box[0],     box[1], box[2],   interleave, swizzle,  promotion,
                             fill};
  memcpy(map, words, sizeof words);
  return 0;
}
API int cuGetErrorName(int status, const char** text) {
  *text = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return 0;
}
API int cuGetErrorString(int status, const char** text) {
  *text = "in words";
  return status < 0;
}

API struct launch* fake_launches(int* count) {
  *count = num_launches;
  return launches;
}
API int64_t* fake_attributes(int* count) {
  *count = num_attributes;
  return attributes[0];
}
API const char* fake_loaded(void) { return loaded; }
API void fake_lose(const char* name) { strncpy(absent, name, sizeof absent - 1); }
API void fake_refuse_next(void) { refuse_next = 1; }
