/* As much of the CUDA driver as Triton's driver asks for: everything succeeds, nothing runs. */
#include <stdint.h>
#include <string.h>

static int thing;
int cuCtxGetCurrent(void **context) { *context = &thing; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &thing; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &thing; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = &thing; return 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { *clusters = 1; return 0; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return 0; }
