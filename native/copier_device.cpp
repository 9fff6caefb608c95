// Lanes: issue, record, complete. See copier_device.h.
#include "copier_device.h"

#include <dlfcn.h>

namespace xllm {
namespace {

// Events are used again only when this many are free: a stream of the caller may still have to reach a wait for the
// last one that was freed, and must not meet a later record of it there.
constexpr std::size_t kRestingEvents = 256;

}  // namespace

Library::Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) {
    const char* why = dlerror();
    throw BackendUnavailable(why != nullptr ? why : name + " cannot be opened");
  }
}

void* Library::find(const char* symbol) const { return dlsym(handle_, symbol); }

void DeviceCopier::open() {
  {
    Entered entered(*this);
    for (Lane& lane : lanes_) lane.stream = create_stream();
  }
  for (Lane& lane : lanes_) {
    lane.issuer = std::thread([this, &lane] { issue_all(lane); });
    lane.completer = std::thread([this, &lane] { complete_all(lane); });
  }
}

void DeviceCopier::stop() {
  for (Lane& lane : lanes_) {
    std::lock_guard lock(lane.mutex);
    lane.stopping = true;
    for (const Job& job : lane.jobs) job.transfer->cancel();
    lane.wake.notify_all();
  }
  for (Lane& lane : lanes_) {
    if (lane.issuer.joinable()) lane.issuer.join();
    if (lane.completer.joinable()) lane.completer.join();
  }
  Entered entered(*this);
  for (Lane& lane : lanes_) {
    for (const Job& job : lane.jobs) put_event(job.producer);
    lane.jobs.clear();
    if (lane.stream != nullptr) destroy_stream(lane.stream);
    lane.stream = nullptr;
  }
  for (void* event : free_events_) destroy_event(event);
  free_events_.clear();
}

void* DeviceCopier::take_event() {
  {
    std::lock_guard lock(events_mutex_);
    if (free_events_.size() > kRestingEvents) {
      void* event = free_events_.front();
      free_events_.pop_front();
      return event;
    }
  }
  return create_event();
}

void DeviceCopier::put_event(void* event) {
  if (event == nullptr) return;
  std::lock_guard lock(events_mutex_);
  free_events_.push_back(event);
}

void DeviceCopier::start(const std::shared_ptr<Transfer>& transfer) {
  const Request& request = transfer->request;
  void* producer = nullptr;
  if (request.after_stream) {
    // Now, in the caller's thread: what the caller launches later is not what this transfer has to wait for.
    try {
      Entered entered(*this);
      producer = take_event();
      record(producer, reinterpret_cast<void*>(*request.after_stream));
    } catch (...) {
      put_event(producer);
      transfer->cancel();
      throw;
    }
  }
  for (std::size_t group = 0; group < transfer->runs.size(); ++group) {
    transfer->set_units(group, transfer->runs[group].empty() ? 0 : 1);
  }
  transfer->start();
  Lane& lane = lanes_[request.direction == Direction::kOffload];
  std::lock_guard lock(lane.mutex);
  if (lane.stopping) transfer->cancel();
  lane.jobs.push_back({transfer, producer});
  lane.wake.notify_all();
}

void DeviceCopier::issue_all(Lane& lane) {
  std::exception_ptr unbound;
  try {
    bind_thread();
  } catch (...) {
    unbound = std::current_exception();
  }
  Batch batch;
  std::unique_lock lock(lane.mutex);
  for (;;) {
    lane.wake.wait(lock, [&] { return lane.stopping || !lane.jobs.empty(); });
    if (lane.stopping) break;
    const Job job = std::move(lane.jobs.front());
    lane.jobs.pop_front();
    lock.unlock();
    issue(lane, job, batch, unbound);
    put_event(job.producer);
    lock.lock();
  }
  lane.issuer_left = true;
  lane.wake.notify_all();
}

void DeviceCopier::issue(Lane& lane, const Job& job, Batch& batch, const std::exception_ptr& unbound) {
  Transfer& transfer = *job.transfer;
  const Direction direction = transfer.request.direction;
  const bool ordered = job.producer != nullptr;
  bool first = true;
  for (std::size_t group = 0; group < transfer.runs.size(); ++group) {
    if (transfer.runs[group].empty()) continue;
    if (!transfer.begin()) return;
    void* event = nullptr;
    try {
      if (unbound) std::rethrow_exception(unbound);
      if (ordered && first) wait_producer(lane.stream, job.producer);
      first = false;
      batch.clear();
      for (const Run& run : transfer.runs[group]) {
        transfer.inject_error(run.first_piece, run.count);
        for (std::size_t i = 0; i < run.count;) {
          batch.sources.push_back(run.source_of(i));
          batch.targets.push_back(run.target_of(i));
          batch.sizes.push_back(run.stretch(i, run.count));
          if (batch.sizes.size() == kMaxBatch) {
            copy(batch, direction, ordered, lane.stream);
            batch.clear();
          }
        }
      }
      if (!batch.sizes.empty()) copy(batch, direction, ordered, lane.stream);
      event = take_event();
      record(event, lane.stream);
    } catch (...) {
      synchronize_stream(lane.stream);  // some copies of this group may be under way
      put_event(event);
      transfer.fail(group, std::current_exception());
      return;
    }
    transfer.recorded(group, event);
    std::lock_guard lock(lane.mutex);
    lane.issued.push_back({job.transfer, group, event});
    lane.wake.notify_all();
  }
}

void DeviceCopier::complete_all(Lane& lane) {
  std::exception_ptr unbound;
  try {
    bind_thread();
  } catch (...) {
    unbound = std::current_exception();
  }
  std::unique_lock lock(lane.mutex);
  for (;;) {
    lane.wake.wait(lock, [&] { return lane.issuer_left || !lane.issued.empty(); });
    if (lane.issued.empty()) return;
    const Issued issued = std::move(lane.issued.front());
    lane.issued.pop_front();
    lock.unlock();
    try {
      if (unbound) std::rethrow_exception(unbound);
      synchronize(issued.event);
      issued.transfer->finish(issued.group, true);
    } catch (...) {
      issued.transfer->fail(issued.group, std::current_exception());
    }
    put_event(issued.event);
    lock.lock();
  }
}

bool DeviceCopier::stream_wait_group(Transfer& transfer, std::size_t group, Address stream,
                                     Clock::time_point deadline) {
  return transfer.with_event(group, deadline, [&](void* event) {
    Entered entered(*this);
    stream_wait(reinterpret_cast<void*>(stream), event);
  });
}

}  // namespace xllm
