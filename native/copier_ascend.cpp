// The ascend backend: libascendcl.so opened at run time.
//
// Methods: `batch` is aclrtMemcpyBatchAsync, which on A2 and A3 is a loop inside the runtime; `sync_batch` is
// aclrtMemcpyBatch, one call into the driver that blocks the issuing thread; `loop` is aclrtMemcpyAsync per piece.
// Which one is fastest has to be measured on a card.
#include "acl_api.h"
#include "copier_device.h"

namespace xllm {
namespace {

using namespace acl;

struct Api {
  explicit Api(const std::string& name) : library(name.empty() ? "libascendcl.so" : name) {
#define XLLM_FIND(name, ...) name = reinterpret_cast<std::add_pointer_t<__VA_ARGS__>>(library.find(#name));
#define XLLM_NEED(name, ...)                                                                                           \
  XLLM_FIND(name, __VA_ARGS__)                                                                                         \
  if (name == nullptr) throw BackendUnavailable("libascendcl.so has no " #name);
    XLLM_ACL_FUNCTIONS(XLLM_NEED)
    XLLM_ACL_OPTIONAL_FUNCTIONS(XLLM_FIND)
#undef XLLM_NEED
#undef XLLM_FIND
  }

  void check(Error error, const char* call) const {
    if (error == kSuccess) return;
    const char* text = aclGetRecentErrMsg();
    throw DeviceError(error, std::string(call) + ": error " + std::to_string(error) +
                                 (text != nullptr ? std::string(", ") + text : ""));
  }

  Library library;
#define XLLM_DECLARE(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  XLLM_ACL_FUNCTIONS(XLLM_DECLARE)
  XLLM_ACL_OPTIONAL_FUNCTIONS(XLLM_DECLARE)
#undef XLLM_DECLARE
};

enum class Method { kLoop, kBatch, kSyncBatch };

class AscendCopier final : public DeviceCopier {
 public:
  explicit AscendCopier(const Options& options) : api_(options.library), device_(options.device) {
    method_ = choose(options.method);
    const Error initialised = api_.aclInit(nullptr);
    if (initialised != kRepeatedInit) api_.check(initialised, "aclInit");  // torch_npu may have been first
    void* before = nullptr;
    if (api_.aclrtGetCurrentContext(&before) != kSuccess) before = nullptr;
    api_.check(api_.aclrtSetDevice(device_), "aclrtSetDevice");
    api_.check(api_.aclrtGetCurrentContext(&context_), "aclrtGetCurrentContext");
    leave(before);
    open();
  }
  ~AscendCopier() override { close(); }

  std::string method() const override {
    const Method method = method_;
    return method == Method::kLoop ? "loop" : method == Method::kBatch ? "batch" : "sync_batch";
  }

 private:
  Method choose(const std::string& wanted) const {
    if (wanted == "loop") return Method::kLoop;
    if (wanted == "auto") return api_.aclrtMemcpyBatchAsync != nullptr ? Method::kBatch : Method::kLoop;
    const bool sync = wanted == "sync_batch";
    if (!sync && wanted != "batch") {
      throw std::invalid_argument("method '" + wanted + "' is unknown; ascend has: auto, batch, sync_batch, loop");
    }
    if (sync ? api_.aclrtMemcpyBatch == nullptr : api_.aclrtMemcpyBatchAsync == nullptr) {
      throw BackendUnavailable("this CANN has no batch copy (8.3.RC1)");
    }
    return sync ? Method::kSyncBatch : Method::kBatch;
  }

  void bind_thread() override { api_.check(api_.aclrtSetCurrentContext(context_), "aclrtSetCurrentContext"); }
  void* enter() override {
    void* before = nullptr;
    if (api_.aclrtGetCurrentContext(&before) != kSuccess) before = nullptr;
    if (before != context_) bind_thread();
    return before;
  }
  void leave(void* before) noexcept override {
    if (before != nullptr && before != context_) api_.aclrtSetCurrentContext(before);
  }

