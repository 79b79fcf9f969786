// The native recorder of torch.distributed as a Python module: recordings, kernels, waits. All of it is one translation
// unit, because reading torch's headers takes most of a build: several units took three times as long.
#include <pthread.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "markers.h"
#include "waits.h"

namespace commtrace {

using Numbers = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

template <typename Function>
auto without_gil(Function function) {
  py::gil_scoped_release unlocked;
  return function();
}

Numbers as_array(const std::vector<uint32_t>& numbers) {
  return Numbers(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

// Closed recordings, reused for rings of the same size. Guarded by the GIL.
auto* const closed_recordings = new std::vector<Recording*>;

Recording* recording_for(uint32_t capacity) {
  const auto closed = std::find_if(closed_recordings->begin(), closed_recordings->end(),
                                   [=](Recording* recording) { return recording->slots.capacity() == capacity; });
  if (closed == closed_recordings->end()) return new Recording(capacity);
  Recording* recording = *closed;
  closed_recordings->erase(closed);
  return recording;
}

// The process's progress. The cells' buffer is held for ever, which keeps the array from being resized.
Progress* progress_in(const py::buffer& progress) {
  static const auto* cells = new py::buffer_info(progress.request(true));
  if (cells->itemsize != 4 || cells->size * 4 != sizeof(Progress)) throw py::value_error("these are not progress cells");
  return static_cast<Progress*>(cells->ptr);
}

Recording* open_recording(const py::buffer& ring, size_t alive_at, size_t dropped_at, size_t records_at,
                          uint32_t capacity, bool sites, bool device_times, const py::buffer& progress) {
  Recording* recording = recording_for(capacity);
  // The ring's buffer is not held, as that would keep the mapping from being closed; Python keeps it until the recording
  // is closed.
  recording->open(static_cast<char*>(ring.request(true).ptr), alive_at, dropped_at, records_at, sites, device_times,
                  progress_in(progress));
  return recording;
}

// Starts recording; `rows` is the Rows of rows.py.
void start(Recording& recording, const py::object& rows) {
  recording.rows.open(rows);
  current.store(&recording, std::memory_order_release);
}

// Returns the slots with records, and the number of calls that had taken a slot but not yet written to it. `off`: the
// next call does not begin another recording.
py::tuple close_recording(Recording& recording, bool off) {
  Recording* expected = &recording;
  if (off) disarm();
  current.compare_exchange_strong(expected, nullptr);
  const auto [slots, unwritten] = without_gil([&] { return recording.close(); });
  recording.forget();
  return py::make_tuple(as_array(slots), unwritten);
}

// Makes the recording available for another ring when its log is complete.
void recycle(Recording& recording) { closed_recordings->push_back(&recording); }

uint32_t take_slot(Slots& slots) {
  const uint32_t slot = slots.detached() ? Slots::kEmpty : slots.take();
  if (slot == Slots::kEmpty) throw py::index_error("no free slot");
  return slot;
}

Numbers finished_slots(Recording& recording) {
  return as_array(without_gil([&] { return recording.finished(); }));
}

// Copies of these slots' records, one after another.
py::array_t<uint8_t> records(Recording& recording, const Numbers& slots) {
  py::array_t<uint8_t> copies(slots.size() * static_cast<py::ssize_t>(sizeof(Record)));
  auto* to = reinterpret_cast<Record*>(copies.mutable_data());
  without_gil([&] {
    for (py::ssize_t i = 0; i < slots.size(); i++) recording.slots.copy(slots.data()[i], to[i]);
  });
  return copies;
}

void release(Recording& recording, const Numbers& slots) {
  py::gil_scoped_release unlocked;
  for (py::ssize_t i = 0; i < slots.size(); i++) recording.release(slots.data()[i]);
}

// Returns the number of errors, the number of calls without a record because of them, the first error, cost samples of
// all calls, cost samples of all but first calls, the number of first calls, their cost, the number of calls without a
// free event, and the largest error of a device's clock in ns. Resets all but the first error and the last two.
py::tuple take_tally(Recording& recording) {
  Tally& tally = recording.tally;
  DeviceTimes& devices = recording.devices;
  if (const std::string failure = devices.failure(); !failure.empty()) tally.count_fault(failure.c_str());
  const uint64_t samples = std::min<uint64_t>(tally.samples.exchange(0), tally.costs.size());
  py::list costs, steady;
  for (uint64_t i = 0; i < samples; i++) {
    const Tally::Sample sample = tally.costs[i].load(std::memory_order_relaxed);
    costs.append(int64_t{sample.ns});
    if (!sample.first) steady.append(int64_t{sample.ns});
  }
  std::lock_guard<std::mutex> held(tally.mutex);
  return py::make_tuple(tally.errors.exchange(0), tally.unrecorded.exchange(0), tally.first_error, costs, steady,
                        tally.first_calls.exchange(0), tally.first_ns.exchange(0), devices.untimed(), devices.error());
}

uint32_t next_seq(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = recording.group(pg.get());
  return group == nullptr ? 0 : group->collectives.fetch_add(1);
}

// Offsets of a record's fields.
py::dict layout() {
  py::dict offsets;
  for (const Field& field : kLayout) offsets[field.name] = field.offset;
  return offsets;
}

// The plan of an `Operator` of hooks/torch/c10d_operators.py.
Plan plan_of(const py::handle& op, int number) {
  const auto at = [&](const char* name) {
    const py::object position = op.attr(name);
    return position.is_none() ? -1 : position.cast<int>();
  };
  const auto flag = [&](const char* name) { return op.attr(name).cast<bool>(); };
  const auto about = op.attr("about").cast<std::vector<int>>();
  const auto operation = op.attr("op").cast<std::string>();
  Plan plan;
  plan.name = op.attr("variant").cast<std::string>();
  plan.number = number;
  plan.arguments = static_cast<int>(py::len(op.attr("overload").attr("_schema").attr("arguments")));
  plan.measure = kForms.at(op.attr("form").cast<std::string>());
  std::copy(about.begin(), about.end(), plan.about.begin());
  plan.group_at = at("group_at"), plan.async_at = at("async_at"), plan.reduce_op_at = at("reduce_op_at");
  plan.peer_at = at("peer_at"), plan.tag_at = at("tag_at");
  plan.output_at = at("output_at"), plan.sample_at = at("sample_at");
  plan.coalesced = flag("coalesced"), plan.blocking = flag("blocking"), plan.message = flag("point_to_point");
  plan.send = operation == "send", plan.barrier = operation == "barrier";
  plan.all_reduce = operation == "all_reduce";
  return plan;
}

// Installs kernels for these operators of c10d and of _c10d_functional.
void install_kernels(const py::sequence& operators, const std::vector<std::string>& functional) {
  int number = 0;
  for (const py::handle op : operators) {
    const auto* plan = new Plan(plan_of(op, number++));  // never freed: the kernel stays
    add_kernel("c10d", plan->name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CallKernel>(*plan)));
  }
  for (const std::string& name : functional)
    add_kernel("_c10d_functional", name,
               name == "wait_tensor" || name == "wait_tensors"
                   ? torch::CppFunction::makeFromBoxedFunction<&wait_kernel>()
                   : torch::CppFunction::makeFromBoxedFunction<&functional_kernel>());
}

}  // namespace commtrace

// The store of purposes' marks (purposes.Store). Plain C functions: FSDP2 calls them several times for each unit and step,
// and pybind11's dispatch takes 20 times as long.
static PyObject* current_purpose(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(commtrace::Thread::current().purpose); }

static PyObject* exchange_purpose(PyObject*, PyObject* purpose) {
  const unsigned long number = PyLong_AsUnsignedLong(purpose);
  if (number == static_cast<unsigned long>(-1) && PyErr_Occurred()) return nullptr;
  return PyLong_FromUnsignedLong(std::exchange(commtrace::Thread::current().purpose, static_cast<uint32_t>(number)));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace commtrace;
  pthread_atfork(nullptr, nullptr, &forked_in_child);
  // The free slots, with the deque methods that Python's recorder uses.
  py::class_<Slots, std::unique_ptr<Slots, py::nodelete>>(m, "FreeSlots")
      .def("popleft", &take_slot)
      .def("append", &Slots::give)
      .def("clear", &Slots::forked)
      .def("__len__", &Slots::free);
  py::class_<Recording, std::unique_ptr<Recording, py::nodelete>>(m, "Recording")
      .def_readonly("free", &Recording::slots)
      .def("start", &start)
      .def("wait", &Recording::wait, py::call_guard<py::gil_scoped_release>())
      .def("wake", &Recording::wake)
      .def("drop", [](Recording& recording, uint64_t calls) { return recording.slots.drop(calls); })
      .def("finished", &finished_slots)
      .def("records", &records)
      .def("release", &release)
      .def("close", &close_recording)
      .def("recycle", &recycle)
      .def("tally", &take_tally)
      .def("forget_sites", [](Recording& recording) { recording.callsites.forget(); })
      .def("resolve", [](Recording& recording) { recording.devices.resolve(); }, py::call_guard<py::gil_scoped_release>())
      .def("next_seq", &next_seq)
      .def("batch_begins", &batch_begins)
      .def("batch_ends", &batch_ends);
  m.def("open", &open_recording, py::return_value_policy::reference);
  m.def("install", &install_kernels);
  m.def("arm", &arm);
  m.def("disarm", &disarm);
  m.def("remove_kernels", &remove_kernels);
  m.def("replace_wait", &replace_wait);
  m.def("note_completed", &note_completed);
  m.def("layout", &layout);
  m.def("frames_agree", &frames_agree);
  m.def("shares_types", [] { return py::detail::get_type_info(typeid(c10d::ProcessGroup)) != nullptr; });
  static std::array<PyMethodDef, 2> store{
      PyMethodDef{"current", &current_purpose, METH_NOARGS, "Returns the purpose of this thread's calls."},
      PyMethodDef{"exchange", &exchange_purpose, METH_O, "Sets the purpose of this thread's calls; returns the last."}};
  py::module_ purposes = m.def_submodule("purposes", "The store of purposes' marks.");
  for (PyMethodDef& function : store)
    purposes.attr(function.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&function, nullptr));
  purposes.def("wrapped", &with_purpose);
  m.def("as_part", [](const py::object& original, const py::buffer& progress, const py::tuple& part,
                      const py::object& end_first_step) {
    return as_part(original, progress_in(progress), part, end_first_step);
  });
  m.def("crossing", &crossing, py::call_guard<py::gil_scoped_release>());
}
