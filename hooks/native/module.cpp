// What Python calls: recordings, kernels, waits.
#include <pthread.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "recording_kernels.h"
#include "recording.h"
#include "waits.h"

namespace commtrace {

using Numbers = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

Numbers as_array(const std::vector<uint32_t>& numbers) {
  return Numbers(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

// Closed recordings, which serve again for a ring of the same size. Touched with the GIL only.
auto* const closed_recordings = new std::vector<Recording*>;

Recording* recording_for(uint32_t capacity) {
  for (auto& closed : *closed_recordings)
    if (closed->slots.capacity() == capacity) {
      std::swap(closed, closed_recordings->back());
      Recording* again = closed_recordings->back();
      closed_recordings->pop_back();
      return again;
    }
  return new Recording(capacity);
}

Recording* open_recording(const py::buffer& ring, size_t dropped_at, size_t records_at, uint32_t capacity, bool sites,
                          bool device_times, const py::buffer& progress) {
  // The cells stay where they are: whoever holds the buffer of an array keeps it from being resized. The ring's is asked
  // for only once, as a mapping that is looked into cannot be unmapped; Python keeps it until the recording is closed.
  static const auto* cells = new py::buffer_info(progress.request(true));
  if (cells->itemsize != 4 || cells->size * 4 != sizeof(Progress)) throw py::value_error("these are not progress cells");
  Recording* recording = recording_for(capacity);
  recording->open(static_cast<char*>(ring.request(true).ptr), dropped_at, records_at, sites, device_times,
                  static_cast<Progress*>(cells->ptr));
  return recording;
}

// Starts recording; `rows` gives the numbers of new rows.
void go(Recording& recording, const py::object& rows) {
  recording.ask.answers(rows);
  current.store(&recording, std::memory_order_release);
}

// (slots that hold records, how many calls had taken one and not begun to write). `off`: the next call begins no other one.
py::tuple close_recording(Recording& recording, bool off) {
  Recording* expected = &recording;
  if (off) disarm();
  current.compare_exchange_strong(expected, nullptr);
  std::pair<std::vector<uint32_t>, uint32_t> left;
  {
    py::gil_scoped_release unlocked;
    left = recording.close();
  }
  recording.forget();
  return py::make_tuple(as_array(left.first), left.second);
}

// Its log is complete: the recording can be used for another ring.
void let_go(Recording& recording) { closed_recordings->push_back(&recording); }

uint32_t take_slot(Recording& recording) {
  const uint32_t slot = recording.slots.gone() ? Slots::kEmpty : recording.slots.take();
  if (slot == Slots::kEmpty) throw py::index_error("no free slot");
  return slot;
}

Numbers finished_slots(Recording& recording) {
  std::vector<uint32_t> found;
  {
    py::gil_scoped_release unlocked;
    found = recording.finished();
  }
  return as_array(found);
}

// Copies of these slots' records, one after another.
py::array_t<uint8_t> records(Recording& recording, const Numbers& slots) {
  py::array_t<uint8_t> copies(slots.size() * static_cast<py::ssize_t>(sizeof(Record)));
  auto* to = reinterpret_cast<Record*>(copies.mutable_data());
  py::gil_scoped_release unlocked;
  for (py::ssize_t i = 0; i < slots.size(); i++) recording.slots.copy(slots.data()[i], to[i]);
  return copies;
}

void release(Recording& recording, const Numbers& slots) {
  py::gil_scoped_release unlocked;
  for (py::ssize_t i = 0; i < slots.size(); i++) recording.release(slots.data()[i]);
}

// Since the last time: errors, the first error, cost samples, those of them that are not of first calls, first calls and
// their cost.
py::tuple take_tally(Recording& recording) {
  Tally& tally = recording.tally;
  const uint64_t samples = std::min<uint64_t>(tally.samples.exchange(0), tally.costs.size());
  py::list costs, steady;
  for (uint64_t i = 0; i < samples; i++) {
    const Tally::Sample sample = tally.costs[i].load(std::memory_order_relaxed);
    costs.append(int64_t{sample.ns});
    if (!sample.first) steady.append(int64_t{sample.ns});
  }
  std::lock_guard<std::mutex> held(tally.mutex);
  return py::make_tuple(tally.errors.exchange(0), tally.first_error, costs, steady, tally.first_calls.exchange(0),
                        tally.first_ns.exchange(0));
}

// (calls without a time as no event was left, ns of error of the device's clock, why a device failed) so far, as of the
// last resolve, and since the last time.
py::tuple device_tally(Recording& recording) {
  DeviceTimes& devices = recording.devices;
  return py::make_tuple(devices.untimed(), devices.error(), devices.failure());
}

uint32_t next_seq(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = recording.group(pg.get());
  return group == nullptr ? 0 : group->collectives.fetch_add(1);
}

// Offset of each field of a record.
py::dict layout() {
  py::dict offsets;
  for (const Field& field : kLayout) offsets[field.name] = field.offset;
  return offsets;
}

void bind_plan(py::module_& m) {
  py::enum_<Form>(m, "Form")
      .value("nothing", Form::kNothing)
      .value("buffers", Form::kBuffers)
      .value("pair", Form::kPair)
      .value("lists", Form::kLists)
      .value("rooted", Form::kRooted)
      .value("all_to_all", Form::kAllToAll)
      .value("all_to_all_single", Form::kAllToAllSingle);
  py::class_<Plan>(m, "Plan")
      .def(py::init<>())
      .def_readwrite("space", &Plan::space)
      .def_readwrite("name", &Plan::name)
      .def_readwrite("number", &Plan::number)
      .def_readwrite("arguments", &Plan::arguments)
      .def_readwrite("form", &Plan::form)
      .def_readwrite("first", &Plan::first)
      .def_readwrite("second", &Plan::second)
      .def_readwrite("third", &Plan::third)
      .def_readwrite("group_at", &Plan::group_at)
      .def_readwrite("async_at", &Plan::async_at)
      .def_readwrite("reduce_op_at", &Plan::reduce_op_at)
      .def_readwrite("peer_at", &Plan::peer_at)
      .def_readwrite("tag_at", &Plan::tag_at)
      .def_readwrite("output_at", &Plan::output_at)
      .def_readwrite("sample_at", &Plan::sample_at)
      .def_readwrite("coalesced", &Plan::coalesced)
      .def_readwrite("blocking", &Plan::blocking)
      .def_readwrite("message", &Plan::message)
      .def_readwrite("send", &Plan::send)
      .def_readwrite("barrier", &Plan::barrier);
  m.attr("MOST_PLANS") = kMostPlans;
}

void bind_recording(py::module_& m) {
  py::class_<Recording, std::unique_ptr<Recording, py::nodelete>>(m, "Recording")
      .def_property_readonly("free", [](const Recording& recording) { return recording.slots.free(); })
      .def("go", &go)
      .def("wait", &Recording::wait, py::call_guard<py::gil_scoped_release>())
      .def("wake", &Recording::wake)
      .def("take", &take_slot)
      .def("give", [](Recording& recording, uint32_t slot) { recording.slots.give(slot); })
      .def("drop", [](Recording& recording, uint64_t calls) { return recording.slots.drop(calls); })
      .def("finished", &finished_slots)
      .def("records", &records)
      .def("release", &release)
      .def("close", &close_recording)
      .def("let_go", &let_go)
      .def("forked", [](Recording& recording) { recording.slots.forked(); })
      .def("tally", &take_tally)
      .def("resolve", [](Recording& recording) { recording.devices.resolve(); }, py::call_guard<py::gil_scoped_release>())
      .def("device_tally", &device_tally)
      .def("next_seq", &next_seq)
      .def("batch_begins", &batch_begins)
      .def("batch_ends", &batch_ends);
  m.def("open", &open_recording, py::return_value_policy::reference);
}

}  // namespace commtrace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace commtrace;
  pthread_atfork(nullptr, nullptr, &forked_in_child);
  bind_plan(m);
  bind_recording(m);
  m.def("install", &install);
  m.def("arm", &arm);
  m.def("disarm", &disarm);
  m.def("remove_kernels", &remove_kernels);
  m.def("waiting", &waiting_for);
  m.def("polled", &polled);
  m.def("layout", &layout);
  m.def("crossing", &crossing, py::call_guard<py::gil_scoped_release>());
}
