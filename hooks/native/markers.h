// Functions of libraries whose calls of communication a hook marks: with a purpose, or with a phase. A wrapper in Python
// takes 9 us in a training step, because its code and data have left the caches; this one takes 2.
#pragma once

#include <Python.h>
#include <structmember.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <utility>

#include "recording.h"

namespace commtrace {

// Same as commtrace.current_step.MicroBatch.
enum class MicroBatch : int32_t { kKept, kNone, kCounted };

// A callable in the place of `original`. Like a function, it binds to objects, and has attributes.
struct Marker {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *original, *attributes, *weak_references;

  // Its purpose, 0 for none; or what `read` returns of the arguments, which is kept for the same `key`.
  uint32_t purpose;
  PyObject *read, *key;  // key: a tuple of KeyPart, or null
  bool of_caller;        // `read` gets, first, the first argument of the function that calls
  bool unclaimed;        // only where nothing else has marked the calls
  bool in_module;        // the frames above decide, too: `Caller`
  NumberTable* purposes;
  PyObject* kept;  // what is part of a key of `purposes`: addresses must not be reused

  // What part of a training step it is; null if it is none.
  Progress* progress;
  int32_t phase;  // kUnmarked: none
  MicroBatch micro_batch;
  int32_t batch, number;  // of the latest call that was counted
  bool begins_step, finishes_step;
  PyObject* end_first_step;  // called when a step has finished that is the first one

  // The micro-batch of a call, as Progress.wrapper in Python.
  int32_t next_micro_batch() {
    const int32_t present = micro_batch == MicroBatch::kCounted ? progress->get(progress->batch) : 0;
    if (present == 0) return -1;
    number = present == batch ? number + 1 : 0;
    batch = present;
    return number;
  }

  // What a part of a step changes before a call, and restores after it.
  struct Before {
    int32_t mark, finishing;
  };

  Before begin_part() {
    if (begins_step && progress->mark != kEvaluation) progress->note_activity();
    if (micro_batch != MicroBatch::kKept) progress->micro_batch = next_micro_batch();
    const Before before{progress->mark, progress->finishing};
    if (phase != kUnmarked && before.mark != kEvaluation) progress->mark = phase;  // as Progress.mark in Python
    progress->finishing |= finishes_step;
    return before;
  }

  // Returns the result of the call, or null if Python raised.
  PyObject* end_part(const Before& before, PyObject* result) {
    progress->mark = before.mark;
    progress->finishing = before.finishing;
    if (!finishes_step || before.finishing) return result;
    progress->finished = 1;
    return progress->step == 0 ? after_first_step(result) : result;
  }

  PyObject* after_first_step(PyObject* result) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);  // the call's own error
    PyObject* none = PyObject_CallNoArgs(end_first_step);
    Py_XDECREF(none);
    if (none == nullptr) Py_CLEAR(result);
    if (none != nullptr || type != nullptr) PyErr_Restore(type, value, trace);
    return result;
  }
};

// A purpose, or `~purpose` if it is of one call only; none if Python raised.
using Read = std::optional<int64_t>;

static Read read_purpose(const Marker& marker, PyObject* const* args, size_t count, PyObject* names) {
  PyObject* result = PyObject_Vectorcall(marker.read, args, count, names);
  if (result == nullptr) return std::nullopt;  // no error of `read`, which counts its own: an interrupt
  const int64_t purpose = PyLong_AsLongLong(result);
  Py_DECREF(result);
  return PyErr_Occurred() ? Read{} : purpose;
}

// What decides the purpose of a call, as a number.
class Key {
 public:
  void add(uint64_t value) { number_ = (number_ ^ value) * 0x9E3779B97F4A7C15ULL; }

  // Adds an object by its identity. It is kept with the purpose, as its address must not be reused.
  void add(py::object object) {
    add(uint64_t{reinterpret_cast<uintptr_t>(object.ptr())});
    objects_.push_back(std::move(object));
  }

  uint64_t number() const { return number_ + (number_ == 0); }  // keys are never 0
  const auto& objects() const { return objects_; }

 private:
  uint64_t number_ = 0;
  c10::SmallVector<py::object, 8> objects_;
};

// Returns an attribute of an object; null if it has none, or if reading it failed: `read` then sees for itself.
static py::object attribute_of(PyObject* object, PyObject* name) {
  PyObject* value = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int found = PyObject_GetOptionalAttr(object, name, &value);
#else
  const int found = _PyObject_LookupAttr(object, name, &value);
#endif
  if (found < 0 && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

// Adds the items of a tuple by their types and the attributes that `part` names. Returns whether the call has them.
static bool add_items(Key& key, PyObject* part, const py::object& items) {
  if (!items || !PyTuple_Check(items.ptr())) return false;
  key.add(static_cast<uint64_t>(PyTuple_GET_SIZE(items.ptr())));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.ptr()); i++) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), i);
    key.add(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(item))));
    for (Py_ssize_t name = 2; name < PyTuple_GET_SIZE(part); name++) {
      py::object value = attribute_of(item, PyTuple_GET_ITEM(part, name));
      if (!value) key.add(uint64_t{0});
      else if (PyLong_CheckExact(value.ptr())) key.add(uint64_t{PyLong_AsUnsignedLongMask(value.ptr())} + 1);
      else key.add(std::move(value));
    }
  }
  return true;
}

