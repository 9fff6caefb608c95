// Compiles only if the hand-written declarations of native/acl_api.h agree with the real acl headers.
#include "acl_api.h"

#include <acl/acl_base.h>
#include <acl/acl_rt.h>

#include <cstddef>

#include "abi.h"

extern "C" aclError aclInit(const char*);  // older headers have it in acl.h, which pulls in far more
using namespace xllm::acl;

#define CHECK(name, ...)                                                                                               \
  static_assert(CalledAlike<__VA_ARGS__, std::remove_pointer_t<decltype(&::name)>>::value, #name);
XLLM_ACL_FUNCTIONS(CHECK)
XLLM_ACL_OPTIONAL_FUNCTIONS(CHECK)

static_assert(sizeof(BatchAttributes) == sizeof(aclrtMemcpyBatchAttr));
static_assert(offsetof(BatchAttributes, target) == offsetof(aclrtMemcpyBatchAttr, dstLoc));
static_assert(offsetof(BatchAttributes, source) == offsetof(aclrtMemcpyBatchAttr, srcLoc));
static_assert(offsetof(BatchAttributes, reserved) == offsetof(aclrtMemcpyBatchAttr, rsv));
static_assert(offsetof(Location, id) == offsetof(aclrtMemLocation, id));
static_assert(offsetof(Location, type) == offsetof(aclrtMemLocation, type));

static_assert(kSuccess == ACL_SUCCESS && kRepeatedInit == ACL_ERROR_REPEAT_INITIALIZE);
static_assert(kNotSupported == ACL_ERROR_RT_FEATURE_NOT_SUPPORT && kEventTimeout == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
static_assert(kHostToDevice == ACL_MEMCPY_HOST_TO_DEVICE && kDeviceToHost == ACL_MEMCPY_DEVICE_TO_HOST);
static_assert(kLocationHost == ACL_MEM_LOCATION_TYPE_HOST && kLocationDevice == ACL_MEM_LOCATION_TYPE_DEVICE);
static_assert(kRegisterMapped == ACL_HOST_REGISTER_MAPPED && kRegisterPinned == ACL_HOST_REG_PINNED);
static_assert(kEventSync == ACL_EVENT_SYNC);
