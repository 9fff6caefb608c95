// Stand-in for libcuda.so.1: the driver functions that the copier uses, over a pretended device.
#include "standin.h"

using namespace standin;

namespace {

struct Location {
  int type, id;
};
struct Attributes {
  int order;
  Location source, target;
  unsigned flags;
};

constexpr int kOk = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400,
              kAlreadyRegistered = 712, kNotRegistered = 713, kNotSupported = 801;
int primary;
thread_local std::vector<void*> stack;

bool bound() { return context == &primary ? true : (note("a call in a thread without the context"), false); }

int init(unsigned) { return kOk; }
int device_get(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? kOk : kInvalidDevice; }
int retain(void** out, int) {
  std::lock_guard lock(world().mutex);
  ++world().contexts;
  return *out = &primary, kOk;
}
int release(int) {
  std::lock_guard lock(world().mutex);
  --world().contexts;
  return kOk;
}
int set_current(void* wanted) { return context = wanted, kOk; }
int push_current(void* wanted) { return stack.push_back(context), context = wanted, kOk; }
int pop_current(void** out) {
  if (stack.empty()) return kInvalidContext;
  *out = context, context = stack.back();
  return stack.pop_back(), kOk;
}
int stream_create(void** out, unsigned flags) {
  if (!bound()) return kInvalidContext;
  if (flags != 1) note("the copy stream blocks on the legacy stream");
  return *out = create_stream(), kOk;
}
int stream_destroy(void* stream) { return bound() && destroy_stream(stream) ? kOk : kInvalidHandle; }
int stream_synchronize(void* stream) {
  Stream* found = stream_of(stream);
  return found == nullptr ? kInvalidHandle : (found->drain(), kOk);
}
int stream_wait_event(void* stream, void* event, unsigned flags) {
  return bound() && flags == 0 && stream_wait(stream, event) ? kOk : kInvalidHandle;
}
int event_create(void** out, unsigned flags) {
  if (!bound() || !(flags & 2)) return kInvalidValue;
  return *out = create_event(), kOk;
}
int event_destroy(void* event) { return bound() && destroy_event(event) ? kOk : kInvalidHandle; }
int event_record(void* event, void* stream) { return bound() && record(event, stream) ? kOk : kInvalidHandle; }
int event_synchronize(void* event) {
  if (!bound() || synchronize(event, -1) < 0) return kInvalidHandle;
  std::lock_guard lock(world().mutex);
  return world().broken;
}
int host_register(void* begin, std::size_t size, unsigned flags) {
  if (!bound() || flags != 1 || size == 0) return kInvalidValue;
  constexpr std::size_t kPage = 4096;  // the driver pins whole pages
  const auto first = reinterpret_cast<std::uintptr_t>(begin), end = first + size;
  for (std::uintptr_t page = first / kPage * kPage; page < end; page += kPage) {
    if (is_pinned(reinterpret_cast<void*>(std::max(first, page)), 1)) return kAlreadyRegistered;
  }
  std::lock_guard lock(world().mutex);
  world().pins[reinterpret_cast<std::uintptr_t>(begin)] = size;
  return kOk;
}
int host_unregister(void* begin) {
  if (!bound()) return kInvalidContext;
  std::lock_guard lock(world().mutex);
  return world().pins.erase(reinterpret_cast<std::uintptr_t>(begin)) ? kOk : kNotRegistered;
}
int pointer_attribute(void* value, int attribute, unsigned long long pointer) {
  if (attribute != 2 || !is_pinned(reinterpret_cast<void*>(pointer), 1)) return kInvalidValue;
  return *static_cast<int*>(value) = 1, kOk;
}
int copy_one(unsigned long long target, unsigned long long source, std::size_t size, void* stream) {
  const Copy copy{reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source), size};
  if (!bound() || !legal(copy, nullptr)) return kInvalidValue;
  if (const int code = failure()) return code;
  Stream* found = stream_of(stream);
  if (found == nullptr) return kInvalidHandle;
  count(1, false);
  return found->add([copy] { execute({copy}); }), kOk;
}
int copy_batch(unsigned long long* targets, unsigned long long* sources, std::size_t* sizes, std::size_t n,
               Attributes* attributes, std::size_t* starts, std::size_t num_attributes, std::size_t* failed,
               void* stream) {
  {
    std::lock_guard lock(world().mutex);
    if (world().unsupported) return kNotSupported;
  }
  if (!bound()) return kInvalidContext;
  if (stream == nullptr) return note("a batch on the legacy stream"), kInvalidHandle;
  if (n == 0 || num_attributes != 1 || starts[0] != 0 || failed == nullptr) return note("a bad batch"), kInvalidValue;
  const bool load = attributes->target.type == 1;
  const Location host{2, 0}, device{1, 0};
  const auto same = [](Location a, Location b) { return a.type == b.type && a.id == b.id; };
  if (!same(attributes->source, load ? host : device) || !same(attributes->target, load ? device : host) ||
      attributes->flags != 0 || (attributes->order != 1 && !(load && attributes->order == 3))) {
    return note("bad attributes of a batch"), kInvalidValue;
  }
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < n; ++i) {
    copies.push_back({reinterpret_cast<char*>(targets[i]), reinterpret_cast<const char*>(sources[i]), sizes[i]});
    if (!legal(copies.back(), &load)) return *failed = i, kInvalidValue;
  }
  if (const int code = failure()) return code;
  Stream* found = stream_of(stream);
  if (found == nullptr) return kInvalidHandle;
  count(n, true);
  return found->add([copies = std::move(copies)] { execute(copies); }), kOk;
}
int error_name(int code, const char** out) {
  return *out = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR", kOk;
}
int error_string(int, const char** out) { return *out = "an error of the stand-in", kOk; }

}  // namespace

