// A device: its current stream, whether it is under capture, and its events. Uses torch's device-independent interface
// (c10::impl::DeviceGuardImplInterface), so that no CUDA header is needed.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace commtrace {

using EventRef = std::shared_ptr<c10::Event>;

// A symbol in the global scope, or in a loaded library with a name that contains `library`; null if there is none.
inline void* loaded_symbol(const char* symbol, const char* library) {
  if (void* address = dlsym(RTLD_DEFAULT, symbol)) return address;
  struct Search {
    const char* symbol;
    const char* library;
    void* address = nullptr;
  } search{symbol, library};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, search.library) == nullptr) return 0;
        void* handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
        if (handle == nullptr) return 0;
        search.address = dlsym(handle, search.symbol);
        dlclose(handle);  // drops only the reference of dlopen
        return search.address == nullptr ? 0 : 1;
      },
      &search);
  return search.address;
}

// The events of a device. A Device is never freed: destroying an event after the device's driver has shut down crashes the
// process.
class Device {
 public:
  // Most events in use for a device. 8,192 events are 4,096 calls between two drains.
  static constexpr size_t kMostEvents = 8192;

  // Null for a device that has no events, or of which it is not known whether a stream is under capture.
  static Device* of(c10::Device device) {
    static std::array<std::atomic<Device*>, kTypes * kIndices> known{};
    static std::array<std::atomic<bool>, kTypes * kIndices> refused{};
    const auto index = static_cast<size_t>(device.index());
    if (!device.has_index() || index >= kIndices) return nullptr;
    const size_t at = static_cast<size_t>(device.type()) * kIndices + index;
    if (Device* device = known[at].load(std::memory_order_acquire)) return device;
    if (refused[at].load(std::memory_order_relaxed)) return nullptr;
    if (!supported(device)) {
      refused[at].store(true);
      return nullptr;
    }
    auto* made = new Device(device);
    Device* none = nullptr;
    if (known[at].compare_exchange_strong(none, made)) return made;
    delete made;
    return none;
  }

  // The calling thread's current stream.
  c10::Stream stream() const { return impl_.getStream(device_); }

  bool capturing(const c10::Stream& stream) const { return is_capturing(impl_, stream); }

  // Records an event with timing in this stream; null if all are in use. It is reused when its last reference is dropped.
  EventRef record(const c10::Stream& stream) {
    auto event = take();
    if (!event) return nullptr;
    try {
      // `record` alone would restore the previous device even if that initializes it.
      const c10::DeviceGuard guard(device_);
      event->record(stream);
    } catch (...) {
      give(std::move(event));
      throw;
    }
    return {event.release(), [this](c10::Event* back) { give(std::unique_ptr<c10::Event>(back)); }};
  }

  // Prepares the calling thread to query events: that must neither initialize another device nor invalidate a capture of
  // another thread.
  void enter() const {
    // First, because the calls below would otherwise initialize the machine's first device in every process. Not
    // restored, because events restore the thread's previous device.
    if (impl_.getDevice() != device_) impl_.setDevice(device_);
    static thread_local bool thread_local_mode = false;
    if (!device_.is_cuda() || std::exchange(thread_local_mode, true)) return;
    int mode = kThreadLocal;
    runtime().exchange_mode(&mode);
  }

  // Marks the device as failed: it is not used again, not even to destroy an event. False if it was marked before.
  bool set_failed() { return !failed_.exchange(true); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  using Impl = c10::impl::DeviceGuardImplInterface;
  // cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*), or HIP's equivalent.
  using ExchangeMode = int (*)(int*);
  static constexpr int kThreadLocal = 1;  // cudaStreamCaptureModeThreadLocal
  // cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*), cudaGetLastError(), and c10::cuda::CUDAStream::stream(),
  // whose object holds nothing but the c10::Stream; or HIP's equivalents.
  struct Runtime {
    using IsCapturing = int (*)(void*, int*);
    using LastError = int (*)();
    using NativeStream = void* (*)(const c10::Stream*);
    ExchangeMode exchange_mode = nullptr;
    IsCapturing is_capturing = nullptr;
    LastError last_error = nullptr;
    NativeStream native_stream = nullptr;

    bool complete() const { return exchange_mode && is_capturing && last_error && native_stream; }

    static Runtime load(const char* prefix, const char* library) {
      const auto find = [&](const char* name) { return loaded_symbol((std::string(prefix) + name).c_str(), library); };
      void* stream = loaded_symbol("_ZNK3c104cuda10CUDAStream6streamEv", "libc10_");
      if (stream == nullptr) stream = loaded_symbol("_ZNK3c103hip9HIPStream6streamEv", "libc10_");
      return {reinterpret_cast<ExchangeMode>(find("ThreadExchangeStreamCaptureMode")),
              reinterpret_cast<IsCapturing>(find("StreamIsCapturing")), reinterpret_cast<LastError>(find("GetLastError")),
              reinterpret_cast<NativeStream>(stream)};
    }
  };
  static constexpr size_t kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES), kIndices = 64;

  static const Runtime& runtime() {
    static const auto loaded = [] {
      const auto cuda = Runtime::load("cuda", "libcudart");
      return cuda.complete() ? cuda : Runtime::load("hip", "libamdhip");
    }();
    return loaded;
  }

  // torch before 2.12 has no device-independent method for this, so CUDA's runtime is asked.
  template <typename T>
  static bool is_capturing(const T& impl, const c10::Stream& stream) {
    if (stream.device().is_cuda()) {
      int status = 0;
      if (runtime().is_capturing(runtime().native_stream(&stream), &status) == 0) return status != 0;
      runtime().last_error();  // the legacy stream, while another is under capture; the program must not find the error
      return true;
    }
    if constexpr (requires { impl.isStreamCapturing(stream); }) return impl.isStreamCapturing(stream);
    return true;
  }

  static bool supported(c10::Device device) {
    if (!device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return false;
    if (device.is_cuda()) return runtime().complete();
    // On other devices the effect of an event on a capture is not known. Vendors rename this type; tests do not.
    return device.is_privateuseone() && c10::get_privateuse1_backend() == "privateuseone";
  }

  explicit Device(c10::Device device) : device_(device), impl_(*c10::impl::getDeviceGuardImpl(device.type())) {}

  std::unique_ptr<c10::Event> take() {
    std::lock_guard<std::mutex> held(mutex_);
    if (!spare_.empty()) {
      auto event = std::move(spare_.back());
      spare_.pop_back();
      return event;
    }
    if (made_ == kMostEvents) return nullptr;
    spare_.reserve(made_ + 1);  // so that `give` cannot fail
    made_++;
    return std::make_unique<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  }

  void give(std::unique_ptr<c10::Event> event) {
    std::lock_guard<std::mutex> held(mutex_);
    spare_.push_back(std::move(event));
  }

  const c10::Device device_;
  const Impl& impl_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards the following members; never held during calls to the device
  std::vector<std::unique_ptr<c10::Event>> spare_;
  size_t made_ = 0;
};

}  // namespace commtrace
