// Kernels that run before torch's own: they record a call and redispatch it.
//
// Rules, all from observed deadlocks and crashes:
//   - never acquire the GIL while holding one of our locks, and never hold the GIL while a call is redispatched;
//   - a Work may be null (NCCL's synchronous calls), and not every backend's future shows the end of its Work;
//   - a backend's thread may report a completion after the log was closed: the Handle is then invalid.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recording.h"

namespace commtrace {

// Installs kernels for these operators of c10d and of _c10d_functional. They stay, and only redispatch while nothing is
// recorded: removing a kernel that another thread runs crashes, and at exit the dispatcher may be destroyed first.
void install(const std::vector<Plan>& plans, const std::vector<std::string>& functional);

// Removes the kernels. Only safe if no other thread communicates (benchmarks).
void remove_kernels();

// Makes the next call run `begin()`, which starts the recording. It returns whether later calls may try again.
void arm(const py::object& begin);
void disarm();

// ns that a call spends entering and leaving such a kernel, which the kernel itself cannot measure: the difference between
// two operators of our own, one with a kernel before it, as the minimum of several trials.
int64_t crossing();

// In a forked child: detaches from the parent's recording, and lets the child begin its own.
void forked_in_child();

// The future that shows the end of a call on the host; null if the backend has none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(Group& group, int plan, c10d::Work& work);

// The program's wait for calls on a device. The calls have failed if it is destroyed by an exception.
class DeviceWait {
 public:
  DeviceWait(Recording& recording, const Waits::Calls& calls) : devices_(recording.devices) {
    if (!devices_.wanted()) return;
    c10::SmallVector<Handle, 4> handles;
    for (const auto& call : calls)
      if (!call.by_wait) handles.push_back(call.handle);
    if (!handles.empty()) waited_ = devices_.wait_begins(handles);
  }
  ~DeviceWait() { ends(true); }
  void ends(bool raised) { devices_.wait_ends(std::exchange(waited_, {}), raised); }

 private:
  DeviceTimes& devices_;
  PendingWait waited_;
};

// Records the end of the call when this future completes.
void follow(Recording* recording, Handle handle, c10::ivalue::Future& future);

}  // namespace commtrace