extern "C" int cuGetProcAddress_v2(const char* symbol, void** out, int version, std::uint64_t flags, int* status) {
  static const std::map<std::string, std::pair<void*, int>> table = {
#define ENTRY(name, function, since)                                                                                   \
  {                                                                                                                    \
    name, { reinterpret_cast<void*>(function), since }                                                                 \
  }
      ENTRY("cuInit", init, 2000),
      ENTRY("cuDeviceGet", device_get, 2000),
      ENTRY("cuDevicePrimaryCtxRetain", retain, 7000),
      ENTRY("cuDevicePrimaryCtxRelease", release, 11000),
      ENTRY("cuCtxSetCurrent", set_current, 4000),
      ENTRY("cuCtxPushCurrent", push_current, 4000),
      ENTRY("cuCtxPopCurrent", pop_current, 4000),
      ENTRY("cuStreamCreate", stream_create, 2000),
      ENTRY("cuStreamDestroy", stream_destroy, 4000),
      ENTRY("cuStreamSynchronize", stream_synchronize, 2000),
      ENTRY("cuStreamWaitEvent", stream_wait_event, 3020),
      ENTRY("cuEventCreate", event_create, 2000),
      ENTRY("cuEventDestroy", event_destroy, 4000),
      ENTRY("cuEventRecord", event_record, 2000),
      ENTRY("cuEventSynchronize", event_synchronize, 2000),
      ENTRY("cuMemHostRegister", host_register, 6050),
      ENTRY("cuMemHostUnregister", host_unregister, 4000),
      ENTRY("cuPointerGetAttribute", pointer_attribute, 4000),
      ENTRY("cuMemcpyAsync", copy_one, 4000),
      ENTRY("cuMemcpyBatchAsync", copy_batch, 12080),
      ENTRY("cuGetErrorName", error_name, 6000),
      ENTRY("cuGetErrorString", error_string, 6000),
#undef ENTRY
  };
  if (version >= 13000) note("a version was asked for whose batch copy has eight arguments");
  if (flags != 0) note("unknown lookup flags");
  const auto found = table.find(symbol);
  std::lock_guard lock(world().mutex);
  const bool there = found != table.end() && found->second.second <= version && !world().hidden.count(symbol);
  *out = there ? found->second.first : nullptr;
  *status = there ? 0 : 1;
  return there ? kOk : 500;
}