  bool pin(Region& region) override {
    void* before = enter();
    auto* begin = reinterpret_cast<void*>(region.begin);
    Error error = api_.aclrtHostRegisterV2 != nullptr ? api_.aclrtHostRegisterV2(begin, region.bytes, kRegisterPinned)
                                                      : kNotSupported;
    if (error != kSuccess) {
      void* mapped = nullptr;
      error = api_.aclrtHostRegister(begin, region.bytes, kRegisterMapped, &mapped);
    }
    leave(before);
    // Without registration the runtime copies synchronously, and the overlap would be lost without a word.
    api_.check(error, "aclrtHostRegister");
    return true;
  }
  void unpin(Region& region) override {
    void* before = enter();
    api_.aclrtHostUnregister(reinterpret_cast<void*>(region.begin));
    leave(before);
  }

  void* create_stream() override {
    void* stream = nullptr;
    api_.check(api_.aclrtCreateStream(&stream), "aclrtCreateStream");
    return stream;
  }
  void* create_event() override {
    void* event = nullptr;  // of the kind that may be recorded again: each wait is bound to the record before it
    api_.check(api_.aclrtCreateEventExWithFlag(&event, kEventSync), "aclrtCreateEventExWithFlag");
    return event;
  }
  void destroy_stream(void* stream) noexcept override { api_.aclrtDestroyStream(stream); }
  void destroy_event(void* event) noexcept override { api_.aclrtDestroyEvent(event); }
  void synchronize_stream(void* stream) noexcept override { api_.aclrtSynchronizeStream(stream); }
  void record(void* event, void* stream) override {
    api_.check(api_.aclrtRecordEvent(event, stream), "aclrtRecordEvent");
  }
  void stream_wait(void* stream, void* event) override {
    api_.check(api_.aclrtStreamWaitEvent(stream, event), "aclrtStreamWaitEvent");
  }
  void synchronize(void* event) override {
    Error error;
    do error = api_.aclrtSynchronizeEventWithTimeout(event, 1000);
    while (error == kEventTimeout);
    api_.check(error, "aclrtSynchronizeEventWithTimeout");
  }
  void wait_producer(void* stream, void* event) override {
    // The synchronous batch is in no stream, so the host has to wait for the producer.
    if (method_ == Method::kSyncBatch) return synchronize(event);
    stream_wait(stream, event);
  }

  void copy(Batch& batch, Direction direction, bool, void* stream) override {
    const bool load = direction == Direction::kLoad;
    auto** targets = reinterpret_cast<void**>(batch.targets.data());
    auto** sources = reinterpret_cast<void**>(batch.sources.data());
    std::size_t* sizes = batch.sizes.data();
    const std::size_t count = batch.sizes.size();
    if (method_ != Method::kLoop) {
      const Location host{0, kLocationHost}, device{static_cast<std::uint32_t>(device_), kLocationDevice};
      BatchAttributes attributes{load ? device : host, load ? host : device, {}};
      std::size_t start = 0, failed = 0;
      const Error error =
          method_ == Method::kSyncBatch
              ? api_.aclrtMemcpyBatch(targets, sizes, sources, sizes, count, &attributes, &start, 1, &failed)
              : api_.aclrtMemcpyBatchAsync(targets, sizes, sources, sizes, count, &attributes, &start, 1, &failed,
                                           stream);
      if (error != kNotSupported) return api_.check(error, "aclrtMemcpyBatch");
      method_ = Method::kLoop;  // the symbol is there, the driver's feature is not
    }
    for (std::size_t i = 0; i < count; ++i) {
      api_.check(api_.aclrtMemcpyAsync(targets[i], sizes[i], sources[i], sizes[i], load ? kHostToDevice : kDeviceToHost,
                                       stream),
                 "aclrtMemcpyAsync");
    }
  }

  const Api api_;
  const std::int32_t device_;
  std::atomic<Method> method_{Method::kLoop};
  void* context_ = nullptr;
};

}  // namespace

std::shared_ptr<Copier> make_ascend_copier(const Options& options) { return std::make_shared<AscendCopier>(options); }

}  // namespace xllm