// Adds a part of the key. Returns whether the call has it.
static bool add_part(Key& key, PyObject* part, PyObject* const* args, size_t count) {
  const bool of_items = PyTuple_Check(part);
  PyObject* const position = of_items ? PyTuple_GET_ITEM(part, 0) : part;
  const size_t at = PyLong_Check(position) ? PyLong_AsSize_t(position) : 0;
  if (at >= count) return false;
  if (of_items) return add_items(key, part, attribute_of(args[at], PyTuple_GET_ITEM(part, 1)));
  py::object value = PyLong_Check(part) ? py::reinterpret_borrow<py::object>(args[at]) : attribute_of(args[0], part);
  if (!value) return false;
  key.add(std::move(value));
  return true;
}

// FORWARD_PURPOSE of hooks/purposes.py.
static PyObject* forward_purpose() {
  static PyObject* name = PyUnicode_InternFromString("commtrace_forward");
  return name;
}

// The part of the key that the frames above decide. No module is kept alive: see `keep`.
static void add_caller(Key& key, const Caller& caller) {
  key.add(uint64_t{caller.repeats} << 1 | uint64_t{caller.optimizes});
  key.add(uint64_t{reinterpret_cast<uintptr_t>(caller.module.ptr())});
  if (caller.module) return;
  for (const py::object& context : caller.contexts) {
    const py::object forward = attribute_of(context.ptr(), forward_purpose());
    if (forward && PyLong_CheckExact(forward.ptr())) return key.add(uint64_t{PyLong_AsUnsignedLongMask(forward.ptr())});
  }
}

static void forget(Marker& marker) {
  marker.purposes->clear();
  if (marker.kept != nullptr) PyList_SetSlice(marker.kept, 0, PyList_GET_SIZE(marker.kept), nullptr);
}

// Called when a module is gone, whose address may be reused.
static PyObject* forget_modules(PyObject* marker, PyObject*) {
  forget(*reinterpret_cast<Marker*>(marker));
  Py_RETURN_NONE;
}

// Keeps a purpose, unless its module cannot be observed.
static void keep(Marker& marker, const Key& key, const py::object& module, uint32_t purpose) {
  static PyMethodDef forgets{"forget", &forget_modules, METH_O, nullptr};
  if (PyList_GET_SIZE(marker.kept) > 1 << 16) forget(marker);  // a program that makes objects all the time
  if (module) {
    const auto forgetting =
        py::reinterpret_steal<py::object>(PyCFunction_New(&forgets, reinterpret_cast<PyObject*>(&marker)));
    const auto weak = py::reinterpret_steal<py::object>(PyWeakref_NewRef(module.ptr(), forgetting.ptr()));
    if (!weak) return PyErr_Clear();
    PyList_Append(marker.kept, weak.ptr());
  }
  for (const py::object& object : key.objects()) PyList_Append(marker.kept, object.ptr());
  marker.purposes->add(key.number(), purpose);
}

// The purpose of a call by `key`, by whether autograd runs in this thread, and by the caller if `in_module`.
static Read purpose_by_key(Marker& marker, PyObject* const* args, size_t count, PyObject* names) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  Key key;
  key.add(uint64_t{in_backward} + 1);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(marker.key); i++)
    if (!add_part(key, PyTuple_GET_ITEM(marker.key, i), args, count))
      return PyErr_Occurred() ? Read{} : read_purpose(marker, args, count, names);
  Caller caller;
  if (marker.in_module) {
    Recording* const recording = current.load(std::memory_order_acquire);
    if (recording != nullptr) caller = recording->callsites.caller(Thread::current().sites, in_backward);
    if (!caller.known) return read_purpose(marker, args, count, names);
    add_caller(key, caller);
  }
  if (const uint32_t* known = marker.purposes->find(key.number())) {
    const uint32_t purpose = *known;
    if (caller.module && purpose != kNoPurpose && !caller.contexts.empty()) {
      const auto number = py::reinterpret_steal<py::object>(PyLong_FromUnsignedLong(purpose));
      for (const py::object& context : caller.contexts)
        if (PyObject_SetAttr(context.ptr(), forward_purpose(), number.ptr()) < 0) PyErr_Clear();
    }
    return purpose;
  }
  const Read purpose = read_purpose(marker, args, count, names);
  if (purpose && *purpose >= 0) keep(marker, key, caller.module, static_cast<uint32_t>(*purpose));
  return purpose;
}

