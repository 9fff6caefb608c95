// The part of the CUDA driver API that is used, declared by hand; tests compare it with cuda.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xllm::cuda {

using Result = int;
using DevicePtr = unsigned long long;

struct Location {
  int type, id;
};
struct CopyAttributes {
  int source_access_order;
  Location source_hint, target_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

constexpr Result kSuccess = 0, kNotSupported = 801, kAlreadyRegistered = 712;
constexpr unsigned kStreamNonBlocking = 1, kEventBlockingSync = 1, kEventDisableTiming = 2, kRegisterPortable = 1;
constexpr int kAccessStream = 1, kAccessAny = 3, kLocationDevice = 1, kLocationHost = 2;
constexpr int kMemoryTypeAttribute = 2, kMemoryTypeHost = 1;
constexpr int kBaseVersion = 12000, kBatchVersion = 12080;  // the version fixes the argument list

using GetProcAddress = Result(const char* symbol, void** function, int version, std::uint64_t flags, int* status);

// name, signature
#define XLLM_CUDA_FUNCTIONS(X)                                                                                         \
  X(cuInit, Result(unsigned flags))                                                                                    \
  X(cuDeviceGet, Result(int* device, int ordinal))                                                                     \
  X(cuDevicePrimaryCtxRetain, Result(void** context, int device))                                                      \
  X(cuDevicePrimaryCtxRelease, Result(int device))                                                                     \
  X(cuCtxSetCurrent, Result(void* context))                                                                            \
  X(cuCtxPushCurrent, Result(void* context))                                                                           \
  X(cuCtxPopCurrent, Result(void** context))                                                                           \
  X(cuStreamCreate, Result(void** stream, unsigned flags))                                                             \
  X(cuStreamDestroy, Result(void* stream))                                                                             \
  X(cuStreamSynchronize, Result(void* stream))                                                                         \
  X(cuStreamWaitEvent, Result(void* stream, void* event, unsigned flags))                                              \
  X(cuEventCreate, Result(void** event, unsigned flags))                                                               \
  X(cuEventDestroy, Result(void* event))                                                                               \
  X(cuEventRecord, Result(void* event, void* stream))                                                                  \
  X(cuEventSynchronize, Result(void* event))                                                                           \
  X(cuMemHostRegister, Result(void* begin, std::size_t bytes, unsigned flags))                                         \
  X(cuMemHostUnregister, Result(void* begin))                                                                          \
  X(cuPointerGetAttribute, Result(void* value, int attribute, DevicePtr pointer))                                      \
  X(cuMemcpyAsync, Result(DevicePtr target, DevicePtr source, std::size_t bytes, void* stream))                        \
  X(cuGetErrorName, Result(Result error, const char** text))                                                           \
  X(cuGetErrorString, Result(Result error, const char** text))

// CUDA 12.8; 13.0 has an eight-argument form of the same name, which only a request for 13000 brings.
using MemcpyBatchAsync = Result(DevicePtr* targets, DevicePtr* sources, std::size_t* sizes, std::size_t count,
                                CopyAttributes* attributes, std::size_t* attribute_starts, std::size_t num_attributes,
                                std::size_t* failed, void* stream);

}  // namespace xllm::cuda
