// Conversion of a device's times to the host's clock. Independent of torch and of devices
// (tests/support/native_programs/device_clock.cpp).
#pragma once

#include <algorithm>
#include <cstdint>

namespace commtrace {

// A device completes an event after the host has submitted it and before the host observes its completion. So each event
// bounds the offset between the two clocks from both sides, without a synchronization. The lower bound is tight once an
// event was submitted to an idle stream, the upper bound once an event was queried just after it completed.
//
// All times are in ns; the origin of the device's times is arbitrary.
class DeviceClock {
 public:
  // Largest drift between the clocks: two crystals of 50 ppm each.
  static constexpr int64_t kDriftOneIn = 10'000;

  // Resolution of the device's times in ns: half a microsecond on CUDA, and as much for rounding.
  static constexpr int64_t kResolution = 1'000;

  void sample(int64_t device, int64_t submitted, int64_t seen) {
    if (known_ && device > latest_) {
      const int64_t drift = (device - latest_) / kDriftOneIn + 1;
      least_ -= drift;
      most_ += drift;
    }
    const int64_t loose = kResolution + (known_ && device < latest_ ? (latest_ - device) / kDriftOneIn + 1 : 0);
    const int64_t least = submitted - device - loose, most = seen - device + loose;
    latest_ = known_ ? std::max(latest_, device) : device;
    // If the bounds contradict each other, a clock was set or stopped while the machine slept. The newest bounds hold.
    const bool agrees = known_ && least <= most_ && most >= least_;
    least_ = agrees ? std::max(least_, least) : least;
    most_ = agrees ? std::min(most_, most) : most;
    known_ = true;
  }

  // The device's time on the host's clock: never too late, and too early by at most `error()`.
  int64_t on_host(int64_t device, int64_t submitted, int64_t seen) const {
    return std::clamp(device + least_, submitted, std::max(submitted, seen));
  }

  int64_t error() const { return known_ ? most_ - least_ : INT64_MAX; }

 private:
  bool known_ = false;
  int64_t least_ = 0, most_ = 0, latest_ = 0;  // bounds of the offset; the latest device time that was sampled
};

}  // namespace commtrace
