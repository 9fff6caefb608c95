// Layered copies of cache blocks between host and device: what all backends share. Knows no Python and no device.
//
// A piece is one layer of one block. A table says where the pieces of one kind of block lie on both sides; a transfer
// copies many blocks of some tables, layer group by layer group, and tells which groups are there.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace xllm {

using Address = std::uintptr_t;
using Clock = std::chrono::steady_clock;

struct NativeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct BackendUnavailable : NativeError {
  using NativeError::NativeError;
};
struct TransferTimeout : NativeError {
  using NativeError::NativeError;
};
struct TransferCancelled : NativeError {
  using NativeError::NativeError;
};
struct DeviceError : NativeError {
  DeviceError(int code, const std::string& text) : NativeError(text), code(code) {}
  int code;
};

enum class Direction { kLoad, kOffload };  // host to device, device to host
enum class Kind { kHost, kDevice };

// Memory that copies may touch. `live` and a rise of `users` are guarded by the copier's mutex.
struct Region {
  Address begin;
  std::size_t bytes;
  Kind kind;
  bool pinned = false;  // by us, so it is ours to undo
  bool live = true;
  std::atomic<int> users{0};

  bool covers(Address first, std::size_t size) const {
    return first >= begin && size <= bytes && first - begin <= bytes - size;
  }
};

struct TableSpec {
  std::vector<Address> device_bases;  // block 0 of each row's layer
  std::size_t device_stride;
  std::int64_t device_blocks;
  Address host_base;  // block 0
  std::size_t host_stride;
  std::int64_t host_blocks;
  std::vector<std::size_t> host_offsets;  // of each row's piece within a host block
  std::size_t piece_bytes;
  std::vector<int> layers;  // layer number of each row, ascending
};

struct Table : TableSpec {
  explicit Table(TableSpec spec) : TableSpec(std::move(spec)) {}
  std::vector<std::shared_ptr<Region>> regions;
};

struct Part {
  std::shared_ptr<const Table> table;
  std::vector<std::int64_t> device_ids, host_ids;
};

// The pieces of one layer of one part, as (source, target) addresses and strides.
struct Run {
  Address source, target;
  std::size_t source_stride, target_stride, bytes;
  const std::int64_t *source_ids, *target_ids;
  std::size_t count;
  std::int64_t first_piece;  // number of its first piece within the transfer

  Address source_of(std::size_t i) const { return source + static_cast<std::size_t>(source_ids[i]) * source_stride; }
  Address target_of(std::size_t i) const { return target + static_cast<std::size_t>(target_ids[i]) * target_stride; }

  // Length in bytes of the longest stretch from piece `i` below `end` that is contiguous on both sides; moves `i` on.
  std::size_t stretch(std::size_t& i, std::size_t end) const {
    std::size_t size = bytes;
    const Address from = source_of(i), to = target_of(i);
    for (++i; i < end && source_of(i) == from + size && target_of(i) == to + size; ++i) size += bytes;
    return size;
  }
};

struct Request {
  Direction direction;
  std::vector<Part> parts;
  std::vector<std::pair<int, int>> groups;  // [first layer, end layer), ascending
  std::optional<Address> after_stream;
  std::int64_t fail_at_piece = -1;  // for tests
};

// Progress of one submitted request. Backends begin and finish units of work; any thread may wait.
class Transfer {
 public:
  explicit Transfer(Request request);
  ~Transfer();
  Transfer(const Transfer&) = delete;

  // False when the deadline came first. Both throw the first error, but only after every copy has ended.
  bool wait_group(std::size_t group, Clock::time_point deadline);
  bool wait_all(Clock::time_point deadline);
  bool wait_ended(Clock::time_point deadline);  // as wait_all, throws nothing
  bool done(std::size_t group);
  bool ended();
  void cancel();
  std::exception_ptr error();  // null until it has ended

  // For backends. A unit is a chunk (cpu) or a group (devices).
  void set_units(std::size_t group, std::size_t units) { groups_.at(group).left = units; }
  void start();                                 // all units are set
  bool begin();                                 // false: stopped, start nothing more
  void finish(std::size_t group, bool copied);  // of a unit that began
  void fail(std::size_t group, std::exception_ptr error);
  bool stopped() const { return stop_.load(std::memory_order_relaxed); }
  void inject_error(std::int64_t first_piece, std::size_t count) const;

  // Device backends: the event of a group lives from the moment it is recorded until the group is done.
  void recorded(std::size_t group, void* event);
  // Calls `use(event)` unless the group is done; false when the event was not recorded by the deadline.
  template <class Use>
  bool with_event(std::size_t group, Clock::time_point deadline, Use use) {
    std::unique_lock lock(mutex_);
    Group& entry = groups_.at(group);
    const bool ready =
        changed_.wait_until(lock, deadline, [&] { return ended_ || (!stop_ && (entry.left == 0 || entry.event)); });
    if (!ready) return false;
    rethrow_locked();
    if (entry.left != 0) use(entry.event);
    return true;
  }

  const Request request;
  std::vector<std::vector<Run>> runs;  // by group
  std::size_t bytes = 0;
  std::int64_t pieces = 0;

 private:
  struct Group {
    std::size_t left = 0;
    void* event = nullptr;
  };
  void end_if_over_locked();
  void rethrow_locked() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Group> groups_;
  std::size_t groups_left_ = 0;
  std::size_t running_ = 0;
  std::atomic<bool> stop_{false};
  bool started_ = false, ended_ = false;
  std::exception_ptr error_;
};

class Copier {
 public:
  virtual ~Copier() = default;

  std::shared_ptr<Region> register_region(Address begin, std::size_t bytes, Kind kind);
  void unregister_region(Region& region);
  std::shared_ptr<Table> table(TableSpec spec);
  std::shared_ptr<Transfer> submit(Request request);
  void close();

  // Makes `stream` wait for the group; false when the deadline came before its event was recorded.
  virtual bool stream_wait_group(Transfer&, std::size_t, Address, Clock::time_point) {
    throw NativeError("the cpu backend has no streams: use wait_group");
  }
  virtual std::string method() const = 0;
  virtual void set_bytes_per_second(double) { throw std::invalid_argument("only the cpu backend can be throttled"); }
  virtual double bytes_per_second() const { return 0; }

 protected:
  virtual bool pin(Region&) { return false; }  // true: pinned by us
  virtual void unpin(Region&) {}
  virtual void start(const std::shared_ptr<Transfer>& transfer) = 0;
  virtual void stop() = 0;            // cancel what has not started, wait for the rest, join the threads
  virtual void release() noexcept {}  // last act of close

 private:
  std::shared_ptr<Region> find_locked(Address first, std::size_t size, Kind kind) const;
  void check(const Request& request) const;

  std::mutex mutex_;
  std::vector<std::shared_ptr<Region>> regions_;
  bool closed_ = false;
};

struct Options {
  int threads = 1;
  int device = 0;
  std::string method = "auto";
  double bytes_per_second = 0;
  std::string library;  // of the device's runtime; empty: the usual name
};

std::shared_ptr<Copier> make_cpu_copier(const Options& options);
std::shared_ptr<Copier> make_cuda_copier(const Options& options);
std::shared_ptr<Copier> make_ascend_copier(const Options& options);

}  // namespace xllm
