// Waits, polls and coalesced calls that Python makes: the methods of c10d's Work and ProcessGroup are no operators.
#include "waits.h"

#include <array>
#include <utility>

namespace commtrace {

// ---- waits -------------------------------------------------------------------------------------------------------------

namespace {

PyTypeObject* work_type = nullptr;

// As pybind11's casters, which look the type up by its name each time. It is compared only, never followed.
const c10::intrusive_ptr_target* work_of(PyObject* self) {
  if (!PyObject_TypeCheck(self, work_type)) return nullptr;
  const auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return instance->simple_layout ? static_cast<const c10d::Work*>(instance->simple_value_holder[0]) : nullptr;
}

PyObject* wait_traced(Recording& recording, PyObject* wait, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const auto* work = work_of(args[0]);
  const int64_t t_wait = now();
  const auto found = work == nullptr ? Waits::AllFound{} : recording.waits.take(work);
  bool by_wait = false;
  for (const auto& call : found) {
    by_wait |= call.by_wait;
    recording.wait_begins(call.handle, t_wait);
  }
  std::optional<DeviceWait> on_device;
  if (recording.devices.wanted() && !found.empty()) {
    const py::gil_scoped_release unlocked;  // a full queue of the device makes whoever adds to it wait
    on_device.emplace(recording, found);
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
  for (const auto& call : found)
    if (call.by_wait)
      recording.ended(call.handle, t_end, kWait, result == nullptr ? kFailed : kComplete);
  if (sampled) {
    recording.sample_wait.store(false, std::memory_order_relaxed);
    recording.wait_cost.store(cost + now() - t_end);
  }
  return result;
}

// What stands for `wait` of one class. In C, as its cost is added to every synchronous call; and as a method of its type,
// for which Python makes no bound method with each call. Such a method has no memory of its own, hence one function each.
constexpr size_t kMostMethods = 32;
std::array<PyObject*, kMostMethods> originals{};

template <size_t number>
PyObject* waiting(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* const wait = originals[number];
  c10::SmallVector<PyObject*, 8> all{self};
  all.append(args, args + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  Recording* recording = current.load(std::memory_order_acquire);
  if (recording == nullptr) return PyObject_Vectorcall(wait, all.data(), count + 1, names);
  return wait_traced(*recording, wait, all.data(), count + 1, names);
}

template <size_t... numbers>
std::array<PyMethodDef, kMostMethods> methods(std::index_sequence<numbers...>) {
  constexpr const char* kDoc = "As torch's; commtrace notes when it began and ended.";
  return {PyMethodDef{"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&waiting<numbers>)),
                      METH_FASTCALL | METH_KEYWORDS, kDoc}...};
}

}  // namespace

py::object waiting_for(const py::object& type, const py::object& wait) {
  static auto definitions = methods(std::make_index_sequence<kMostMethods>{});
  if (work_type == nullptr) work_type = reinterpret_cast<PyTypeObject*>(py::type::of<c10d::Work>().release().ptr());
  // What makes a method of pybind11's function builds a tuple for each call; the function itself takes its self as well.
  PyObject* original = PyInstanceMethod_Check(wait.ptr()) ? PyInstanceMethod_Function(wait.ptr()) : wait.ptr();
  for (size_t number = 0; number < kMostMethods; number++) {
    if (originals[number] == nullptr) originals[number] = py::reinterpret_borrow<py::object>(original).release().ptr();
    if (originals[number] == original) {
      if (PyCFunction_Check(original)) definitions[number].ml_name = reinterpret_cast<PyCFunctionObject*>(original)->m_ml->ml_name;
      return py::reinterpret_steal<py::object>(
          PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definitions[number]));
    }
  }
  return wait;  // no more places: the waits of this class are not seen
}

void polled(const py::object& work) {
  const int64_t t_end = now();
  Recording* recording = current.load(std::memory_order_acquire);
  const auto* pointer = recording == nullptr ? nullptr : work_of(work.ptr());
  if (pointer == nullptr) return;
  for (const auto& call : recording->waits.take(pointer))
    if (call.by_wait) recording->ended(call.handle, t_end, kTest);
}

// ---- coalesced calls ---------------------------------------------------------------------------------------------------

namespace {

// Takes the batch that is open, if one is.
std::vector<Handle> close_batch(Group& group, uint32_t next) {
  std::lock_guard<std::mutex> held(group.mutex);
  group.batch.store(next);
  return std::exchange(group.batched, {});
}

bool ends_on_device(Recording& recording, const std::vector<Handle>& handles, Begun begun) {
  const py::gil_scoped_release unlocked;
  return recording.devices.ends(handles, std::move(begun));
}

}  // namespace

void batch_begins(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = recording.group(pg.get());
  if (group == nullptr) return;
  for (Handle handle : close_batch(*group, ++recording.batches)) recording.unobservable(handle);  // an exception's
  group->batch_on_host = false;
  group->batch_on_device = {};
}

void batch_ends(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                const c10::intrusive_ptr<c10d::Work>& work) {
  Group* group = recording.group(pg.get());
  if (group == nullptr) return;
  const auto handles = close_batch(*group, 0);
  Begun on_device = std::exchange(group->batch_on_device, {});
  if (!work) {
    if (on_device && ends_on_device(recording, handles, std::move(on_device))) return;
    for (Handle handle : handles) recording.unobservable(handle);
    return;
  }
  c10::intrusive_ptr_target* waited = work.get();
  const auto future = group->batch_on_host ? future_of(*group, kBatchPlan, *work) : nullptr;
  const bool by_wait = group->batch_on_host && !future;
  const bool runs = on_device && recording.devices.runs(handles, std::move(on_device));
  const auto weak = by_wait ? std::optional<Weak>(weakly(waited)) : std::nullopt;
  bool first = true;
  for (Handle handle : handles) {
    recording.slots.update(handle, [&](Record& record) {  // where the drain thread has not taken its place meanwhile
      recording.waits.add(waited, handle, weak, std::exchange(first, false));
      return record.state;
    });
    if (future) follow(&recording, handle, *future);
    if (!group->batch_on_host && !runs) recording.unobservable(handle);
  }
}

}  // namespace commtrace
