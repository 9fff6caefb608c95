// Compiles only if the hand-written declarations of native/cuda_api.h agree with the real cuda.h.
#include "cuda_api.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>

#include "abi.h"

using namespace xllm::cuda;

#define CHECK(name, ...) static_assert(CalledAlike<__VA_ARGS__, std::remove_pointer_t<decltype(&name)>>::value, #name);
XLLM_CUDA_FUNCTIONS(CHECK)
static_assert(CalledAlike<MemcpyBatchAsync, std::remove_pointer_t<PFN_cuMemcpyBatchAsync_v12080>>::value);
static_assert(CalledAlike<GetProcAddress, std::remove_pointer_t<PFN_cuGetProcAddress_v12000>>::value);

static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(CopyAttributes, source_access_order) == offsetof(CUmemcpyAttributes, srcAccessOrder));
static_assert(offsetof(CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(CopyAttributes, target_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(offsetof(Location, type) == offsetof(CUmemLocation, type));

static_assert(kSuccess == CUDA_SUCCESS && kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kEventBlockingSync == CU_EVENT_BLOCKING_SYNC && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kAccessStream == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && kAccessAny == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
static_assert(kMemoryTypeAttribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE && kMemoryTypeHost == CU_MEMORYTYPE_HOST);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE && kLocationHost == CU_MEM_LOCATION_TYPE_HOST);
