// A pretended device for tests: streams are threads, "device memory" is ordinary memory that a test declares, copies
// really happen, later, and inside a batch in reverse order. What a real runtime would punish is noted as a problem.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace standin {

struct Copy {
  char* target;
  const char* source;
  std::size_t size;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool busy = false, closing = false;
  std::thread thread;

  Stream() : thread([this] { run(); }) {}
  ~Stream() {
    {
      std::lock_guard lock(mutex);
      closing = true;
    }
    changed.notify_all();
    thread.join();
  }
  void add(std::function<void()> item) {
    std::lock_guard lock(mutex);
    work.push_back(std::move(item));
    changed.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mutex);
    return work.empty() && !busy;
  }
  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return work.empty() && !busy; });
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closing || !work.empty(); });
      if (work.empty()) return;
      const auto item = std::move(work.front());
      work.pop_front();
      busy = true;
      lock.unlock();
      item();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

struct Marks {  // outlives its event, as work in a stream may still refer to it
  std::uint64_t recorded = 0, reached = 0;
};
struct Event {
  std::shared_ptr<Marks> marks = std::make_shared<Marks>();
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<std::uintptr_t, std::size_t> pins, device;
  int contexts = 0;
  std::string problem;
  bool held = false, gate_closed = false, unsupported = false;
  int fail_in = -1, fail_code = 0, broken = 0;
  std::set<std::string> hidden;
  std::int64_t batches = 0, singles = 0, largest = 0;
};

inline World& world() {
  static World* it = new World;  // never destroyed: stream threads may outlive main
  return *it;
}
inline thread_local void* context = nullptr;

inline void note(const std::string& text) {
  std::lock_guard lock(world().mutex);
  if (world().problem.empty()) world().problem = text;
}

inline bool within(const std::map<std::uintptr_t, std::size_t>& map, const void* at, std::size_t size) {
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  auto next = map.upper_bound(first);
  if (next == map.begin()) return false;
  --next;
  return first + size <= next->first + next->second;
}
inline bool is_device(const void* at, std::size_t size) {
  std::lock_guard lock(world().mutex);
  return within(world().device, at, size);
}
inline bool is_pinned(const void* at, std::size_t size) {
  std::lock_guard lock(world().mutex);
  return within(world().pins, at, size);
}

// A copy between pinned and device memory, in the direction said (null: either).
inline bool legal(const Copy& copy, const bool* load) {
  if (copy.size == 0) return note("a copy of no bytes"), false;
  const bool to_device = is_device(copy.target, copy.size) && is_pinned(copy.source, copy.size);
  const bool to_host = is_device(copy.source, copy.size) && is_pinned(copy.target, copy.size);
  if (load == nullptr ? (to_device || to_host) : (*load ? to_device : to_host)) return true;
  return note("a copy of memory that is not pinned or not on the device"), false;
}

inline int failure() {  // the injected error of this copy call, or 0
  std::lock_guard lock(world().mutex);
  return world().fail_in >= 0 && world().fail_in-- == 0 ? world().fail_code : 0;
}

inline void execute(const std::vector<Copy>& copies) {
  World& all = world();
  {
    std::unique_lock lock(all.mutex);
    all.changed.wait(lock, [&] { return !all.held; });
  }
  for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy) std::memcpy(copy->target, copy->source, copy->size);
}

inline void count(std::size_t copies, bool batch) {
  World& all = world();
  std::lock_guard lock(all.mutex);
  ++(batch ? all.batches : all.singles);
  if (batch) all.largest = std::max(all.largest, static_cast<std::int64_t>(copies));
}

inline Stream* stream_of(void* stream) {
  static Stream* of_the_context = new Stream;  // the default stream, never destroyed
  if (stream == nullptr) return of_the_context;
  World& all = world();
  std::lock_guard lock(all.mutex);
  auto* found = static_cast<Stream*>(stream);
  if (all.streams.count(found)) return found;
  if (all.problem.empty()) all.problem = "a stream that does not exist";
  return nullptr;
}
inline Event* event_of(void* event) {
  World& all = world();
  std::lock_guard lock(all.mutex);
  auto* found = static_cast<Event*>(event);
  if (all.events.count(found)) return found;
  if (all.problem.empty()) all.problem = "an event that does not exist";
  return nullptr;
}

inline void* create_stream() {
  auto* stream = new Stream;
  std::lock_guard lock(world().mutex);
  world().streams.insert(stream);
  return stream;
}
inline bool destroy_stream(void* stream) {
  Stream* found = stream_of(stream);
  if (found == nullptr) return false;
  {
    std::lock_guard lock(world().mutex);
    world().streams.erase(found);
  }
  delete found;
  return true;
}
inline void* create_event() {
  auto* event = new Event;
  std::lock_guard lock(world().mutex);
  world().events.insert(event);
  return event;
}
inline bool destroy_event(void* event) {
  Event* found = event_of(event);
  if (found == nullptr) return false;
  std::lock_guard lock(world().mutex);
  if (found->marks->recorded != found->marks->reached) world().problem = "an event was destroyed while it was recorded";
  world().events.erase(found);
  delete found;
  return true;
}

