// Checks that kernels of this build run on the available devices.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda/probe.h"

#ifndef MOE_COMM_CUDA_ARCHS
#define MOE_COMM_CUDA_ARCHS ""
#endif

namespace moe_comm {
namespace {

constexpr int kThreads = 256;

// Sum 1..n with one block. Small, but it needs a cubin (or PTX) for the device, shared memory and a barrier.
__global__ void sum_kernel(int n, int* out) {
  __shared__ int partial[kThreads];
  int sum = 0;
  for (int i = static_cast<int>(threadIdx.x) + 1; i <= n; i += kThreads) sum += i;
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = partial[0];
}

// Return why the kernel did not run, or an empty string. Restores the caller's current device.
std::string run_kernel(int device) {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  constexpr int n = 1000;
  int* out = nullptr;
  int sum = 0;
  if (status == cudaSuccess) status = cudaMalloc(&out, sizeof(int));
  if (status == cudaSuccess) {
    sum_kernel<<<1, kThreads>>>(n, out);
    status = cudaGetLastError();
    if (status == cudaSuccess) status = cudaMemcpy(&sum, out, sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(out);
  }
  cudaSetDevice(previous);
  if (status != cudaSuccess) {
    cudaGetLastError();  // an error that is not cleared would appear in the caller's next CUDA call
    return cudaGetErrorString(status);
  }
  return sum == n * (n + 1) / 2 ? "" : "the kernel gave a wrong sum";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string device_json(const CudaDevice& device) {
  std::string peers;
  for (const int peer : device.peers) peers += (peers.empty() ? "" : ", ") + std::to_string(peer);
  return "{\"index\": " + std::to_string(device.index) + ", \"name\": " + quoted(device.name) + ", \"capability\": \"" +
         std::to_string(device.major) + "." + std::to_string(device.minor) +
         "\", \"multiprocessors\": " + std::to_string(device.multiprocessors) +
         ", \"memory_bytes\": " + std::to_string(device.memory_bytes) +
         ", \"kernel_ran\": " + (device.kernel_ran ? "true" : "false") + ", \"error\": " + quoted(device.error) +
         ", \"peers\": [" + peers + "]}";
}

}  // namespace

std::string cuda_archs() { return MOE_COMM_CUDA_ARCHS; }

CudaProbe cuda_probe() {
  CudaProbe probe;
  probe.archs = cuda_archs();
  cudaRuntimeGetVersion(&probe.runtime_version);
  if (cudaDriverGetVersion(&probe.driver_version) != cudaSuccess) probe.driver_version = 0;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    probe.error = cudaGetErrorString(status);
    return probe;
  }
  for (int index = 0; index < count; ++index) {
    CudaDevice device;
    device.index = index;
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
      device.name = properties.name;
      device.major = properties.major;
      device.minor = properties.minor;
      device.multiprocessors = properties.multiProcessorCount;
      device.memory_bytes = static_cast<long long>(properties.totalGlobalMem);
    }
    for (int peer = 0; peer < count; ++peer) {
      int can = 0;
      if (peer != index && cudaDeviceCanAccessPeer(&can, index, peer) == cudaSuccess && can) {
        device.peers.push_back(peer);
      }
    }
    device.error = run_kernel(index);
    device.kernel_ran = device.error.empty();
    probe.devices.push_back(device);
  }
  return probe;
}

std::string cuda_probe_json() {
  const CudaProbe probe = cuda_probe();
  std::string devices;
  for (const CudaDevice& device : probe.devices) devices += (devices.empty() ? "" : ", ") + device_json(device);
  return "{\"runtime_version\": " + std::to_string(probe.runtime_version) +
         ", \"driver_version\": " + std::to_string(probe.driver_version) + ", \"archs\": " + quoted(probe.archs) +
         ", \"error\": " + quoted(probe.error) + ", \"devices\": [" + devices + "]}";
}

}  // namespace moe_comm
