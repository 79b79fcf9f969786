// A device: its current stream, whether it is under capture, and its events. Uses torch's device-independent interface
// (c10::impl::DeviceGuardImplInterface), so that no CUDA header is needed.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace commtrace {

using EventRef = std::shared_ptr<c10::Event>;

// Never freed: destroying an event after the device's driver has shut down crashes the process.
class Device {
 public:
  // Most events in use for a device. 8,192 events are 4,096 calls between two turns of the drain thread.
  static constexpr size_t kMostEvents = 8192;

  // Null for a device without events, or that cannot report which streams are under capture.
  static Device* of(c10::Device device);

  // The calling thread's current stream.
  c10::Stream stream() const { return impl_.getStream(device_); }

  bool capturing(const c10::Stream& stream) const;

  // Records an event with timing in this stream; null if all are in use. It is reused when its last reference is dropped.
  EventRef record(const c10::Stream& stream);

  // Prepares the calling thread to query events: that must neither initialise another device nor invalidate a capture of
  // another thread.
  void enter() const;

  // Marks the device as failed: it is not used again, not even to destroy an event. False if it was marked before.
  bool set_failed() { return !failed_.exchange(true); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  explicit Device(c10::Device device) : device_(device), impl_(*c10::impl::getDeviceGuardImpl(device.type())) {}

  static bool supported(c10::Device device);
  std::unique_ptr<c10::Event> take();
  void give(std::unique_ptr<c10::Event> event);

  const c10::Device device_;
  const c10::impl::DeviceGuardImplInterface& impl_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards the following members; never held during calls to the device
  std::vector<std::unique_ptr<c10::Event>> spare_;
  size_t made_ = 0;
};

}  // namespace commtrace
