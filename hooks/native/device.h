// Times of calls on a device: events in the streams that the program itself uses, before and after what is measured, read
// later by the drain thread. docs/how-to/device-times.md says what that measures, what it cannot, and what was rejected.
//
// Nothing here throws, waits for a device, holds a Work or a tensor, or touches a stream under capture.
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

// An event in a stream, and the host's times just before and after it was put there.
struct Point {
  EventRef event;
  int64_t submitted = 0, accepted = 0;
  explicit operator bool() const { return event != nullptr; }
};

// Where a call, or a batch of them, begins on its device.
struct Begun {
  Device* device = nullptr;
  std::optional<c10::Stream> stream;
  Point point;
  bool captured = false;  // into a graph: there is no time to be taken
  explicit operator bool() const { return static_cast<bool>(point); }
};

using BegunRef = std::shared_ptr<const Begun>;

// A wait of the program that is under way.
struct Waited {
  c10::SmallVector<std::pair<Handle, BegunRef>, 1> calls;
  Begun before;
};

class DeviceTimes {
 public:
  explicit DeviceTimes(Slots& slots) : slots_(slots) {}

  // For the log that begins.
  void open(bool wanted);

  bool wanted() const { return wanted_; }

  // ---- by the threads that communicate -------------------------------------------------------------------------------

  // Before calls on tensors of this device are handed on. Empty where no time will be taken.
  Begun begins(c10::Device device) noexcept;

  // Another call of a batch that has no beginning, as no event was left.
  void missed() { untimed_.fetch_add(1, std::memory_order_relaxed); }

  // They returned, and there is no Work: they are in the current stream, and end there. Their state must be kReturned.
  // False where no end will be seen.
  bool ends(c10::ArrayRef<Handle> calls, Begun begun) noexcept;

  // They returned with a Work: the program's wait for it will end them. False where no end will be seen.
  bool runs(c10::ArrayRef<Handle> calls, Begun begun) noexcept;

  // Around the program's wait, which makes its current stream wait, not the host.
  Waited wait_begins(c10::ArrayRef<Handle> calls) noexcept;
  void wait_ends(Waited waited, bool raised) noexcept;

  // ---- by the drain thread -------------------------------------------------------------------------------------------

  // Writes down what the device has passed meanwhile. Asks, and never waits for it but for two milliseconds now and then,
  // to see an event at its time.
  void resolve() noexcept;

  // Lets go of all events. Calls that the device has not come to stay as they are.
  void close() noexcept;

  // Calls that no event was left for, so far.
  uint64_t untimed() const { return untimed_.load(std::memory_order_relaxed); }

  // ns by which times of a device may be early on the host's clock, at most; 0: there are none.
  int64_t error() const { return error_.load(std::memory_order_relaxed); }

  // Why a device is not asked any more; empty where none has failed since the last time.
  std::string failure();

 private:
  // Two points of one device, and whose calls lie between them.
  struct Pending {
    c10::SmallVector<Handle, 1> calls;
    Point begin, end;
    Point before_wait;  // null: the end is the calls' own
    int64_t seen = 0, begin_at = 0, end_at = 0;  // host's time when it was seen passed; device's times
  };

  // A call with a Work whose end is exact. What other threads call meanwhile may be launched in another order.
  struct Ended {
    uint32_t seq = 0;
    uint16_t thread = 0;
    int64_t at = 0;
  };

  struct Resolver {  // what the drain thread knows of a device
    std::map<c10::StreamId, std::deque<Pending>> streams;  // each in the order in which the device passes it
    DeviceClock clock;
    EventRef reference;  // whose time is known, and others' are counted from
    int64_t reference_at = 0;
    std::unordered_map<uint32_t, Ended> ended;  // by group: a backend runs a group's asynchronous calls one by one
  };

  static constexpr int64_t kPatience = 60'000'000'000;  // ns after which nobody is expected to wait for a call any more
  static constexpr size_t kMostOpen = Device::kMostEvents / 4;
  // ns that a stream that stands idle needs, at most, for a wait that is over, and for an event.
  static constexpr int64_t kIdleWait = 5'000, kIdleEvent = 20'000;
  static constexpr int64_t kLooseClock = 200'000, kWatch = 2'000'000;
  static constexpr int64_t kFar = 4'000'000'000;  // ns that an elapsed time in single precision tells to a microsecond

  Begun mark(Device& device);
  void failed(Device* device, const std::exception& why) noexcept;
  void push(Device& device, const c10::Stream& stream, Pending pending);
  void give_up(Handle call);
  void take_over();
  void forget_old();
  void resolve(Device& device, Resolver& resolver);
  static bool passed(Pending& pending);
  void watch(Resolver& resolver);
  static void count_from(Resolver& resolver, const Pending& pending);
  static int64_t read(const Resolver& resolver, const EventRef& event);
  void settle(Resolver& resolver, const Pending& pending);
  static bool exact(const Resolver& resolver, const Pending& pending);

  struct Open {
    BegunRef begun;
    int64_t since = 0;
  };
  struct Arrival {
    Device* device;
    c10::StreamId stream;
    Pending pending;
  };

  Slots& slots_;
  bool wanted_ = false;
  std::atomic<uint64_t> untimed_{0};
  std::atomic<int64_t> error_{0};

  std::mutex mutex_;  // of what follows; never held while a device is asked for anything
  std::unordered_map<uint64_t, Open> open_;
  std::deque<uint64_t> order_;  // of open_, oldest first, with some that are gone
  std::vector<Arrival> arrived_;
  std::string failure_;
  bool closed_ = false;

  std::map<Device*, Resolver> resolvers_;  // the drain thread's
};

}  // namespace commtrace
