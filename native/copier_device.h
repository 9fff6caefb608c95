// What the device backends share: one lane per direction, each with a copy stream, a thread that issues the groups of
// a transfer and records an event behind each, and a thread that waits for the events.
//
// The order on the host is: copies issued, event recorded, then told to waiters. A waiter that asked an event before it
// was recorded would be told that it is complete.
#pragma once

#include <deque>
#include <thread>

#include "copier.h"

namespace xllm {

// A run-time library; never closed, since its threads may outlive us.
class Library {
 public:
  explicit Library(const std::string& name);  // throws BackendUnavailable with the loader's text
  void* find(const char* symbol) const;       // null: not there

 private:
  void* handle_;
};

// Contiguous copies of one call to the device.
struct Batch {
  std::vector<Address> targets, sources;
  std::vector<std::size_t> sizes;

  void clear() {
    targets.clear();
    sources.clear();
    sizes.clear();
  }
};

constexpr std::size_t kMaxBatch = 4096;  // the limit of aclrtMemcpyBatch; CUDA has none

class DeviceCopier : public Copier {
 public:
  bool stream_wait_group(Transfer& transfer, std::size_t group, Address stream, Clock::time_point deadline) override;

 protected:
  void open();  // last act of a backend's constructor; its destructor calls close()

  // Of the device. All but `bind_thread` and `enter` are called in a thread that is bound.
  virtual void bind_thread() = 0;  // for the life of one of our threads
  virtual void* enter() = 0;       // for one call in a caller's thread, which may have a context of its own
  virtual void leave(void*) noexcept = 0;
  virtual void* create_stream() = 0;
  virtual void* create_event() = 0;
  virtual void destroy_stream(void* stream) noexcept = 0;
  virtual void destroy_event(void* event) noexcept = 0;
  virtual void synchronize_stream(void* stream) noexcept = 0;
  virtual void record(void* event, void* stream) = 0;
  virtual void stream_wait(void* stream, void* event) = 0;
  virtual void synchronize(void* event) = 0;
  // Orders all later copies of `stream` behind `event`.
  virtual void wait_producer(void* stream, void* event) { stream_wait(stream, event); }
  // `ordered`: the copies follow a producer, so their sources may be read only in stream order.
  virtual void copy(Batch& batch, Direction direction, bool ordered, void* stream) = 0;

 private:
  struct Job {
    std::shared_ptr<Transfer> transfer;
    void* producer;  // event or null
  };
  struct Issued {
    std::shared_ptr<Transfer> transfer;
    std::size_t group;
    void* event;
  };
  struct Lane {
    void* stream = nullptr;
    std::thread issuer, completer;
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<Job> jobs;
    std::deque<Issued> issued;
    bool stopping = false, issuer_left = false;
  };
  class Entered {
   public:
    explicit Entered(DeviceCopier& copier) : copier_(copier), before_(copier.enter()) {}
    ~Entered() { copier_.leave(before_); }
    Entered(const Entered&) = delete;

   private:
    DeviceCopier& copier_;
    void* before_;
  };

  void start(const std::shared_ptr<Transfer>& transfer) override;
  void stop() override;
  void issue_all(Lane& lane);
  void issue(Lane& lane, const Job& job, Batch& batch, const std::exception_ptr& unbound);
  void complete_all(Lane& lane);
  void* take_event();
  void put_event(void* event);

  Lane lanes_[2];  // loads, offloads: the link works in both directions at once
  std::mutex events_mutex_;
  std::deque<void*> free_events_;
};

}  // namespace xllm
