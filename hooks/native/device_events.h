// One device of this process as the recorder sees it: current stream, capture, events. Through the interface that torch
// gives every device (c10::impl::DeviceGuardImplInterface), so that no header of CUDA is needed.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace commtrace {

using EventRef = std::shared_ptr<c10::Event>;

// Never freed: an event that is destroyed after the device's driver has shut down takes the process with it.
class Device {
 public:
  // Events that a device may have in use. 8,192 are 4,096 calls between two turns of the drain.
  static constexpr size_t kMostEvents = 8192;

  // Null where times of this kind of device are not taken: it has no events, or cannot say which streams are under
  // capture.
  static Device* of(c10::Device device);

  // Its current stream, of the calling thread.
  c10::Stream stream() const { return impl_.getStream(device_); }

  bool capturing(const c10::Stream& stream) const;

  // An event that measures time, put into this stream; null where all are in use. It comes back when nobody holds it.
  EventRef record(const c10::Stream& stream);

  // The calling thread will query events: it must not initialise another device by that, nor break a capture that goes
  // on in another thread.
  void enter() const;

  // The device, or its driver, has failed once: nothing is asked of it again, not even to destroy an event. False where
  // that was known.
  bool fails() { return !failed_.exchange(true); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  explicit Device(c10::Device device) : device_(device), impl_(*c10::impl::getDeviceGuardImpl(device.type())) {}

  static bool supported(c10::Device device);
  std::unique_ptr<c10::Event> take();
  void give(std::unique_ptr<c10::Event> event);

  const c10::Device device_;
  const c10::impl::DeviceGuardImplInterface& impl_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // of what follows; never held while the device is asked for anything
  std::vector<std::unique_ptr<c10::Event>> spare_;
  size_t made_ = 0;
};

}  // namespace commtrace
