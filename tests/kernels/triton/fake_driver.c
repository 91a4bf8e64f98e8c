// A fake CUDA driver for Triton's launchers. It records the last launches and their parameters, and runs nothing.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define PARAMETERS 40

struct config {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};
struct launch {
  int64_t function, stream, grid[3], block, shared;
  unsigned char parameters[PARAMETERS][16];
};

static struct launch last;
static int num_launches, num_parameters, num_maps;

API int cuCtxGetCurrent(void** context) { return *context = (void*)1000, 0; }
API int cuCtxSetCurrent(void* context) { return context == NULL; }
API int cuCtxGetLimit(size_t* value, int limit) { return *value = (size_t)limit, 0; }
API int cuCtxSetLimit(int limit, size_t value) { return limit < 0 && value; }
API int cuDeviceGet(int* device, int index) { return *device = index, 0; }
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return *value = device + (attribute == 97 ? 227 << 10 : 132), 0;  // 97: shared memory per block, opt-in
}
API int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(intptr_t)(1000 + device), 0; }
API int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return *value = function && attribute == 0 ? 1024 : 0, 0;  // 0: threads per block
}
API int cuFuncSetAttribute(void* function, int attribute, int value) { return !function || attribute + value < 0; }
API int cuFuncSetCacheConfig(void* function, int config) { return !function || config < 0; }
API int cuGetErrorString(int status, const char** text) { return *text = "an error", status < 0; }
API int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = (void*)(intptr_t)(strlen(name) + 1), module == NULL;
}
API int cuModuleLoadData(void** module, const void* image) { return *module = (void*)image, 0; }
API int cuOccupancyMaxActiveClusters(int* count, void* function, const void* config) {
  return *count = 1, !function || !config;
}
API int cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) {
  return *(uint64_t*)value = pointer, attribute < 0;
}
API int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                               const uint64_t* strides, const unsigned* box) {
  uint64_t words[2] = {(uint64_t)(uintptr_t)address + sizes[0] + 3 * sizes[1] + 5 * strides[0], box[0] + 7 * box[1]};
  memcpy(map, words, 16);
  return num_maps++, rank != 2 || type < 0;
}
API int cuLaunchKernelEx(const struct config* config, void* function, void** parameters, void** extra) {
  memset(&last, 0, sizeof last);
  last.function = (intptr_t)function, last.stream = (intptr_t)config->stream, last.block = config->block[0];
  for (int i = 0; i < 3; ++i) last.grid[i] = config->grid[i];
  last.shared = config->shared;
  for (int i = 0; i < num_parameters; ++i) memcpy(last.parameters[i], parameters[i], 16);
  return num_launches++, extra != NULL;
}
// As the native core launches.
API int cuInit(unsigned flags) { return flags != 0; }
API int cuGetErrorName(int status, const char** text) { return *text = "AN_ERROR", status < 0; }
API int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y,
                       unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
  const struct config config = {{x, y, z}, {block, block_y, block_z}, shared, stream, NULL, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
API struct launch* fake_last(int next_parameters) {
  num_parameters = next_parameters;
  return &last;
}
API int fake_launches(void) { return num_launches; }
API int fake_maps(void) { return num_maps; }
