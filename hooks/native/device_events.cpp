#include "device_events.h"

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <cstring>
#include <utility>

namespace commtrace {

namespace {

constexpr size_t kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES), kIndices = 64;

using Impl = c10::impl::DeviceGuardImplInterface;

// Older versions of torch cannot be asked for a device in general.
template <typename T, typename = void>
struct CaptureIsKnown : std::false_type {};
template <typename T>
struct CaptureIsKnown<T, std::void_t<decltype(std::declval<const T&>().isStreamCapturing(std::declval<c10::Stream>()))>>
    : std::true_type {};

template <typename T>
bool is_capturing(const T& impl, const c10::Stream& stream) {
  if constexpr (CaptureIsKnown<T>::value) return impl.isStreamCapturing(stream);
  return true;
}

// cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*), and its twin of HIP.
using ExchangeMode = int (*)(int*);
constexpr int kThreadLocal = 1;  // cudaStreamCaptureModeThreadLocal

// From a library that the process has loaded, by whatever name and into whatever scope.
void* loaded_symbol(const char* symbol, const char* library) {
  if (void* found = dlsym(RTLD_DEFAULT, symbol)) return found;
  struct Search {
    const char* symbol;
    const char* library;
    void* found = nullptr;
  } search{symbol, library};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, search.library) == nullptr) return 0;
        void* handle = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
        if (handle == nullptr) return 0;
        search.found = dlsym(handle, search.symbol);
        dlclose(handle);  // it was loaded before, and stays
        return search.found == nullptr ? 0 : 1;
      },
      &search);
  return search.found;
}

ExchangeMode exchange_mode() {
  static const auto found = [] {
    void* cuda = loaded_symbol("cudaThreadExchangeStreamCaptureMode", "libcudart");
    return reinterpret_cast<ExchangeMode>(
        cuda != nullptr ? cuda : loaded_symbol("hipThreadExchangeStreamCaptureMode", "libamdhip"));
  }();
  return found;
}

}  // namespace

bool Device::supported(c10::Device device) {
  if (!CaptureIsKnown<Impl>::value || !device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return false;
  if (device.is_cuda()) return exchange_mode() != nullptr;
  // What an event does to a capture on other devices nobody has looked at. Their makers give this type a name: without
  // one it is a test's.
  return device.is_privateuseone() && c10::get_privateuse1_backend() == "privateuseone";
}

Device* Device::of(c10::Device device) {
  static std::array<std::atomic<Device*>, kTypes * kIndices> known{};
  static std::array<std::atomic<bool>, kTypes * kIndices> refused{};
  const auto index = static_cast<size_t>(device.index());
  if (!device.has_index() || index >= kIndices) return nullptr;
  const size_t at = static_cast<size_t>(device.type()) * kIndices + index;
  if (Device* found = known[at].load(std::memory_order_acquire)) return found;
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

bool Device::capturing(const c10::Stream& stream) const { return is_capturing(impl_, stream); }

EventRef Device::record(const c10::Stream& stream) {
  auto event = take();
  if (!event) return nullptr;
  try {
    // Not left to `record`, which sets the old device again even where that initialises it.
    const c10::DeviceGuard guard(device_);
    event->record(stream);
  } catch (...) {
    give(std::move(event));
    throw;
  }
  return {event.release(), [this](c10::Event* back) { give(std::unique_ptr<c10::Event>(back)); }};
}

std::unique_ptr<c10::Event> Device::take() {
  std::lock_guard<std::mutex> held(mutex_);
  if (!spare_.empty()) {
    auto event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }
  if (made_ == kMostEvents) return nullptr;
  spare_.reserve(made_ + 1);  // to come back must not fail
  made_++;
  return std::make_unique<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
}

void Device::give(std::unique_ptr<c10::Event> event) {
  std::lock_guard<std::mutex> held(mutex_);
  spare_.push_back(std::move(event));
}

void Device::enter() const {
  // First, as what follows would else initialise the first device of the machine, in every process. For good, as events
  // set a thread's old device again.
  if (impl_.getDevice() != device_) impl_.setDevice(device_);
  static thread_local bool thread_local_mode = false;
  if (!device_.is_cuda() || std::exchange(thread_local_mode, true)) return;
  int mode = kThreadLocal;
  exchange_mode()(&mode);
}

}  // namespace commtrace
