// The cpu backend: both tiers are ordinary memory, worker threads copy pieces with streaming stores.
//
// A plain memcpy first reads each target line into the cache, although all of it will be overwritten. Streaming
// stores skip that read, which is a third of the traffic, and leave the cache to the forward. And one core waits for
// memory most of the time: four pieces copied in turns keep four of its prefetchers busy, which gains as much again.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "copier.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace xllm {
namespace {

constexpr std::size_t kLanes = 4;

// Copies `size` bytes, a multiple of 128, in each of four lanes in turns; targets begin on a cache line.
using CopyLanes = void (*)(char* const* to, const char* const* from, std::size_t size);

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void lanes_avx512(char* const* to, const char* const* from, std::size_t size) {
  for (std::size_t i = 0; i < size; i += 128) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const __m512i a = _mm512_loadu_si512(from[lane] + i), b = _mm512_loadu_si512(from[lane] + i + 64);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to[lane] + i), a);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to[lane] + i + 64), b);
    }
  }
}

__attribute__((target("avx2"))) void lanes_avx2(char* const* to, const char* const* from, std::size_t size) {
  for (std::size_t i = 0; i < size; i += 128) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const auto* source = reinterpret_cast<const __m256i*>(from[lane] + i);
      auto* target = reinterpret_cast<__m256i*>(to[lane] + i);
      const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
      const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
      _mm256_stream_si256(target, a);
      _mm256_stream_si256(target + 1, b);
      _mm256_stream_si256(target + 2, c);
      _mm256_stream_si256(target + 3, d);
    }
  }
}

void fence() { _mm_sfence(); }  // streaming stores are visible to others only behind this
#else
void fence() {}
#endif

struct Method {
  std::string name;
  CopyLanes lanes;  // null: memcpy
};

Method choose(const std::string& wanted) {
#if defined(__x86_64__)
  const bool any = wanted == "auto" || wanted == "streaming";
  if ((any || wanted == "avx512") && __builtin_cpu_supports("avx512f")) return {"avx512", lanes_avx512};
  if ((any || wanted == "avx2") && __builtin_cpu_supports("avx2")) return {"avx2", lanes_avx2};
#endif
  if (wanted == "auto" || wanted == "memcpy") return {"memcpy", nullptr};
  throw std::invalid_argument("method '" + wanted + "' is unknown or not possible on this processor; cpu has: auto, " +
                              "memcpy, streaming, avx2, avx512");
}

constexpr std::size_t kStreamFrom = 2048;  // below, what odd addresses cost is more than streaming saves

// Four copies of `size` bytes at any addresses.
void copy_four(CopyLanes lanes, char** to, const char** from, std::size_t size) {
  std::size_t rest[kLanes], common = size;
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::size_t head = -reinterpret_cast<Address>(to[lane]) % 64;
    std::memcpy(to[lane], from[lane], head);
    to[lane] += head;
    from[lane] += head;
    rest[lane] = size - head;
    common = std::min(common, rest[lane]);
  }
  common -= common % 128;
  lanes(to, from, common);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    std::memcpy(to[lane] + common, from[lane] + common, rest[lane] - common);
  }
}

// One copy, as four of its quarters.
void copy_quarters(CopyLanes lanes, char* to, const char* from, std::size_t size) {
  const std::size_t quarter = size / kLanes;
  char* targets[kLanes];
  const char* sources[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    targets[lane] = to + lane * quarter;
    sources[lane] = from + lane * quarter;
  }
  copy_four(lanes, targets, sources, quarter);
  std::memcpy(to + kLanes * quarter, from + kLanes * quarter, size - kLanes * quarter);
}

constexpr std::size_t kChunkBytes = 512 << 10;  // unit of work of one thread: some 60 us

struct Chunk {
  std::size_t group;
  const Run* run;
  std::size_t first, count;
};

struct Job {
  std::shared_ptr<Transfer> transfer;
  std::vector<Chunk> chunks;
  std::size_t next = 0;
};