inline bool record(void* event, void* stream) {
  Event* found = event_of(event);
  Stream* on = stream_of(stream);
  if (found == nullptr || on == nullptr) return false;
  std::uint64_t mark;
  {
    std::lock_guard lock(world().mutex);
    mark = ++found->marks->recorded;
  }
  on->add([marks = found->marks, mark] {
    std::lock_guard lock(world().mutex);
    marks->reached = mark;
    world().changed.notify_all();
  });
  return true;
}
// Marks to wait for; a wait for an event that was never recorded would not wait at all.
inline bool recorded_mark(void* event, std::shared_ptr<Marks>& marks, std::uint64_t& mark) {
  Event* found = event_of(event);
  if (found == nullptr) return false;
  std::lock_guard lock(world().mutex);
  marks = found->marks;
  mark = marks->recorded;
  if (mark != 0) return true;
  if (world().problem.empty()) world().problem = "a wait for an event that was never recorded";
  return false;
}
inline bool stream_wait(void* stream, void* event) {
  std::shared_ptr<Marks> marks;
  std::uint64_t mark = 0;
  Stream* on = stream_of(stream);
  if (on == nullptr || !recorded_mark(event, marks, mark)) return false;
  on->add([marks, mark] {
    std::unique_lock lock(world().mutex);
    world().changed.wait(lock, [&] { return marks->reached >= mark; });
  });
  return true;
}
// 1: complete, 0: not within the time, -1: not possible
inline int synchronize(void* event, int milliseconds) {
  std::shared_ptr<Marks> marks;
  std::uint64_t mark = 0;
  if (!recorded_mark(event, marks, mark)) return -1;
  std::unique_lock lock(world().mutex);
  const auto complete = [&] { return marks->reached >= mark; };
  if (milliseconds < 0) return world().changed.wait(lock, complete), 1;
  return world().changed.wait_for(lock, std::chrono::milliseconds(milliseconds), complete) ? 1 : 0;
}

}  // namespace standin

// For the tests, through ctypes.
extern "C" {
const char* standin_problem() {
  static thread_local std::string text;
  std::lock_guard lock(standin::world().mutex);
  text = standin::world().problem;
  standin::world().problem.clear();
  return text.c_str();
}
void standin_live(std::int64_t* out) {
  standin::World& all = standin::world();
  std::lock_guard lock(all.mutex);
  out[0] = static_cast<std::int64_t>(all.streams.size());
  out[1] = static_cast<std::int64_t>(all.events.size());
  out[2] = static_cast<std::int64_t>(all.pins.size());
  out[3] = all.contexts;
}
void standin_calls(std::int64_t* out) {
  standin::World& all = standin::world();
  std::lock_guard lock(all.mutex);
  out[0] = all.batches, out[1] = all.singles, out[2] = all.largest;
}
void standin_reset() {
  standin::World& all = standin::world();
  std::lock_guard lock(all.mutex);
  all.device.clear(), all.hidden.clear(), all.problem.clear();
  all.held = all.gate_closed = all.unsupported = false;
  all.fail_in = -1, all.broken = 0;
  all.batches = all.singles = all.largest = 0;
  all.changed.notify_all();
}
void standin_device_memory(std::uintptr_t begin, std::size_t size) {
  std::lock_guard lock(standin::world().mutex);
  standin::world().device[begin] = size;
}
void standin_hold(int held) {  // copies stay in their streams
  std::lock_guard lock(standin::world().mutex);
  standin::world().held = held != 0;
  standin::world().changed.notify_all();
}
void standin_close_gate(int closed) {  // see standin_stream_gate
  std::lock_guard lock(standin::world().mutex);
  standin::world().gate_closed = closed != 0;
  standin::world().changed.notify_all();
}
void standin_fail(int calls_before, int code) {
  std::lock_guard lock(standin::world().mutex);
  standin::world().fail_in = calls_before, standin::world().fail_code = code;
}
void standin_break(int code) {  // of waiting for events
  std::lock_guard lock(standin::world().mutex);
  standin::world().broken = code;
}
void standin_unsupported(int on) {  // batches are refused though their symbol is there
  std::lock_guard lock(standin::world().mutex);
  standin::world().unsupported = on != 0;
}
void standin_hide(const char* symbol) {
  std::lock_guard lock(standin::world().mutex);
  standin::world().hidden.insert(symbol);
}
void* standin_stream_create() { return standin::create_stream(); }
void standin_stream_destroy(void* stream) { standin::destroy_stream(stream); }
void standin_stream_sync(void* stream) { static_cast<standin::Stream*>(stream)->drain(); }
int standin_stream_idle(void* stream) { return static_cast<standin::Stream*>(stream)->idle(); }
void standin_stream_copy(void* stream, char* target, const char* source, std::size_t size) {
  static_cast<standin::Stream*>(stream)->add([=] { std::memcpy(target, source, size); });
}
void standin_stream_gate(void* stream) {
  static_cast<standin::Stream*>(stream)->add([] {
    standin::World& all = standin::world();
    std::unique_lock lock(all.mutex);
    all.changed.wait(lock, [&] { return !all.gate_closed; });
  });
}
}
