#include "device.h"

#include <cmath>
#include <cstdlib>

namespace commtrace {

void DeviceTimes::open(bool wanted) {
  wanted_ = wanted;
  untimed_ = 0;
  error_ = 0;
  std::lock_guard<std::mutex> held(mutex_);
  closed_ = false;
}

// ---- called by the threads that communicate ----------------------------------------------------------------------------

DeviceStart DeviceTimes::record_event(Device& device) {
  const c10::Stream stream = device.stream();
  if (device.capturing(stream)) return {&device, stream, {}, true};
  const int64_t submitted = now();
  EventRef event = device.record(stream);
  return {&device, stream, {std::move(event), submitted, now()}, false};
}

DeviceStart DeviceTimes::begins(c10::Device where) noexcept {
  Device* device = wanted_ ? Device::of(where) : nullptr;
  if (device == nullptr || device->failed()) return {};
  try {
    DeviceStart begun = record_event(*device);
    if (!begun && !begun.captured) untimed_.fetch_add(1, std::memory_order_relaxed);
    return begun;
  } catch (const std::exception& error) {
    failed(device, error);
    return {};
  }
}

bool DeviceTimes::ends(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept {
  if (!begun || begun.device->failed()) return false;
  try {
    DeviceStart end = record_event(*begun.device);
    if (!end || end.stream != begun.stream) {
      if (!end && !end.captured) untimed_.fetch_add(calls.size(), std::memory_order_relaxed);
      return false;
    }
    push(*begun.device, *end.stream, {{calls.begin(), calls.end()}, std::move(begun.point), std::move(end.point), {}});
    return true;
  } catch (const std::exception& error) {
    failed(begun.device, error);
    return false;
  }
}

bool DeviceTimes::runs(c10::ArrayRef<Handle> calls, DeviceStart begun) noexcept {
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

PendingWait DeviceTimes::wait_begins(c10::ArrayRef<Handle> calls) noexcept {
  PendingWait waited;
  if (!wanted_) return waited;
  try {
    {
      std::lock_guard<std::mutex> held(mutex_);
      for (Handle call : calls) {
        const auto found = open_.find(call.bits);
        if (found == open_.end()) continue;
        waited.calls.emplace_back(call, std::move(found->second));
        open_.erase(found);
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

void DeviceTimes::wait_ends(PendingWait waited, bool raised) noexcept {
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

void DeviceTimes::push(Device& device, const c10::Stream& stream, Pending pending) {
  std::lock_guard<std::mutex> held(mutex_);
  if (!closed_) arrived_.push_back({&device, stream.id(), std::move(pending)});
}

// ---- called by the drain thread ----------------------------------------------------------------------------------------

void DeviceTimes::resolve() noexcept {
  if (!wanted_) return;
  try {
    give_up_old();
    collect_arrivals();
  } catch (const std::exception&) {  // no memory: retried at the next turn
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

void DeviceTimes::collect_arrivals() {
  std::vector<Arrival> arrived;
  {
    std::lock_guard<std::mutex> held(mutex_);
    arrived.swap(arrived_);
  }
  for (auto& [device, stream, pending] : arrived) resolvers_[device].streams[stream].push_back(std::move(pending));
}

// Gives up calls without an observed wait, such as DDP's.
void DeviceTimes::give_up_old() {
  const int64_t since = now() - kMaxAge;
  std::vector<std::pair<uint64_t, StartRef>> old;
  {
    std::lock_guard<std::mutex> held(mutex_);
    while (!order_.empty()) {
      const auto found = open_.find(order_.front());
      if (found != open_.end()) {
        if (open_.size() <= kMostOpen && found->second->point.submitted > since) break;
        old.emplace_back(found->first, std::move(found->second));
        open_.erase(found);
      }
      order_.pop_front();
    }
  }
  for (const auto& [bits, begun] : old) slots_.finish(Handle{bits}, kUnobservable);
}

void DeviceTimes::resolve(Device& device, Resolver& resolver) {
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
  update_reference(resolver, done.front());
  // All of them before any time is written: each sample bounds the clock for the others as well.
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

bool DeviceTimes::passed(Pending& pending) {
  if (pending.seen == 0 && pending.end.event->query()) pending.seen = now();
  return pending.seen != 0;
}

// If the clock's upper bound is loose, polls for the next event to complete.
void DeviceTimes::sample_clock(Resolver& resolver) {
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
void DeviceTimes::update_reference(Resolver& resolver, const Pending& pending) {
  if (resolver.reference && std::abs(device_time(resolver, pending.begin.event) - resolver.reference_at) < kFar) return;
  resolver.reference = pending.begin.event;
  resolver.reference_at = 0;
  resolver.clock = DeviceClock();
  resolver.ended.clear();
}

int64_t DeviceTimes::device_time(const Resolver& resolver, const EventRef& event) {
  if (event == resolver.reference) return resolver.reference_at;
  return resolver.reference_at + std::llround(resolver.reference->elapsedTime(*event) * 1e6);
}

void DeviceTimes::write_times(Resolver& resolver, const Pending& pending) {
  const int64_t t_start = resolver.clock.on_host(pending.begin_at, pending.begin.submitted, pending.seen);
  // The time between the events does not depend on the clock.
  const int64_t t_end = t_start + std::llround(pending.begin.event->elapsedTime(*pending.end.event) * 1e6);
  const bool with_work = static_cast<bool>(pending.before_wait), known = is_exact(resolver, pending);
  std::optional<std::pair<uint32_t, Ended>> ended;
  for (Handle call : pending.calls)
    slots_.update(call, [&](Record& record) -> uint8_t {
      if (record.state != kReturned) return record.state;
      record.t_start = t_start;
      if (with_work && record.tag == -1) {  // messages have their own streams
        const auto found = resolver.ended.find(record.group);
        const Ended before = found == resolver.ended.end() ? Ended{} : found->second;
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

// Whether the end is exact. A call in the stream itself ends at its event. A wait shows the end if the stream blocked for
// it, and was not merely idle when the host recorded the event.
bool DeviceTimes::is_exact(const Resolver& resolver, const Pending& pending) {
  if (!pending.before_wait) return true;
  if (pending.before_wait.event->elapsedTime(*pending.end.event) * 1e6 <= kIdleWait) return false;
  const int64_t end = resolver.clock.on_host(pending.end_at, pending.end.submitted, pending.seen);
  return end > pending.end.accepted + kIdleEvent;
}

void DeviceTimes::close() noexcept {
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

std::string DeviceTimes::failure() {
  std::lock_guard<std::mutex> held(mutex_);
  return std::exchange(failure_, {});
}

void DeviceTimes::failed(Device* device, const std::exception& why) noexcept {
  if (device == nullptr || !device->set_failed()) return;
  try {
    std::lock_guard<std::mutex> held(mutex_);
    failure_ = why.what();
  } catch (const std::exception&) {  // no memory
  }
}

}  // namespace commtrace
