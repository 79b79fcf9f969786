// Times of calls on a device: events that are recorded in the program's own streams, before and after a call, and read
// later by the drain thread. docs/explanation/device-times.md says what that measures, what it cannot, and which
// alternatives were rejected.
//
// Nothing here throws, synchronizes with a device, holds a Work or a tensor, or uses a stream under capture.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "device_clock.h"
#include "device_events.h"
#include "slots.h"

namespace commtrace {

// An event in a stream, and the host's times just before and after it was recorded.
struct TimedEvent {
  EventRef event;
  int64_t submitted = 0, accepted = 0;
  explicit operator bool() const { return event != nullptr; }
};

// The beginning of a call, or of a batch of calls, on its device.
struct DeviceStart {
  Device* device = nullptr;
  std::optional<c10::Stream> stream;
  TimedEvent point;
  bool captured = false;  // into a graph, where no time can be measured
  explicit operator bool() const { return static_cast<bool>(point); }
};

using StartRef = std::shared_ptr<const DeviceStart>;

// A running wait of the program.
struct PendingWait {
  c10::SmallVector<std::pair<Handle, StartRef>, 1> calls;
  DeviceStart before;
};

class DeviceTimes {
 public:
  explicit DeviceTimes(Slots& slots) : slots_(slots) {}

  void open(bool wanted) {
    wanted_ = wanted;
    untimed_ = 0;
    error_ = 0;
    std::lock_guard<std::mutex> held(mutex_);
    closed_ = false;
  }

  bool wanted() const { return wanted_; }

  // ---- called by the threads that communicate -----------------------------------------------------------------------

  // Call this before calls on tensors of this device are redispatched. Empty if their times are not measured.
  DeviceStart begins(c10::Device where) noexcept {
    Device* device = wanted_ ? Device::of(where) : nullptr;
    if (device == nullptr && wanted_ && !where.is_cpu()) count_untimed();
    if (device == nullptr || device->failed()) return {};
    try {
      DeviceStart begun = record_event(*device);
      if (!begun && !begun.captured) count_untimed();
      return begun;
    } catch (const std::exception& error) {
      failed(device, error);
      return {};
    }
  }

  // Counts another call of a batch without an event for its beginning.
  void count_untimed() { untimed_.fetch_add(1, std::memory_order_relaxed); }