static Read purpose_of(Marker& marker, PyObject* const* args, size_t count, PyObject* names) {
  if (marker.read == nullptr) return marker.purpose;
  py::object first = py::none();
  c10::SmallVector<PyObject*, 8> all;
  if (marker.of_caller) {
    Frame frame;
    PyObject* const own = innermost(frame) ? first_argument(frame) : nullptr;
    finished(frame);
    if (own != nullptr) first = py::reinterpret_steal<py::object>(own);
    all.push_back(first.ptr());
    all.append(args, args + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
    args = all.data(), count++;
  }
  return marker.key == nullptr ? read_purpose(marker, args, count, names) : purpose_by_key(marker, args, count, names);
}

static PyObject* call_marked(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
  auto& marker = *reinterpret_cast<Marker*>(self);
  const bool claimed = marker.unclaimed && Thread::current().purpose != kNoPurpose;
  const Read read = claimed ? kNoPurpose : purpose_of(marker, args, PyVectorcall_NARGS(count), names);
  if (!read) return nullptr;
  const auto purpose = static_cast<uint32_t>(*read < 0 ? ~*read : *read);
  PyObject* const original = Py_NewRef(marker.original);  // the call may end the hook
  const bool marks = purpose != kNoPurpose;
  const uint32_t purpose_before = marks ? std::exchange(Thread::current().purpose, purpose) : kNoPurpose;
  const auto part = marker.progress == nullptr ? std::nullopt : std::optional(marker.begin_part());
  PyObject* result = PyObject_Vectorcall(original, args, count, names);
  if (part) result = marker.end_part(*part, result);
  if (marks) Thread::current().purpose = purpose_before;
  Py_DECREF(original);
  return result;
}

// ---- the type ----------------------------------------------------------------------------------------------------------

static PyObject* bind_marker(PyObject* self, PyObject* object, PyObject*) {
  return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static int traverse_marker(PyObject* self, visitproc visit, void* arg) {
  auto& marker = *reinterpret_cast<Marker*>(self);
  Py_VISIT(Py_TYPE(self));
  for (PyObject* object : {marker.original, marker.attributes, marker.read, marker.key, marker.kept,
                           marker.end_first_step})
    Py_VISIT(object);
  return 0;
}

static int clear_marker(PyObject* self) {
  auto& marker = *reinterpret_cast<Marker*>(self);
  Py_CLEAR(marker.attributes);
  Py_CLEAR(marker.read);
  if (marker.purposes != nullptr) marker.purposes->clear();
  Py_CLEAR(marker.kept);
  return 0;
}

static void delete_marker(PyObject* self) {
  auto& marker = *reinterpret_cast<Marker*>(self);
  PyObject_GC_UnTrack(self);
  if (marker.weak_references != nullptr) PyObject_ClearWeakRefs(self);
  clear_marker(self);
  for (PyObject** object : {&marker.original, &marker.key, &marker.end_first_step}) Py_CLEAR(*object);
  delete marker.purposes;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Pickled and copied as a function is, by its name.
static PyObject* name_of_marker(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

static PyTypeObject* marker_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Marker, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Marker, attributes), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Marker, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef accessors[] = {
      {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef functions[] = {{"__reduce__", &name_of_marker, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(&bind_marker)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&traverse_marker)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear_marker)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&delete_marker)},
                                {Py_tp_members, members},
                                {Py_tp_getset, accessors},
                                {Py_tp_methods, functions},
                                {0, nullptr}};
  static PyType_Spec spec = {"commtrace_native.Marker", sizeof(Marker), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR |
                                 Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

static Marker* make_marker(const py::object& original) {
  auto* marker = reinterpret_cast<Marker*>(PyType_GenericAlloc(marker_type(), 0));  // all zero, and tracked
  if (marker == nullptr) throw py::error_already_set();
  marker->call = &call_marked;
  marker->original = Py_NewRef(original.ptr());
  return marker;
}

static PyObject* reference_to(const py::object& object) { return object.is_none() ? nullptr : Py_NewRef(object.ptr()); }

// Same as ThreadLocalStore.wrapped in Python. `marking`: a Marking of hooks/purposes.py.
static py::object with_purpose(const py::object& original, const py::tuple& marking) {
  Marker* marker = make_marker(original);
  const auto made = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(marker));
  marker->purpose = marking[0].cast<uint32_t>();
  marker->read = reference_to(marking[1]);
  marker->key = reference_to(marking[2]);
  marker->of_caller = marking[3].cast<bool>();
  marker->unclaimed = marking[4].cast<bool>();
  marker->in_module = marking[5].cast<bool>();
  marker->purposes = new NumberTable;
  marker->kept = py::list().release().ptr();
  return made;
}

// Same as Progress._wrapped in Python. `part`: a StepPart of commtrace/current_step.py.
static py::object as_part(const py::object& original, Progress* progress, const py::tuple& part,
                          const py::object& end_first_step) {
  Marker* marker = make_marker(original);
  marker->progress = progress;
  marker->phase = part[0].cast<int32_t>();
  marker->micro_batch = static_cast<MicroBatch>(part[1].cast<int>());
  marker->begins_step = part[2].cast<bool>();
  marker->finishes_step = part[3].cast<bool>();
  marker->end_first_step = Py_NewRef(end_first_step.ptr());
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(marker));
}

}  // namespace commtrace
