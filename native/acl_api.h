// The part of the Ascend ACL runtime that is used, declared by hand; tests compare it with acl_rt.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xllm::acl {

using Error = int;

struct Location {  // id first, unlike CUDA
  std::uint32_t id;
  int type;
};
struct BatchAttributes {
  Location target, source;
  std::uint8_t reserved[16];
};
static_assert(sizeof(BatchAttributes) == 32);

constexpr Error kSuccess = 0, kRepeatedInit = 100002, kNotSupported = 207000, kEventTimeout = 507047;
constexpr int kHostToDevice = 1, kDeviceToHost = 2, kLocationHost = 0, kLocationDevice = 1, kRegisterMapped = 0;
constexpr std::uint32_t kEventSync = 1, kRegisterPinned = 0x10000000;

// name, signature
#define XLLM_ACL_FUNCTIONS(X)                                                                                          \
  X(aclInit, Error(const char* config))                                                                                \
  X(aclGetRecentErrMsg, const char*())                                                                                 \
  X(aclrtSetDevice, Error(std::int32_t device))                                                                        \
  X(aclrtGetCurrentContext, Error(void** context))                                                                     \
  X(aclrtSetCurrentContext, Error(void* context))                                                                      \
  X(aclrtMemcpyAsync,                                                                                                  \
    Error(void* target, std::size_t room, const void* source, std::size_t bytes, int kind, void* stream))              \
  X(aclrtHostRegister, Error(void* begin, std::uint64_t bytes, int type, void** device))                               \
  X(aclrtHostUnregister, Error(void* begin))                                                                           \
  X(aclrtCreateStream, Error(void** stream))                                                                           \
  X(aclrtDestroyStream, Error(void* stream))                                                                           \
  X(aclrtSynchronizeStream, Error(void* stream))                                                                       \
  X(aclrtCreateEventExWithFlag, Error(void** event, std::uint32_t flag))                                               \
  X(aclrtDestroyEvent, Error(void* event))                                                                             \
  X(aclrtRecordEvent, Error(void* event, void* stream))                                                                \
  X(aclrtStreamWaitEvent, Error(void* stream, void* event))                                                            \
  X(aclrtSynchronizeEventWithTimeout, Error(void* event, std::int32_t milliseconds))

// Not in every CANN: batches from 8.3.RC1, the second form of registration from 8.5.
#define XLLM_ACL_OPTIONAL_FUNCTIONS(X)                                                                                 \
  X(aclrtHostRegisterV2, Error(void* begin, std::uint64_t bytes, std::uint32_t flag))                                  \
  X(aclrtMemcpyBatch, Error(void** targets, std::size_t* rooms, void** sources, std::size_t* sizes, std::size_t count, \
                            BatchAttributes* attributes, std::size_t* attribute_starts, std::size_t num_attributes,    \
                            std::size_t* failed))                                                                      \
  X(aclrtMemcpyBatchAsync, Error(void** targets, std::size_t* rooms, void** sources, std::size_t* sizes,               \
                                 std::size_t count, BatchAttributes* attributes, std::size_t* attribute_starts,        \
                                 std::size_t num_attributes, std::size_t* failed, void* stream))

}  // namespace xllm::acl