  // Call this when the calls, in state kReturned, have returned without a Work: they run and end in the current stream.
  // False if no end will be observed.
  bool ends(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept {
    if (!begun || begun.device->failed()) return false;
    try {
      DeviceStart end = record_event(*begun.device);
      if (!end || end.stream != begun.stream) {
        if (!end && !end.captured) untimed_.fetch_add(calls.size(), std::memory_order_relaxed);
        return false;
      }
      Pending pending{{calls.begin(), calls.end()}, std::move(begun.point), std::move(end.point), {}};
      push(*begun.device, *end.stream, std::move(pending));
      return true;
    } catch (const std::exception& error) {
      failed(begun.device, error);
      return false;
    }
  }

  // Call this when the calls have returned with a Work: the program's wait for it ends them. False if no end will be
  // observed.
  bool runs(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept {
    if (!begun) return false;
    try {
      const auto shared = std::make_shared<const DeviceStart>(std::move(begun));
      std::lock_guard<std::mutex> held(mutex_);
      if (closed_) return false;
      for (Handle call : calls) {
        open_[call.bits] = shared;
        order_.push_back(call.bits);
      }
    } catch (const std::exception&) {  // no memory
      return false;
    }
    return true;
  }

  // Call these before and after the program's wait, which blocks its current stream and not the host.
  PendingWait wait_begins(c10::ArrayRef<Handle> calls) noexcept {
    PendingWait waited;
    if (!wanted_) return waited;
    try {
      {
        std::lock_guard<std::mutex> held(mutex_);
        for (Handle call : calls) {
          const auto entry = open_.find(call.bits);
          if (entry == open_.end()) continue;
          waited.calls.emplace_back(call, std::move(entry->second));
          open_.erase(entry);
        }
      }
      if (waited.calls.empty()) return waited;
      Device& device = *waited.calls.front().second->device;
      if (!device.failed()) waited.before = record_event(device);
    } catch (const std::exception& error) {
      if (!waited.calls.empty()) failed(waited.calls.front().second->device, error);
    }
    return waited;
  }

  void wait_ends(PendingWait waited, bool raised) noexcept {
    if (waited.calls.empty()) return;
    DeviceStart& before = waited.before;
    try {
      DeviceStart after;
      if (before && !raised && !before.device->failed()) after = record_event(*before.device);
      const bool known = after && after.stream == before.stream;
      if (!known && !raised && !before.captured && !after.captured)
        untimed_.fetch_add(waited.calls.size(), std::memory_order_relaxed);
      for (auto& [call, begun] : waited.calls) {
        if (known && begun->device == before.device)
          push(*before.device, *before.stream, {{call}, begun->point, after.point, before.point});
        else
          slots_.finish(call, raised ? kFailed : kUnobservable);
      }
    } catch (const std::exception& error) {
      failed(before.device, error);
      for (const auto& [call, begun] : waited.calls) slots_.finish(call, kUnobservable);
    }
  }

  // ---- called by the drain thread -----------------------------------------------------------------------------------

  // Records the times of calls that the device has completed. Queries events, and blocks only occasionally, for at most
  // two milliseconds, to query an event just after it completes.
  void resolve() noexcept {
    if (!wanted_) return;
    try {
      give_up_old();
      collect_arrivals();
    } catch (const std::exception&) {  // no memory: retried at the next drain
      return;
    }
    int64_t error = 0;
    for (auto& [device, resolver] : resolvers_) {
      if (!device->failed()) {
        try {
          resolve(*device, resolver);
        } catch (const std::exception& why) {
          failed(device, why);
        }
      }
      if (device->failed()) {
        for (auto& [id, stream] : resolver.streams)
          for (const Pending& pending : stream)
            for (Handle call : pending.calls) slots_.finish(call, kUnobservable);
        resolver.streams.clear();
      }
      if (resolver.reference) error = std::max(error, resolver.clock.error());
    }
    error_.store(error, std::memory_order_relaxed);
  }

  // Drops all events. Calls that the device has not completed keep their state.
  void close() noexcept {
    std::unordered_map<uint64_t, StartRef> open;
    std::vector<Arrival> arrived;
    {
      std::lock_guard<std::mutex> held(mutex_);
      closed_ = true;
      open.swap(open_);
      arrived.swap(arrived_);
      order_.clear();
    }
    resolvers_.clear();
  }

  // Number of calls so far without a free event, or on a device that has none.
  uint64_t untimed() const { return untimed_.load(std::memory_order_relaxed); }

  // Largest error of device times on the host's clock, in ns; 0 if there are none.
  int64_t error() const { return error_.load(std::memory_order_relaxed); }

  // Error message of a device that has failed since the last call; empty if none has.
  std::string failure() {
    std::lock_guard<std::mutex> held(mutex_);
    return std::exchange(failure_, {});
  }

 private:
  // Two events of one device, and the calls between them.
  struct Pending {
    c10::SmallVector<Handle, 1> calls;
    TimedEvent begin, end;
    TimedEvent before_wait;  // null if the calls end in the stream itself
    int64_t seen = 0, begin_at = 0, end_at = 0;  // host's time when `end` was seen complete; device's times
  };

  struct Arrival {
    Device* device;
    c10::StreamId stream;
    Pending pending;
  };

  // The last call whose end is exact. Calls of other threads may be launched in another order.
  struct Ended {
    uint32_t seq = 0;
    uint16_t thread = 0;
    int64_t at = 0;
  };

  struct Resolver {  // the drain thread's state of a device
    std::map<c10::StreamId, std::deque<Pending>> streams;  // each in the order in which the device completes it
    DeviceClock clock;
    EventRef reference;  // an event with a known time; others are measured relative to it
    int64_t reference_at = 0;
    std::unordered_map<uint32_t, Ended> ended;  // by group: NCCL runs a group's calls in order, whatever their streams
  };

  static constexpr int64_t kMaxAge = 60'000'000'000;  // ns after which no wait for a call is expected
  static constexpr size_t kMostOpen = Device::kMostEvents / 4;
  // Most ns that an idle stream needs for a wait that is already over, and for an event.
  static constexpr int64_t kIdleWait = 5'000, kIdleEvent = 20'000;
  static constexpr int64_t kLooseClock = 200'000, kSampling = 2'000'000;
  static constexpr int64_t kFar = 4'000'000'000;  // most ns between two events: elapsed times have single precision

  DeviceStart record_event(Device& device) {
    const c10::Stream stream = device.stream();
    if (device.capturing(stream)) return {&device, stream, {}, true};
    const int64_t submitted = now();
    EventRef event = device.record(stream);
    return {&device, stream, {std::move(event), submitted, now()}, false};
  }

  void failed(Device* device, const std::exception& why) noexcept {
    if (device == nullptr || !device->set_failed()) return;
    try {
      std::lock_guard<std::mutex> held(mutex_);
      failure_ = why.what();
    } catch (const std::exception&) {  // no memory
    }
  }

  void push(Device& device, const c10::Stream& stream, Pending pending) {
    std::lock_guard<std::mutex> held(mutex_);
    if (!closed_) arrived_.push_back({&device, stream.id(), std::move(pending)});
  }

  void collect_arrivals() {
    std::vector<Arrival> arrived;
    {
      std::lock_guard<std::mutex> held(mutex_);
      arrived.swap(arrived_);
    }
    for (auto& [device, stream, pending] : arrived) resolvers_[device].streams[stream].push_back(std::move(pending));
  }

  // Gives up the ends of calls without an observed wait, such as DDP's.
  void give_up_old() {
    const int64_t since = now() - kMaxAge;
    std::vector<std::pair<uint64_t, StartRef>> old;
    {
      std::lock_guard<std::mutex> held(mutex_);
      while (!order_.empty()) {
        const auto entry = open_.find(order_.front());
        if (entry != open_.end()) {
          if (open_.size() <= kMostOpen && entry->second->point.submitted > since) break;
          old.emplace_back(entry->first, std::move(entry->second));
          open_.erase(entry);
        }
        order_.pop_front();
      }
    }
    for (const auto& [bits, begun] : old) slots_.finish(Handle{bits}, kUnobservable);
  }

  void resolve(Device& device, Resolver& resolver) {
    device.enter();
    sample_clock(resolver);
    std::vector<Pending> done;
    for (auto stream = resolver.streams.begin(); stream != resolver.streams.end();) {
      auto& queue = stream->second;
      while (!queue.empty() && passed(queue.front())) {
        done.push_back(std::move(queue.front()));
        queue.pop_front();
      }
      stream = queue.empty() ? resolver.streams.erase(stream) : std::next(stream);
    }
    if (done.empty()) return;
    std::sort(done.begin(), done.end(),
              [](const Pending& one, const Pending& other) { return one.begin.submitted < other.begin.submitted; });
    update_reference(resolver, done.front());
    // All are sampled before any time is written: each sample bounds the clock for the others, too.
    for (Pending& pending : done) {
      pending.begin_at = device_time(resolver, pending.begin.event);
      pending.end_at = device_time(resolver, pending.end.event);
      resolver.clock.sample(pending.begin_at, pending.begin.submitted, pending.seen);
      resolver.clock.sample(pending.end_at, pending.end.submitted, pending.seen);
    }
    for (const Pending& pending : done) write_times(resolver, pending);
    const Pending& last = done.back();
    if (last.end_at > resolver.reference_at) {
      resolver.reference = last.end.event;
      resolver.reference_at = last.end_at;
    }
  }

  static bool passed(Pending& pending) {
    if (pending.seen == 0 && pending.end.event->query()) pending.seen = now();
    return pending.seen != 0;
  }

  // If the clock's upper bound is loose, polls for the next event to complete.
  void sample_clock(Resolver& resolver) {
    if (resolver.clock.error() <= kLooseClock) return;
    Pending* next = nullptr;
    for (auto& [id, queue] : resolver.streams)
      for (Pending& pending : queue)
        if (!passed(pending)) {
          if (next == nullptr || pending.end.submitted < next->end.submitted) next = &pending;
          break;
        }
    const int64_t until = now() + kSampling;
    while (next != nullptr && !passed(*next) && now() < until) {
      const timespec pause{0, 20'000};
      nanosleep(&pause, nullptr);
    }
  }

  // After a pause, makes this call's beginning the reference, with a new clock.
  static void update_reference(Resolver& resolver, const Pending& pending) {
    if (resolver.reference) {
      const int64_t since = device_time(resolver, pending.begin.event) - resolver.reference_at;
      if (std::abs(since) < kFar) return;
    }
    resolver.reference = pending.begin.event;
    resolver.reference_at = 0;
    resolver.clock = DeviceClock();
    resolver.ended.clear();
  }

  static int64_t device_time(const Resolver& resolver, const EventRef& event) {
    if (event == resolver.reference) return resolver.reference_at;
    return resolver.reference_at + std::llround(resolver.reference->elapsedTime(*event) * 1e6);
  }

  void write_times(Resolver& resolver, const Pending& pending) {
    const int64_t t_start = resolver.clock.on_host(pending.begin_at, pending.begin.submitted, pending.seen);
    // The time between the events does not depend on the clock.
    const int64_t t_end = t_start + std::llround(pending.begin.event->elapsedTime(*pending.end.event) * 1e6);
    const bool known = is_exact(resolver, pending);
    std::optional<std::pair<uint32_t, Ended>> ended;
    for (Handle call : pending.calls)
      slots_.update(call, [&](Record& record) -> uint8_t {
        if (record.state != kReturned) return record.state;
        record.t_start = t_start;
        if (record.tag == -1) {  // messages have their own streams
          const auto entry = resolver.ended.find(record.group);
          const Ended before = entry == resolver.ended.end() ? Ended{} : entry->second;
          if (before.thread == record.thread && before.seq < record.seq && before.at <= pending.end_at)
            record.t_start = std::max(t_start, t_end - (pending.end_at - before.at));
          if (known) ended = {record.group, {record.seq, record.thread, pending.end_at}};
        }
        record.t_end = t_end;
        record.clock = known ? kDevice : kDeviceWait;
        return kComplete;
      });
    if (ended) resolver.ended[ended->first] = ended->second;  // after the loop: the calls of a batch run together
  }

  // Whether the end is exact. A call in the stream itself ends at its event. A wait shows the end if the stream blocked
  // for it, and was not merely idle when the host recorded the event.
  static bool is_exact(const Resolver& resolver, const Pending& pending) {
    if (!pending.before_wait) return true;
    if (pending.before_wait.event->elapsedTime(*pending.end.event) * 1e6 <= kIdleWait) return false;
    const int64_t end = resolver.clock.on_host(pending.end_at, pending.end.submitted, pending.seen);
    return end > pending.end.accepted + kIdleEvent;
  }

  Slots& slots_;
  bool wanted_ = false;
  std::atomic<uint64_t> untimed_{0};
  std::atomic<int64_t> error_{0};

  std::mutex mutex_;  // guards the following members; never held during calls to a device
  std::unordered_map<uint64_t, StartRef> open_;  // calls that a wait will end, by the bits of their Handle
  std::deque<uint64_t> order_;  // keys of open_, oldest first, including some that were removed
  std::vector<Arrival> arrived_;
  std::string failure_;
  bool closed_ = false;

  std::map<Device*, Resolver> resolvers_;  // used by the drain thread only
};

}  // namespace commtrace
