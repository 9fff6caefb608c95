// The cuda backend: libcuda.so.1 opened at run time, cuMemcpyBatchAsync where the driver has it.
#include "copier_device.h"
#include "cuda_api.h"

namespace xllm {
namespace {

using namespace cuda;
static_assert(sizeof(Address) == sizeof(DevicePtr));

struct Api {
  explicit Api(const std::string& name) : library(name.empty() ? "libcuda.so.1" : name) {
    // Only this one is looked up by its bare name: a bare name may be bound to any version of a function.
    auto* get = reinterpret_cast<GetProcAddress*>(library.find("cuGetProcAddress_v2"));
    if (get == nullptr)
      throw BackendUnavailable("libcuda.so.1 has no cuGetProcAddress_v2: a driver of CUDA 12 is needed");
    const auto find = [&](const char* symbol, int version) {
      void* function = nullptr;
      int status = 0;
      return get(symbol, &function, version, 0, &status) == kSuccess ? function : nullptr;
    };
#define XLLM_FIND(name, ...)                                                                                           \
  name = reinterpret_cast<std::add_pointer_t<__VA_ARGS__>>(find(#name, kBaseVersion));                                 \
  if (name == nullptr) throw BackendUnavailable("libcuda.so.1 has no " #name);
    XLLM_CUDA_FUNCTIONS(XLLM_FIND)
#undef XLLM_FIND
    batch = reinterpret_cast<MemcpyBatchAsync*>(find("cuMemcpyBatchAsync", kBatchVersion));
  }

  void check(Result result, const char* call) const {
    if (result != kSuccess) throw DeviceError(result, describe(result, call));
  }

  std::string describe(Result result, const char* call) const {
    const char *name = nullptr, *text = nullptr;
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    return std::string(call) + ": " + (name != nullptr ? name : "error") + " (" + std::to_string(result) + ")" +
           (text != nullptr ? std::string(", ") + text : "");
  }

  Library library;
#define XLLM_DECLARE(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  XLLM_CUDA_FUNCTIONS(XLLM_DECLARE)
#undef XLLM_DECLARE
  MemcpyBatchAsync* batch = nullptr;
};

class CudaCopier final : public DeviceCopier {
 public:
  explicit CudaCopier(const Options& options) : api_(options.library) {
    if (options.method != "auto" && options.method != "batch" && options.method != "loop") {
      throw std::invalid_argument("method '" + options.method + "' is unknown; cuda has: auto, batch, loop");
    }
    if (options.method == "batch" && api_.batch == nullptr) {
      throw BackendUnavailable("this driver has no cuMemcpyBatchAsync (CUDA 12.8)");
    }
    batched_ = options.method != "loop" && api_.batch != nullptr;
    if (const Result result = api_.cuInit(0)) throw BackendUnavailable(api_.describe(result, "cuInit"));
    api_.check(api_.cuDeviceGet(&device_, options.device), "cuDeviceGet");
    // The primary context is the one PyTorch uses: pointers, streams and events mix.
    api_.check(api_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    open();
  }
  ~CudaCopier() override { close(); }

  std::string method() const override { return batched_ ? "batch" : "loop"; }

 private:
  void release() noexcept override { api_.cuDevicePrimaryCtxRelease(device_); }
  void bind_thread() override { api_.check(api_.cuCtxSetCurrent(context_), "cuCtxSetCurrent"); }
  void* enter() override {
    api_.check(api_.cuCtxPushCurrent(context_), "cuCtxPushCurrent");
    return nullptr;
  }
  void leave(void*) noexcept override {
    void* popped = nullptr;
    api_.cuCtxPopCurrent(&popped);
  }

  bool pin(Region& region) override {
    void* before = enter();
    const Result result =
        api_.cuMemHostRegister(reinterpret_cast<void*>(region.begin), region.bytes, kRegisterPortable);
    // Pinned by somebody else, for instance by PyTorch, is as good; in part, as when two regions share a page, is not.
    const bool whole = is_pinned(region.begin) && is_pinned(region.begin + region.bytes - 1);
    leave(before);
    if (result == kAlreadyRegistered && whole) return false;
    api_.check(result, "cuMemHostRegister");
    return true;
  }
  bool is_pinned(Address address) const {
    int type = 0;
    return api_.cuPointerGetAttribute(&type, kMemoryTypeAttribute, address) == kSuccess && type == kMemoryTypeHost;
  }
  void unpin(Region& region) override {
    void* before = enter();
    api_.cuMemHostUnregister(reinterpret_cast<void*>(region.begin));
    leave(before);
  }

  void* create_stream() override {
    void* stream = nullptr;
    api_.check(api_.cuStreamCreate(&stream, kStreamNonBlocking), "cuStreamCreate");
    return stream;
  }
  void* create_event() override {
    void* event = nullptr;
    api_.check(api_.cuEventCreate(&event, kEventDisableTiming | kEventBlockingSync), "cuEventCreate");
    return event;
  }
  void destroy_stream(void* stream) noexcept override { api_.cuStreamDestroy(stream); }
  void destroy_event(void* event) noexcept override { api_.cuEventDestroy(event); }
  void synchronize_stream(void* stream) noexcept override { api_.cuStreamSynchronize(stream); }
  void record(void* event, void* stream) override { api_.check(api_.cuEventRecord(event, stream), "cuEventRecord"); }
  void stream_wait(void* stream, void* event) override {
    api_.check(api_.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
  }
  void synchronize(void* event) override { api_.check(api_.cuEventSynchronize(event), "cuEventSynchronize"); }

  void copy(Batch& batch, Direction direction, bool ordered, void* stream) override {
    if (batched_) {
      const bool load = direction == Direction::kLoad;
      const Location host{kLocationHost, 0}, device{kLocationDevice, device_};
      // Pinned host memory may be read at any time unless a producer writes it; the device writes in stream order.
      CopyAttributes attributes{load && !ordered ? kAccessAny : kAccessStream, load ? host : device,
                                load ? device : host, 0};
      std::size_t start = 0, failed = 0;
      const Result result = api_.batch(reinterpret_cast<DevicePtr*>(batch.targets.data()),
                                       reinterpret_cast<DevicePtr*>(batch.sources.data()), batch.sizes.data(),
                                       batch.sizes.size(), &attributes, &start, 1, &failed, stream);
      if (result != kNotSupported) return api_.check(result, "cuMemcpyBatchAsync");
      batched_ = false;
    }
    for (std::size_t i = 0; i < batch.sizes.size(); ++i) {
      api_.check(api_.cuMemcpyAsync(batch.targets[i], batch.sources[i], batch.sizes[i], stream), "cuMemcpyAsync");
    }
  }

  const Api api_;
  std::atomic<bool> batched_{false};
  int device_ = 0;
  void* context_ = nullptr;
};

}  // namespace

std::shared_ptr<Copier> make_cuda_copier(const Options& options) { return std::make_shared<CudaCopier>(options); }

}  // namespace xllm
