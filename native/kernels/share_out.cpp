// Threads and memory of the kernels: torch's own OpenMP team does the work, so that no second pool of threads competes.
#include <atomic>
#include <exception>
#include <mutex>
#include <vector>

#include "rows.h"

namespace xllm::rows {
namespace {

struct Shared {
  const std::function<void(std::int64_t)>* item;
  std::int64_t items;
  const Torch* torch;
  std::atomic<std::int64_t> next{0};
  std::mutex lock;
  std::exception_ptr failure;
};

void work(void* data) {
  auto& shared = *static_cast<Shared*>(data);
  try {
    for (;;) {
      const std::int64_t number = shared.next.fetch_add(1, std::memory_order_relaxed);
      if (number >= shared.items) break;
      (*shared.item)(number);
    }
  } catch (...) {
    const std::lock_guard<std::mutex> guard(shared.lock);
    if (!shared.failure) shared.failure = std::current_exception();
    shared.next.store(shared.items, std::memory_order_relaxed);
  }
  if (shared.torch->brgemm_bf16 && shared.torch->release) shared.torch->release(true);
}

}  // namespace

void share_out(const Torch& torch, int threads, std::int64_t items, const std::function<void(std::int64_t)>& item) {
  if (items <= 0) return;
  Shared shared{&item, items, &torch, {}, {}, {}};
  const std::int64_t team = items < threads ? items : threads;
  if (team <= 1) {
    work(&shared);
  } else {
    torch.parallel(work, &shared, static_cast<unsigned>(team), 0);
  }
  if (shared.failure) std::rethrow_exception(shared.failure);
}

void* scratch(int slot, std::size_t bytes) {
  struct Buffer {
    std::unique_ptr<std::uint8_t[]> memory;
    std::size_t bytes = 0;
  };
  thread_local Buffer buffers[4];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    buffer.memory.reset(new std::uint8_t[bytes + 64]);
    buffer.bytes = bytes;
  }
  const auto at = reinterpret_cast<std::uintptr_t>(buffer.memory.get());
  return reinterpret_cast<void*>((at + 63) / 64 * 64);
}

}  // namespace xllm::rows
