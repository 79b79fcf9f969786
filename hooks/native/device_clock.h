// Where the times of a device lie on the host's clock. Arithmetic alone: it knows neither torch nor a device
// (tests/support/native_programs/device_clock.cpp).
#pragma once

#include <algorithm>
#include <cstdint>

namespace commtrace {

// A device passes an event after the host has submitted it and before the host sees it passed. Each event thus bounds the
// offset between the two clocks from both sides, and nobody has to be waited for to learn it: the lower bound is tight as
// soon as one event met an idle stream, the upper one as soon as one was looked at when it was passed.
//
// All times are ns; those of the device count from anywhere.
class DeviceClock {
 public:
  // How far the clocks may drift apart: two quartzes of 50 ppm each.
  static constexpr int64_t kDriftOneIn = 10'000;

  // ns to which a device tells its time: half a microsecond on CUDA, and as much for the rounding of what it tells.
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
    // Bounds that exclude each other: a clock was set, or stood still while the machine slept. The newest is right.
    const bool agrees = known_ && least <= most_ && most >= least_;
    least_ = agrees ? std::max(least_, least) : least;
    most_ = agrees ? std::min(most_, most) : most;
    known_ = true;
  }

  // When the device was there, as the host counts: never later than it was, and early by `error()` at most.
  int64_t on_host(int64_t device, int64_t submitted, int64_t seen) const {
    return std::clamp(device + least_, submitted, std::max(submitted, seen));
  }

  int64_t error() const { return known_ ? most_ - least_ : INT64_MAX; }

 private:
  bool known_ = false;
  int64_t least_ = 0, most_ = 0, latest_ = 0;  // the offset, at the latest time that was sampled
};

}  // namespace commtrace
