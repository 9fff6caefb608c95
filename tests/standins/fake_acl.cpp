// Stand-in for libascendcl.so: the runtime functions that the copier uses, over a pretended device.
// -DWITHOUT_BATCH leaves out what a CANN before 8.3 has not, -DWITHOUT_SYMBOL a function that every CANN has.
#include "standin.h"

using namespace standin;

namespace {

struct Location {
  std::uint32_t id;
  int type;
};
struct Attributes {
  Location target, source;
  std::uint8_t reserved[16];
};

constexpr int kOk = 0, kInvalidParameter = 107000, kNoDevice = 107001, kNoContext = 107002, kNotSupported = 207000,
              kEventTimeout = 507047;
int device_context;
std::atomic<int> inits{0};

bool bound() { return context == &device_context ? true : (note("a call in a thread without the context"), false); }
bool stream_call(bool done) { return bound() && done; }

int pin(void* begin, std::uint64_t size) {
  if (!bound()) return kNoContext;
  if (reinterpret_cast<std::uintptr_t>(begin) % 4096 != 0 || size == 0) return kInvalidParameter;
  if (is_pinned(begin, 1)) return kInvalidParameter;
  std::lock_guard lock(world().mutex);
  world().pins[reinterpret_cast<std::uintptr_t>(begin)] = size;
  return kOk;
}

#ifndef WITHOUT_BATCH
// Error code, or the copies in `out`.
int check_batch(void** targets, std::size_t* rooms, void** sources, std::size_t* sizes, std::size_t n,
                Attributes* attributes, std::size_t* starts, std::size_t num_attributes, std::size_t* failed,
                std::vector<Copy>& out) {
  {
    std::lock_guard lock(world().mutex);
    if (world().unsupported) return kNotSupported;
  }
  if (!bound()) return kNoContext;
  if (n == 0 || num_attributes != 1 || starts[0] != 0) return note("a bad batch"), kInvalidParameter;
  for (const std::uint8_t byte : attributes->reserved) {
    if (byte != 0) return note("reserved bytes are not zero"), kInvalidParameter;
  }
  const bool load = attributes->target.type == 1;
  const Location &host = load ? attributes->source : attributes->target,
                 &device = load ? attributes->target : attributes->source;
  if (host.type != 0 || device.type != 1 || device.id != 0) return note("bad locations of a batch"), kInvalidParameter;
  for (std::size_t i = 0; i < n; ++i) {
    out.push_back({static_cast<char*>(targets[i]), static_cast<const char*>(sources[i]), sizes[i]});
    if (rooms[i] < sizes[i] || !legal(out.back(), &load)) return *failed = i, kInvalidParameter;
  }
  return failure();
}
#endif

}  // namespace

extern "C" {
int aclInit(const char*) { return inits++ == 0 ? kOk : 100002; }
const char* aclGetRecentErrMsg() { return "an error of the stand-in"; }
int aclrtSetDevice(std::int32_t device) { return device == 0 ? (context = &device_context, kOk) : kNoDevice; }
int aclrtGetCurrentContext(void** out) { return context == nullptr ? kNoContext : (*out = context, kOk); }
int aclrtSetCurrentContext(void* wanted) { return wanted == nullptr ? kInvalidParameter : (context = wanted, kOk); }
int aclrtMemcpyAsync(void* target, std::size_t room, const void* source, std::size_t size, int kind, void* stream) {
  const Copy copy{static_cast<char*>(target), static_cast<const char*>(source), size};
  const bool load = kind == 1;
  if (!bound()) return kNoContext;
  if (room < size || (kind != 1 && kind != 2) || !legal(copy, &load)) return kInvalidParameter;
  if (const int code = failure()) return code;
  Stream* found = stream_of(stream);
  if (found == nullptr) return kInvalidParameter;
  count(1, false);
  return found->add([copy] { execute({copy}); }), kOk;
}
int aclrtHostRegister(void* begin, std::uint64_t size, int type, void** device) {
  return *device = begin, type == 0 ? pin(begin, size) : kInvalidParameter;
}
int aclrtHostUnregister(void* begin) {
  if (!bound()) return kNoContext;
  std::lock_guard lock(world().mutex);
  return world().pins.erase(reinterpret_cast<std::uintptr_t>(begin)) ? kOk : kInvalidParameter;
}
int aclrtCreateStream(void** out) { return bound() ? (*out = create_stream(), kOk) : kNoContext; }
int aclrtDestroyStream(void* stream) { return stream_call(destroy_stream(stream)) ? kOk : kInvalidParameter; }
int aclrtSynchronizeStream(void* stream) {
  Stream* found = stream_of(stream);
  return found == nullptr ? kInvalidParameter : (found->drain(), kOk);
}
int aclrtCreateEventExWithFlag(void** out, std::uint32_t flag) {
  return bound() && flag == 1 ? (*out = create_event(), kOk) : kInvalidParameter;
}
int aclrtDestroyEvent(void* event) { return stream_call(destroy_event(event)) ? kOk : kInvalidParameter; }
int aclrtRecordEvent(void* event, void* stream) { return stream_call(record(event, stream)) ? kOk : kInvalidParameter; }
int aclrtStreamWaitEvent(void* stream, void* event) {
  return stream_call(stream_wait(stream, event)) ? kOk : kInvalidParameter;
}
#ifndef WITHOUT_SYMBOL
int aclrtSynchronizeEventWithTimeout(void* event, std::int32_t milliseconds) {
  if (!bound()) return kNoContext;
  const int done = synchronize(event, milliseconds);
  if (done < 0) return kInvalidParameter;
  std::lock_guard lock(world().mutex);
  return done == 0 ? kEventTimeout : world().broken;
}
#endif
#ifndef WITHOUT_BATCH
int aclrtHostRegisterV2(void* begin, std::uint64_t size, std::uint32_t flag) {
  return flag == 0x10000000 ? pin(begin, size) : kInvalidParameter;
}
int aclrtMemcpyBatch(void** targets, std::size_t* rooms, void** sources, std::size_t* sizes, std::size_t n,
                     Attributes* attributes, std::size_t* starts, std::size_t num_attributes, std::size_t* failed) {
  if (n > 4096) return note("more than 4096 copies in a synchronous batch"), kInvalidParameter;
  std::vector<Copy> copies;
  const int code = check_batch(targets, rooms, sources, sizes, n, attributes, starts, num_attributes, failed, copies);
  if (code != kOk) return code;
  count(n, true);
  return execute(copies), kOk;
}
int aclrtMemcpyBatchAsync(void** targets, std::size_t* rooms, void** sources, std::size_t* sizes, std::size_t n,
                          Attributes* attributes, std::size_t* starts, std::size_t num_attributes, std::size_t* failed,
                          void* stream) {
  std::vector<Copy> copies;
  const int code = check_batch(targets, rooms, sources, sizes, n, attributes, starts, num_attributes, failed, copies);
  if (code != kOk) return code;
  Stream* found = stream_of(stream);
  if (found == nullptr) return kInvalidParameter;
  count(n, true);
  return found->add([copies = std::move(copies)] { execute(copies); }), kOk;
}
#endif
}
