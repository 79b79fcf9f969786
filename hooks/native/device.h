// Times of calls on a device: events that are recorded in the program's own streams, before and after a call, and read
// later by the drain thread. docs/explanation/device-times.md says what that measures, what it cannot, and which
// alternatives were rejected.
//
// Nothing here throws, synchronizes with a device, holds a Work or a tensor, or uses a stream under capture.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

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

  void open(bool wanted);

  bool wanted() const { return wanted_; }

  // ---- called by the threads that communicate ------------------------------------------------------------------------

  // Call this before calls on tensors of this device are redispatched. Empty if their times are not measured.
  DeviceStart begins(c10::Device device) noexcept;

  // Counts a further call of a batch for whose beginning no event was free.
  void count_untimed() { untimed_.fetch_add(1, std::memory_order_relaxed); }

  // Call this when the calls, in state kReturned, have returned without a Work: they run and end in the current stream.
  // False if no end will be observed.
  bool ends(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept;

  // Call this when they have returned with a Work: the program's wait for it ends them. False if no end will be observed.
  bool runs(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept;

  // Call these before and after the program's wait, which blocks its current stream and not the host.
  PendingWait wait_begins(c10::ArrayRef<Handle> calls) noexcept;
  void wait_ends(PendingWait waited, bool raised) noexcept;

  // ---- called by the drain thread ------------------------------------------------------------------------------------

  // Records the times of calls that the device has completed. Queries events, and blocks only now and then, for at most
  // two milliseconds, to see an event just when it completes.
  void resolve() noexcept;

  // Drops all events. Calls that the device has not completed keep their state.
  void close() noexcept;

  // Number of calls so far for which no event was free.
  uint64_t untimed() const { return untimed_.load(std::memory_order_relaxed); }

  // Largest error of device times on the host's clock, in ns; 0 if there are none.
  int64_t error() const { return error_.load(std::memory_order_relaxed); }

  // Error message of a device that has failed since the last call; empty if none has.
  std::string failure();

 private:
  // Two events of one device, and the calls between them.
  struct Pending {
    c10::SmallVector<Handle, 1> calls;
    TimedEvent begin, end;
    TimedEvent before_wait;  // null if the calls end in the stream itself
    int64_t seen = 0, begin_at = 0, end_at = 0;  // host's time when `end` was seen complete; device's times
  };

  // The last call with a Work whose end is exact. Calls of other threads may be launched in another order.
  struct Ended {
    uint32_t seq = 0;
    uint16_t thread = 0;
    int64_t at = 0;
  };

  struct Resolver {  // the drain thread's state of a device
    std::map<c10::StreamId, std::deque<Pending>> streams;  // each in the order in which the device completes it
    DeviceClock clock;
    EventRef reference;  // an event with a known time, relative to which others are measured
    int64_t reference_at = 0;
    std::unordered_map<uint32_t, Ended> ended;  // by group: backends run a group's asynchronous calls in order
  };

  static constexpr int64_t kMaxAge = 60'000'000'000;  // ns after which no wait for a call is expected any more
  static constexpr size_t kMostOpen = Device::kMostEvents / 4;
  // Most ns that an idle stream needs for a wait that is already over, and for an event.
  static constexpr int64_t kIdleWait = 5'000, kIdleEvent = 20'000;
  static constexpr int64_t kLooseClock = 200'000, kSampling = 2'000'000;
  static constexpr int64_t kFar = 4'000'000'000;  // most ns of an elapsed time in single precision

  DeviceStart record_event(Device& device);
  void failed(Device* device, const std::exception& why) noexcept;
  void push(Device& device, const c10::Stream& stream, Pending pending);
  void collect_arrivals();
  void give_up_old();
  void resolve(Device& device, Resolver& resolver);
  static bool passed(Pending& pending);
  void sample_clock(Resolver& resolver);
  static void update_reference(Resolver& resolver, const Pending& pending);
  static int64_t device_time(const Resolver& resolver, const EventRef& event);
  void write_times(Resolver& resolver, const Pending& pending);
  static bool is_exact(const Resolver& resolver, const Pending& pending);

  struct Arrival {
    Device* device;
    c10::StreamId stream;
    Pending pending;
  };

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
