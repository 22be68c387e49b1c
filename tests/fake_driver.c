// A CUDA driver for machines that have none: modules load, pointers are valid, and launches are written down.
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { MAX_PARAMETERS = 64 };

// The last launch. Of every parameter the first 8 bytes: more than that none of our kernels takes.
struct Launch {
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared, attributes;
  uint64_t parameters[MAX_PARAMETERS];
} last_launch;
int parameters_of_a_launch, launches;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  memset(&last_launch, 0, sizeof last_launch);
  last_launch.function = (uint64_t)function;
  last_launch.stream = (uint64_t)config->hStream;
  last_launch.grid[0] = config->gridDimX, last_launch.grid[1] = config->gridDimY, last_launch.grid[2] = config->gridDimZ;
  last_launch.block[0] = config->blockDimX, last_launch.block[1] = config->blockDimY, last_launch.block[2] = config->blockDimZ;
  last_launch.shared = config->sharedMemBytes;
  last_launch.attributes = config->numAttrs;
  for (int i = 0; i < parameters_of_a_launch; ++i)
    memcpy(&last_launch.parameters[i], parameters[i], 8);
  ++launches;
  return CUDA_SUCCESS;
}

static uint64_t functions;

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)++functions;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  default: *value = 227 << 10;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)1, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "", CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}
