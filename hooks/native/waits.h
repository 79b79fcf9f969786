// Waits, polls and coalesced calls that Python makes: methods of c10d's Work and ProcessGroup, which are not dispatched.
#pragma once

#include <array>
#include <utility>

#include "recording_kernels.h"

namespace commtrace {

// ---- waits -------------------------------------------------------------------------------------------------------------

inline PyTypeObject* work_type = nullptr;

// The C++ object, without pybind11's casters, which look the type up by name each time. Compared, never dereferenced.
static const c10::intrusive_ptr_target* work_of(PyObject* self) {
  if (!PyObject_TypeCheck(self, work_type)) return nullptr;
  const auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return instance->simple_layout ? static_cast<const c10d::Work*>(instance->simple_value_holder[0]) : nullptr;
}

static PyObject* wait_traced(Recording& recording, PyObject* wait, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const auto* work = work_of(args[0]);
  const int64_t t_wait = now();
  const auto calls = work == nullptr ? Waits::Calls{} : recording.wait_begins(work, t_wait);
  bool by_wait = false;
  for (const auto& call : calls) by_wait |= call.by_wait;
  std::optional<DeviceWait> on_device;
  if (recording.devices.wanted() && !calls.empty()) {
    const py::gil_scoped_release unlocked;  // recording an event blocks while the device's queue is full
    on_device.emplace(recording, calls);
  }
  const bool sampled = recording.sample_wait.load(std::memory_order_relaxed);
  const int64_t cost = sampled ? now() - t_wait : 0;
  PyObject* result = PyObject_Vectorcall(wait, args, count, names);
  if (!by_wait && !sampled && !on_device) return result;
  const int64_t t_end = now();
  if (on_device) {
    const py::gil_scoped_release unlocked;
    on_device->ends(result == nullptr);
  }
  for (const auto& call : calls)
    if (call.by_wait) recording.ended(call.handle, t_end, kWait, result == nullptr ? kFailed : kComplete);
  if (sampled) {
    recording.sample_wait.store(false, std::memory_order_relaxed);
    recording.wait_cost.store(cost + now() - t_end);
  }
  return result;
}

// The replacements of `wait`, one for each class. They are C functions, because their cost is added to every
// synchronous call, and method descriptors, because Python then makes no bound method for each call. A descriptor has
// no state, so each has its own function.
constexpr size_t kMostMethods = 32;
inline std::array<PyObject*, kMostMethods> originals{};

template <size_t number>
static PyObject* wait_of(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* const wait = originals[number];
  c10::SmallVector<PyObject*, 8> all{self};
  all.append(args, args + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  Recording* recording = current.load(std::memory_order_acquire);
  if (recording == nullptr) return PyObject_Vectorcall(wait, all.data(), count + 1, names);
  return wait_traced(*recording, wait, all.data(), count + 1, names);
}

template <size_t... numbers>
static std::array<PyMethodDef, kMostMethods> methods(std::index_sequence<numbers...>) {
  constexpr const char* kDoc = "Same as torch's; commtrace records when it begins and ends.";
  return {PyMethodDef{"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&wait_of<numbers>)),
                      METH_FASTCALL | METH_KEYWORDS, kDoc}...};
}

// Returns a replacement of `wait`, a method of this type, which is Work or derived from it.
static py::object replace_wait(const py::object& type, const py::object& wait) {
  static auto definitions = methods(std::make_index_sequence<kMostMethods>{});
  if (work_type == nullptr) work_type = reinterpret_cast<PyTypeObject*>(py::type::of<c10d::Work>().release().ptr());
  // pybind11's instance method builds a tuple for each call; the function within it takes self as an argument.
  PyObject* original = PyInstanceMethod_Check(wait.ptr()) ? PyInstanceMethod_Function(wait.ptr()) : wait.ptr();
  for (size_t number = 0; number < kMostMethods; number++) {
    if (originals[number] == nullptr) originals[number] = py::reinterpret_borrow<py::object>(original).release().ptr();
    if (originals[number] == original) {
      if (PyCFunction_Check(original)) definitions[number].ml_name = reinterpret_cast<PyCFunctionObject*>(original)->m_ml->ml_name;
      return py::reinterpret_steal<py::object>(
          PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definitions[number]));
    }
  }
  return wait;  // no function is left: the waits of this class are not observed
}

// Records the end of a call whose `work.is_completed()` has returned true.
static void note_completed(const py::object& work) {
  const int64_t t_end = now();
  Recording* recording = current.load(std::memory_order_acquire);
  const auto* pointer = recording == nullptr ? nullptr : work_of(work.ptr());
  if (pointer == nullptr) return;
  for (const auto& call : recording->waits.take(pointer))
    if (call.by_wait) recording->ended(call.handle, t_end, kTest);
}

// ---- coalesced calls ---------------------------------------------------------------------------------------------------

// Takes the calls of the open batch, and sets the number of the next one (0: none).
static std::vector<Handle> close_batch(Group& group, uint32_t next) {
  std::lock_guard<std::mutex> held(group.mutex);
  group.batch.store(next);
  return std::exchange(group.batched, {});
}

// Opens a batch: calls on this group belong together until `batch_ends`.
static void batch_begins(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = recording.group(pg.get());
  if (group == nullptr) return;
  // An exception may have left a batch open.
  for (Handle handle : close_batch(*group, ++recording.batches)) recording.unobservable(handle);
  group->batch_on_host = false;
  group->batch_on_device = {};
}

// Closes the batch. Its calls end when `work` does; null if the backend has waited itself, or on a stream.
static void batch_ends(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                const c10::intrusive_ptr<c10d::Work>& work) {
  Group* group = recording.group(pg.get());
  if (group == nullptr) return;
  const auto handles = close_batch(*group, 0);
  DeviceStart on_device = std::exchange(group->batch_on_device, {});
  if (!work) {
    bool ends = false;
    if (on_device) {
      const py::gil_scoped_release unlocked;
      ends = recording.devices.ends(handles, std::move(on_device));
    }
    if (ends) return;
    for (Handle handle : handles) recording.unobservable(handle);
    return;
  }
  c10::intrusive_ptr_target* waited = work.get();
  const auto future = group->batch_on_host ? future_of(*group, kBatchPlan, *work) : nullptr;
  const bool by_wait = group->batch_on_host && !future;
  const bool runs = on_device && recording.devices.runs(handles, std::move(on_device));
  const auto weak = by_wait ? std::optional<Weak>(weak_reference(waited)) : std::nullopt;
  bool first = true;
  for (Handle handle : handles) {
    recording.slots.update(handle, [&](Record& record) {  // unless the drain thread has taken the slot
      recording.waits.add(waited, handle, weak, std::exchange(first, false));
      return record.state;
    });
    if (future) follow(&recording, handle, *future);
    if (!group->batch_on_host && !runs) recording.unobservable(handle);
  }
}

}  // namespace commtrace