class CpuCopier final : public Copier {
 public:
  explicit CpuCopier(const Options& options) : method_(choose(options.method)) {
    if (options.threads < 1 || options.threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
    set_bytes_per_second(options.bytes_per_second);
    for (int i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~CpuCopier() override { close(); }

  std::string method() const override { return method_.name; }
  double bytes_per_second() const override { return bytes_per_second_; }
  void set_bytes_per_second(double rate) override {
    if (!(rate >= 0)) throw std::invalid_argument("bytes_per_second must be 0 (no limit) or above");
    std::lock_guard lock(pace_mutex_);
    bytes_per_second_ = rate;
    link_free_ = {};
  }

 private:
  void start(const std::shared_ptr<Transfer>& transfer) override {
    if (transfer->request.after_stream.value_or(0) != 0) {
      transfer->cancel();
      throw std::invalid_argument("the cpu backend has no streams: after_stream must be None or 0");
    }
    Job job{transfer, {}};
    for (std::size_t group = 0; group < transfer->runs.size(); ++group) {
      const std::size_t before = job.chunks.size();
      for (const Run& run : transfer->runs[group]) {
        const std::size_t step = std::max(kLanes, kChunkBytes / run.bytes / kLanes * kLanes);
        for (std::size_t first = 0; first < run.count; first += step) {
          job.chunks.push_back({group, &run, first, std::min(step, run.count - first)});
        }
      }
      transfer->set_units(group, job.chunks.size() - before);
    }
    transfer->start();
    if (job.chunks.empty()) return;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) transfer->cancel();
      queue_[transfer->request.direction == Direction::kOffload].push_back(std::move(job));
    }
    wake_.notify_all();
  }

  void stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      for (auto& queue : queue_) {
        for (const Job& job : queue) job.transfer->cancel();
        queue.clear();
      }
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      // Loads first: a forward waits for them, and nobody for an offload.
      std::deque<Job>& queue = queue_[queue_[0].empty()];
      if (queue.empty()) {
        if (stopping_) return;
        wake_.wait(lock);
        continue;
      }
      Job& job = queue.front();
      const std::shared_ptr<Transfer> transfer = job.transfer;
      if (!transfer->begin()) {
        queue.pop_front();
        continue;
      }
      const Chunk chunk = job.chunks[job.next++];
      if (job.next == job.chunks.size()) queue.pop_front();
      lock.unlock();
      try {
        const bool copied = copy(chunk, *transfer);
        if (!copied) transfer->cancel();
        transfer->finish(chunk.group, copied);
      } catch (...) {
        transfer->fail(chunk.group, std::current_exception());
      }
      lock.lock();
    }
  }

  // False when it was told to stop on the way.
  bool copy(const Chunk& chunk, const Transfer& transfer) {
    const Run& run = *chunk.run;
    transfer.inject_error(run.first_piece + static_cast<std::int64_t>(chunk.first), chunk.count);
    const std::size_t end = chunk.first + chunk.count;
    const bool throttled = bytes_per_second_ > 0, streaming = method_.lanes != nullptr && run.bytes >= kStreamFrom;
    for (std::size_t i = chunk.first; i < end;) {
      if (throttled && !pace(run.bytes, transfer)) return false;
      if (streaming && !throttled && end - i >= kLanes) {
        char* to[kLanes];
        const char* from[kLanes];
        for (std::size_t lane = 0; lane < kLanes; ++lane, ++i) {
          to[lane] = reinterpret_cast<char*>(run.target_of(i));
          from[lane] = reinterpret_cast<const char*>(run.source_of(i));
        }
        copy_four(method_.lanes, to, from, run.bytes);
        continue;
      }
      auto* to = reinterpret_cast<char*>(run.target_of(i));
      const auto* from = reinterpret_cast<const char*>(run.source_of(i));
      if (streaming) {
        copy_quarters(method_.lanes, to, from, run.bytes);
        ++i;
      } else {
        const std::size_t size = run.stretch(i, throttled ? i + 1 : end);
        std::memcpy(to, from, size);
      }
    }
    fence();
    return true;
  }

  // Sleeps as long as a link of `bytes_per_second`, shared by all threads, needs for `size` bytes; false when told to
  // stop. A change of the rate counts at once, also for what is under way.
  bool pace(std::size_t size, const Transfer& transfer) {
    constexpr auto kSlice = std::chrono::milliseconds(2);
    for (;;) {
      std::unique_lock lock(pace_mutex_);
      const double rate = bytes_per_second_;
      if (rate == 0) return true;
      const std::chrono::duration<double> cost(std::min(static_cast<double>(size) / rate, 3600.0));
      const auto end = std::max(Clock::now(), link_free_) + std::chrono::duration_cast<Clock::duration>(cost);
      link_free_ = end;
      lock.unlock();
      for (auto now = Clock::now(); rate == bytes_per_second_; now = Clock::now()) {
        if (now >= end) return true;
        if (transfer.stopped() || stopping_) {
          lock.lock();
          link_free_ = std::min(link_free_, now);  // what did not travel does not keep the link busy
          return false;
        }
        std::this_thread::sleep_for(std::min<Clock::duration>(end - now, kSlice));
      }
    }
  }

  const Method method_;
  std::atomic<double> bytes_per_second_{0};
  std::mutex pace_mutex_;
  Clock::time_point link_free_{};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_[2];  // loads, offloads
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace

std::shared_ptr<Copier> make_cpu_copier(const Options& options) {
  if (!options.library.empty()) throw std::invalid_argument("the cpu backend needs no library");
  return std::make_shared<CpuCopier>(options);
}

}  // namespace xllm
