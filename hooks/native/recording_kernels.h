// Kernels that run before torch's own: they record a call and redispatch it.
//
// Rules, all from runs that hung or crashed:
//   - no lock of ours is held while the GIL is taken, and the GIL is never held while a call is handed on;
//   - a Work may be null (NCCL's synchronous calls), and its future is an end only where the backend means it as one;
//   - threads of a backend may come with a completion after the log was closed: a Handle then opens nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recording.h"

namespace commtrace {

// Installs kernels for these operators of c10d and of _c10d_functional. They stay, and only pass calls on while nothing
// records: removing one that another thread is in crashes (seen), and at exit the dispatcher may be destroyed first.
void install(const std::vector<Plan>& plans, const std::vector<std::string>& functional);

// Removes them. Only where no other thread communicates: in benchmarks.
void remove_kernels();

// Lets the next call run `begin()`, which returns whether to try again if nothing records yet.
void arm(const py::object& begin);
void disarm();

// ns that a call spends on its way into and out of a kernel like ours, which the kernel itself cannot see: on an operator
// of our own with such a kernel before it and without, the least of several tries, as other threads run at the same time.
int64_t crossing();

// In a forked child: the recording is the parent's, and what the child communicates is its own.
void forked_in_child();

// The future that shows the end of a call on the host; null where the backend has none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(Group& group, int plan, c10d::Work& work);

// A wait that makes a device's stream wait. If it is left by an exception its calls have failed.
class DeviceWait {
 public:
  DeviceWait(Recording& recording, const Waits::AllFound& found) : devices_(recording.devices) {
    if (!devices_.wanted()) return;
    c10::SmallVector<Handle, 4> handles;
    for (const auto& call : found)
      if (!call.by_wait) handles.push_back(call.handle);
    if (!handles.empty()) waited_ = devices_.wait_begins(handles);
  }
  ~DeviceWait() { ends(true); }
  void ends(bool raised) { devices_.wait_ends(std::exchange(waited_, {}), raised); }

 private:
  DeviceTimes& devices_;
  Waited waited_;
};

// The call ends when this future does.
void follow(Recording* recording, Handle handle, c10::ivalue::Future& future);

}  // namespace commtrace
