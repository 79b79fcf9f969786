// The native recorder: kernels before torch's own that record a call and hand it on, and what Python needs to steer them.
//
// Rules, all from runs that hung or crashed:
//   - no lock of ours is held while the GIL is taken, and the GIL is never held while a call is handed on;
//   - a Work may be null (NCCL's synchronous calls), and its future is an end on the host only;
//   - threads of a backend may come with a completion after the log was closed: a Handle then opens nothing.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <optional>

#include "recording.h"

namespace commtrace {

using c10::DispatchKeySet;
using torch::jit::Stack;

// Tracing is on and no call has been made yet: the first one has Python begin.
std::atomic<bool> armed{false};
PyObject* begin_recording = nullptr;

void hand_on(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
}

// ---- before the call ---------------------------------------------------------------------------------------------------

// A call between its beginning and its return.
struct Entry {
  Recording* recording;
  const Plan& plan;
  Handle handle;
  Group* group = nullptr;
  bool on_host = true;
  Begun on_device;
  bool asynchronous = false, sampled = false;
  const void* tensor = nullptr;  // a functional call is waited for by this one
  int64_t entered = 0, begun = 0;
};

// A compiler tracing the program, not communication.
bool is_fake(const at::Tensor& tensor) {
  if (tensor.is_meta()) return true;
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return false;
  py::gil_scoped_acquire gil;
  const auto fake = py::module_::import("torch._subclasses.fake_tensor").attr("FakeTensor");
  return py::isinstance(py::cast(tensor), fake);
}

Recording* begin_if_armed(const at::Tensor* sample) {
  if (!armed.load(std::memory_order_acquire) || (sample != nullptr && is_fake(*sample))) return nullptr;
  py::gil_scoped_acquire gil;
  if (begin_recording == nullptr) return nullptr;
  armed.store(py::reinterpret_borrow<py::object>(begin_recording)().cast<bool>());
  return current.load();
}

Group* group_of(Recording& recording, Thread& thread, const c10::IValue& boxed) {
  const auto shared = boxed.toObjectRef().getSlot(0).toCapsule();
  auto* pg = static_cast<c10d::ProcessGroup*>(shared.get());
  auto& last = thread.groups[reinterpret_cast<uintptr_t>(pg) / sizeof(c10d::ProcessGroup) % 16];
  if (last.pg != pg) {
    Group* group = recording.group(pg, c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(shared));
    if (group == nullptr) return nullptr;
    last = {pg, group};
  }
  return last.group;
}

// Site, phase and what the frames tell, as TorchTracer._whereabouts of the twin.
CallSite whereabouts(Recording& recording, Record& record) {
  Progress& progress = *recording.progress;
  const int mark = progress.get(progress.mark), task = torch::autograd::get_current_graph_task_id();
  int phase = task == -1 ? mark : mark == kInit ? kInit : kBackwardPhase;
  const bool by_frames = phase == kUnmarked;
  CallSite seen;
  if (by_frames || recording.sites_wanted)
    seen = recording.callsites.find(by_frames, recording.sites_wanted, recording.rows);
  if (by_frames) {
    const int unmarked = progress.get(progress.step) < 0 ? kInit : kOther;
    phase = seen.seen & kForward ? kForwardPhase : seen.seen & kOptimizer ? kOptimizerPhase : unmarked;
  }
  if (progress.between_steps() && (phase == kBackwardPhase || (phase == kForwardPhase && recording.trains())))
    progress.activity();
  if (recording.sites_wanted && seen.site == 0 && task != -1) seen.site = recording.site_of_backward(task);
  record.phase = static_cast<uint8_t>(phase);
  record.step = progress.get(progress.step);
  record.micro_batch = progress.get(progress.micro_batch);
  record.site = seen.site;
  return seen;
}

void address(const Plan& plan, Arguments args, Group& group, Record& record) {
  record.peer = plan.peer_at < 0 ? -1 : group.global_rank(args[plan.peer_at].toInt());
  record.tag = -1;
  if (!plan.message) {
    record.seq = group.collectives.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (plan.tag_at >= 0) record.tag = static_cast<int32_t>(args[plan.tag_at].toInt());
  const int own = group.global_rank(group.rank);
  record.seq = plan.send ? group.message(own, record.peer, record.tag) : group.message(record.peer, own, record.tag);
}

uint8_t flags_of(const Plan& plan, Arguments args, const at::Tensor* sample, bool uneven, uint8_t seen, bool functional,
                 bool batched) {
  // A message's operator is the same for both; who called it tells whether the caller waits.
  const bool asynchronous = plan.message ? functional || ((seen & kHandle) && !(seen & kBlocking))
                                         : plan.async_at >= 0 && args[plan.async_at].toBool();
  return (asynchronous ? kAsync : 0) | (seen & kObject ? kObjects : 0) | (uneven ? kUneven : 0) |
         (batched || plan.coalesced ? kCoalesced : 0) |
         (sample != nullptr && sample->layout() != at::kStrided ? kSparse : 0);
}

// Where the call begins on its device; a coalesced one where its batch does. Whether it goes into a graph.
bool begin_on_device(Entry& entry, const at::Tensor& sample, bool batched) {
  if (!batched) {
    entry.on_device = entry.recording->devices.begins(sample.device());
    return entry.on_device.captured;
  }
  Group& group = *entry.group;
  {
    std::lock_guard<std::mutex> held(group.mutex);
    const Begun& begun = group.batch_on_device;
    if (begun.device != nullptr) {
      if (!begun && !begun.captured) entry.recording->devices.missed();
      return begun.captured;
    }
  }
  Begun begun = entry.recording->devices.begins(sample.device());
  std::lock_guard<std::mutex> held(group.mutex);
  group.batch_on_device = std::move(begun);
  return group.batch_on_device.captured;
}

bool record_call(Entry& entry, Thread& thread, Arguments args, const at::Tensor* sample) {
  Recording& recording = *entry.recording;
  const Plan& plan = entry.plan;
  Record record{};
  Group* group = entry.group = group_of(recording, thread, args[plan.group_at]);
  if (group == nullptr) return false;
  const Size size = measure(plan, args, group->size, group->rank);
  const CallSite seen = whereabouts(recording, record);
  const bool typed = sample != nullptr && !plan.barrier;
  const auto* reduce_op = plan.reduce_op_at < 0 ? nullptr : unboxed<c10d::ReduceOp>(args[plan.reduce_op_at]);
  record.kind = recording.kind(plan, typed ? static_cast<int>(sample->scalar_type()) : -1,
                               reduce_op == nullptr ? -1 : static_cast<int>(reduce_op->op_));
  record.payload = size.payload;
  record.local = size.local;
  record.group = group->number;
  record.batch = group->batch.load(std::memory_order_relaxed);
  record.thread = thread.number;
  record.flags = flags_of(plan, args, sample, size.uneven, seen.seen, thread.functional > 0, record.batch != 0);
  record.state = kBegun;
  address(plan, args, *group, record);  // last, as it counts
  entry.on_host = sample == nullptr || sample->is_cpu();
  if (thread.functional > 0)
    if (const at::Tensor* output = first_tensor(args[plan.output_at]))
      entry.tensor = output->storage().unsafeGetStorageImpl();
  const bool captured = !entry.on_host && begin_on_device(entry, *sample, record.batch != 0);
  if (captured) record.flags |= kCaptured;
  entry.asynchronous = record.flags & kAsync;
  entry.begun = now();
  record.t_begin = entry.on_device ? entry.on_device.point.submitted : entry.begun;
  entry.handle = recording.begin(record);
  return static_cast<bool>(entry.handle);
}

// Never throws but what Python wants thrown (an interrupt).
bool before(Entry& entry, Thread& thread, Arguments args, const at::Tensor* sample) {
  try {
    if (sample != nullptr && is_fake(*sample)) return false;  // before anything asks for its size, which may be symbolic
    return record_call(entry, thread, args, sample);
  } catch (py::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    entry.recording->tally.fault(error.what());
    return false;
  }
}

// ---- after the call ----------------------------------------------------------------------------------------------------

// The future that shows the end of a call on the host; null where the backend has none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(const Entry& entry, c10d::Work& work) {
  const uint64_t bit = 1ULL << (entry.plan.number & 63);
  if (!entry.on_host || (entry.group->futureless.load(std::memory_order_relaxed) & bit)) return nullptr;
  try {
    if (auto future = work.getFuture()) return future;
  } catch (const std::exception&) {  // gloo's send and recv
  }
  entry.group->futureless.fetch_or(bit);
  return nullptr;
}

void follow(Recording* recording, Handle handle, c10::ivalue::Future& future) {
  future.addCallback(
      [recording, handle](c10::ivalue::Future& ended) {
        recording->ended(handle, now(), kFuture, ended.hasError() ? kFailed : kComplete);
      },
      false);
}

// The call has become one of a batch, whose Work will show its end.
bool join_batch(const Entry& entry) {
  Group& group = *entry.group;
  if (group.batch.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard<std::mutex> held(group.mutex);
  if (group.batch.load() == 0) return false;
  group.batched.push_back(entry.handle);
  group.batch_on_host |= entry.on_host;
  return true;
}

State returned(Entry& entry, int64_t t_return, State state, Clock clock = kNobody) {
  entry.recording->slots.update(entry.handle, [=](Record& record) {
    record.t_return = t_return;
    if (state == kComplete) {
      record.t_end = t_return;
      record.clock = clock;
    }
    return state;
  });
  return state;
}

void after(Entry& entry, Stack* stack, int64_t t_return) {
  Recording& recording = *entry.recording;
  if (entry.plan.blocking) {
    returned(entry, t_return, kComplete, kReturn);
    return;
  }
  const auto boxed = stack->back().isObject() ? stack->back().toObjectRef().getSlot(0).toCapsule() : nullptr;
  const auto work = c10::static_intrusive_pointer_cast<c10d::Work>(boxed);
  if (entry.group->batch.load(std::memory_order_relaxed) != 0) {
    returned(entry, t_return, kReturned);
    if (join_batch(entry)) return;
    recording.unobservable(entry.handle);
    return;
  }
  if (!work) {
    // Without a Work, where none was asked for, the call is in the current stream, between two events.
    const bool in_stream = entry.on_device && !entry.asynchronous;
    returned(entry, t_return, in_stream ? kReturned : kUnobservable);
    if (in_stream && !recording.devices.ends(entry.handle, std::move(entry.on_device)))
      recording.unobservable(entry.handle);
    return;
  }
  const auto future = future_of(entry, *work);
  const bool on_device = !entry.on_host && recording.devices.runs(entry.handle, std::move(entry.on_device));
  const bool by_wait = entry.on_host && !future;
  // Listed before it counts as returned: from then on the slot may become another call's.
  if (entry.tensor != nullptr)
    recording.waits.add(entry.tensor, entry.handle, by_wait);
  else
    recording.waits.add(work.get(), entry.handle, by_wait, by_wait ? std::optional<WeakWork>(work) : std::nullopt);
  if (future && future->completed() && !future->hasError()) {
    returned(entry, t_return, kComplete, kFuture);
    return;
  }
  returned(entry, t_return, entry.on_host || on_device ? kReturned : kUnobservable);
  if (future) follow(&recording, entry.handle, *future);
}

void after_or_fault(Entry& entry, Stack* stack) {
  const int64_t t_return = now();
  try {
    after(entry, stack, t_return);
  } catch (const std::exception& error) {
    entry.recording->tally.fault(error.what());
    entry.recording->slots.update(entry.handle, [=](Record& record) -> uint8_t {
      record.t_return = t_return;
      return record.state < kComplete ? kUnobservable : record.state;
    });
  }
  if (entry.sampled) {
    entry.recording->sample_wait.store(true, std::memory_order_relaxed);
    entry.recording->tally.sample(entry.begun - entry.entered + now() - t_return + entry.recording->wait_cost.load());
  }
}

// There was no place for a record.
void unrecorded(Recording& recording, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  hand_on(op, keys, stack);
  if (!recording.devices.wanted() || stack->empty()) return;
  if (const void* work = unboxed<c10d::Work>(stack->back())) recording.waits.forget(work);
}

// ---- kernels -----------------------------------------------------------------------------------------------------------

constexpr uint32_t kSampleMask = 31, kSampled = 15;  // the cost of one call in 32 is measured, the 16th of each

class CallKernel : public c10::OperatorKernel {
 public:
  explicit CallKernel(const Plan* plan) : plan_(*plan) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Recording* recording = current.load(std::memory_order_acquire);
    if (recording == nullptr && !armed.load(std::memory_order_relaxed)) return hand_on(op, keys, stack);
    const Arguments args = torch::jit::last(*stack, plan_.arguments);
    const at::Tensor* sample = first_of(args[plan_.sample_at]);
    if (recording == nullptr) recording = begin_if_armed(sample);
    if (recording == nullptr) return hand_on(op, keys, stack);
    Thread& thread = Thread::of(*recording);
    Entry entry{recording, plan_, {}};
    entry.sampled = (thread.calls++ & kSampleMask) == kSampled;
    if (entry.sampled) entry.entered = now();
    if (!before(entry, thread, args, sample)) return unrecorded(*recording, op, keys, stack);
    try {
      hand_on(op, keys, stack);
    } catch (...) {
      returned(entry, now(), kFailed);
      throw;
    }
    after_or_fault(entry, stack);
  }

 private:
  static const at::Tensor* first_of(const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? &value.toTensor() : nullptr;
    if (!value.isList()) return nullptr;
    const auto items = value.toListRef();
    return items.empty() || !items.front().isTensor() ? nullptr : first_of(items.front());
  }

  const Plan& plan_;
};

// A wait that makes a stream wait. If it is left by an exception its calls have failed.
class DeviceWait {
 public:
  DeviceWait(Recording& recording, const Waits::AllFound& found) : devices_(recording.devices) {
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

// Calls of `_c10d_functional` arrive at `c10d` operators; who waits for them names a tensor.
class FunctionalKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    struct Within {
      Within() { Thread::mine().functional++; }
      ~Within() { Thread::mine().functional--; }
    } within;
    hand_on(op, keys, stack);
  }
};

class WaitKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Recording* recording = current.load(std::memory_order_acquire);
    const at::Tensor* tensor = recording == nullptr ? nullptr : first_tensor(stack->back());
    if (tensor == nullptr || tensor->is_meta() || !tensor->has_storage()) return hand_on(op, keys, stack);
    const void* key = tensor->storage().unsafeGetStorageImpl();
    const int64_t t_wait = now();
    const auto found = recording->waits.begins(key);
    for (const auto& call : found) recording->wait_begins(call.handle, t_wait);
    DeviceWait on_device(*recording, found);
    hand_on(op, keys, stack);
    const int64_t t_end = now();
    on_device.ends(false);
    for (const auto& call : recording->waits.ends(key)) recording->ended(call.handle, t_end, kWait);
  }
};

class PassKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) { hand_on(op, keys, stack); }
};

// ---- waits made in Python ----------------------------------------------------------------------------------------------

PyTypeObject* work_type = nullptr;

// As pybind11's casters, which look the type up by its name each time. It is compared only, never followed.
const void* work_of(PyObject* self) {
  if (!PyObject_TypeCheck(self, work_type)) return nullptr;
  const auto* instance = reinterpret_cast<py::detail::instance*>(self);
  return instance->simple_layout ? instance->simple_value_holder[0] : nullptr;
}

PyObject* wait_traced(Recording& recording, PyObject* wait, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const void* work = work_of(args[0]);
  const int64_t t_wait = now();
  const auto found = work == nullptr ? Waits::AllFound{} : recording.waits.begins(work);
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
  const int64_t cost = now() - t_wait;
  PyObject* result = PyObject_Vectorcall(wait, args, count, names);
  const int64_t returned = now();
  if (on_device) {
    const py::gil_scoped_release unlocked;
    on_device->ends(result == nullptr);
  }
  if (recording.sample_wait.load(std::memory_order_relaxed)) {
    recording.sample_wait.store(false, std::memory_order_relaxed);
    recording.wait_cost.store(cost + (on_device ? now() - returned : 0));
  }
  if (by_wait) {
    for (const auto& call : recording.waits.ends(work))
      recording.ended(call.handle, returned, kWait, result == nullptr ? kFailed : kComplete);
  }
  return result;
}

// Stands for `Work.wait`. In C, as its cost is added to every synchronous call.
PyObject* waiting(PyObject* wait, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Recording* recording = current.load(std::memory_order_acquire);
  if (recording == nullptr || count == 0) return PyObject_Vectorcall(wait, args, count, names);
  return wait_traced(*recording, wait, args, count, names);
}

PyMethodDef waiting_def = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&waiting)),
                           METH_FASTCALL | METH_KEYWORDS, "As torch's; commtrace notes when it began and ended."};

py::object waiting_for(const py::object& wait) {
  if (work_type == nullptr) work_type = reinterpret_cast<PyTypeObject*>(py::type::of<c10d::Work>().release().ptr());
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&waiting_def, wait.ptr()));
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

// `work.is_completed()` said yes.
void polled(const py::object& work) {
  const int64_t t_end = now();
  Recording* recording = current.load(std::memory_order_acquire);
  const void* pointer = recording == nullptr ? nullptr : work_of(work.ptr());
  if (pointer == nullptr) return;
  for (const auto& call : recording->waits.ends(pointer))
    if (call.by_wait) recording->ended(call.handle, t_end, kTest);
}

// ---- coalesced calls ---------------------------------------------------------------------------------------------------

Group* group_by_pg(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  return recording.group(pg.get(), pg);
}

// Takes the batch that is open, if one is.
std::vector<Handle> close_batch(Group& group, uint32_t next) {
  std::lock_guard<std::mutex> held(group.mutex);
  group.batch.store(next);
  return std::exchange(group.batched, {});
}

void batch_begins(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = group_by_pg(recording, pg);
  if (group == nullptr) return;
  for (Handle handle : close_batch(*group, ++recording.batches)) recording.unobservable(handle);  // an exception's
  group->batch_on_host = false;
  group->batch_on_device = {};
}

void batch_ends(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                const c10::intrusive_ptr<c10d::Work>& work) {
  Group* group = group_by_pg(recording, pg);
  if (group == nullptr) return;
  const auto handles = close_batch(*group, 0);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    if (work && group->batch_on_host) future = work->getFuture();
  } catch (const std::exception&) {
  }
  if (work && group->batch_on_host && !future) {
    recording.waits.add_batch(work.get(), handles, true, WeakWork(work));
    return;
  }
  if (work) recording.waits.add_batch(work.get(), handles, false, std::nullopt);
  if (Begun on_device = std::exchange(group->batch_on_device, {})) {
    const py::gil_scoped_release unlocked;
    DeviceTimes& devices = recording.devices;
    if (work ? devices.runs(handles, std::move(on_device)) : devices.ends(handles, std::move(on_device))) return;
  }
  for (Handle handle : handles)
    if (future)
      follow(&recording, handle, *future);
    else
      recording.unobservable(handle);
}

// ---- in and out --------------------------------------------------------------------------------------------------------

// Kernels stay until the process ends, and only hand on while nothing records: to take one out while another thread is on
// its way through it crashes (seen), and at exit the dispatcher may go first.
std::vector<std::unique_ptr<torch::Library>>* libraries = nullptr;

template <typename Kernel, typename... Arguments_>
std::unique_ptr<torch::Library> put_in(const std::string& space, const std::string& name, Arguments_... arguments) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::BackendSelect, __FILE__,
                                                  __LINE__);
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(arguments...)));
  return library;
}

void install(const std::vector<Plan>& plans, const std::vector<std::string>& functional) {
  for (const Plan& plan : plans)
    libraries->push_back(put_in<CallKernel>(plan.space, plan.name, new Plan(plan)));
  for (const std::string& name : functional) {
    const char* space = "_c10d_functional";
    libraries->push_back(name == "wait_tensor" ? put_in<WaitKernel>(space, name) : put_in<FunctionalKernel>(space, name));
  }
}

// From here on the next call has `begin()` called; what this gives says whether to ask again where nothing records yet.
void arm(const py::object& begin) {
  begin_recording = begin.inc_ref().ptr();
  armed.store(true);
}

void disarm() { armed.store(false); }

// For whoever knows that no other thread communicates: a benchmark.
void take_out() {
  py::gil_scoped_release unlocked;
  libraries->clear();
}

std::vector<at::Tensor> probe(at::TensorList tensors, const std::optional<at::Tensor>&, bool, int64_t) {
  return tensors.vec();
}

int64_t least_ns(const char* name) {
  constexpr int kTries = 10, kCalls = 50;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<decltype(probe)>();
  const std::vector<at::Tensor> tensors{at::zeros({1})};
  int64_t least = INT64_MAX;
  for (int i = 0; i < kTries; i++) {
    const int64_t begun = now();
    for (int j = 0; j < kCalls; j++) op.call(tensors, std::nullopt, true, 1);
    least = std::min(least, (now() - begun) / kCalls);
  }
  return least;
}

void before_fork_in_child() {
  Recording* parents = current.exchange(nullptr);
  if (parents == nullptr) return;
  parents->slots.forked();
  armed.store(true);  // what the child communicates is its own
}

// ns that a call spends on its way into and out of a kernel like ours, which the kernel itself cannot see: on an operator
// of our own with such a kernel before it and without, the least of several tries, as other threads run at the same time.
int64_t crossing() {
  static const bool defined = [] {
    auto library = std::make_unique<torch::Library>(torch::Library::DEF, "commtrace_calibration", std::nullopt, __FILE__,
                                                    __LINE__);
    for (const char* name : {"bare", "through"}) {
      library->def((std::string(name) + "(Tensor[] tensors, Tensor? none, bool flag, int number) -> Tensor[]").c_str());
      library->impl(name, torch::dispatch(c10::DispatchKey::CPU, &probe));
    }
    library.release();  // both stay
    put_in<PassKernel>("commtrace_calibration", "through").release();
    return true;
  }();
  (void)defined;
  return std::max<int64_t>(0, least_ns("commtrace_calibration::through") - least_ns("commtrace_calibration::bare"));
}

// ---- for Python --------------------------------------------------------------------------------------------------------

Recording* make_recording(const py::buffer& ring, size_t records_at, uint32_t capacity, bool sites, bool device_times,
                          const py::buffer& progress) {
  // Both stay where they are: whoever holds the buffer of an mmap or array keeps it from being closed or resized. The
  // ring's is asked for only once, as a mapping that is looked into cannot be unmapped.
  const auto info = ring.request(true);
  const auto* cells = new py::buffer_info(progress.request(true));
  if (cells->itemsize != 4 || cells->size * 4 != sizeof(Progress)) throw py::value_error("these are not progress cells");
  return new Recording(static_cast<char*>(info.ptr) + records_at, capacity, sites, device_times,
                       static_cast<Progress*>(cells->ptr));
}

py::array_t<int64_t> as_array(const std::vector<int64_t>& numbers) {
  return py::array_t<int64_t>(static_cast<py::ssize_t>(numbers.size()), numbers.data());
}

py::object take_slot(Recording& recording) {
  const uint32_t slot = recording.slots.take();
  if (slot == Slots::kEmpty) throw py::index_error("no free slot");
  return py::int_(slot);
}

void release(Recording& recording, const py::array_t<int64_t, py::array::c_style | py::array::forcecast>& slots) {
  py::gil_scoped_release unlocked;
  for (py::ssize_t i = 0; i < slots.size(); i++) recording.release(static_cast<uint32_t>(slots.data()[i]));
}

py::array_t<int64_t> finished_slots(Recording& recording) {
  std::vector<int64_t> found;
  {
    py::gil_scoped_release unlocked;
    found = recording.finished();
  }
  return as_array(found);
}

// (slots with records, how many calls had taken one and not begun to write)
py::tuple close_recording(Recording& recording) {
  Recording* expected = &recording;
  if (current.compare_exchange_strong(expected, nullptr)) armed.store(false);
  uint32_t unwritten = 0;
  std::vector<int64_t> left;
  {
    py::gil_scoped_release unlocked;
    unwritten = recording.slots.close();
    for (uint32_t slot = 0; slot < recording.slots.capacity(); slot++)
      if (recording.slots.state(slot) != kFree) left.push_back(slot);
  }
  recording.close();
  return py::make_tuple(as_array(left), unwritten);
}

// (dropped, errors, first error, cost samples) since the last time.
py::tuple take_tally(Recording& recording) {
  Tally& tally = recording.tally;
  const uint64_t samples = std::min<uint64_t>(tally.samples.exchange(0), tally.costs.size());
  py::list costs;
  for (uint64_t i = 0; i < samples; i++) costs.append(tally.costs[i].load(std::memory_order_relaxed));
  std::lock_guard<std::mutex> held(tally.mutex);
  return py::make_tuple(tally.dropped.exchange(0), tally.errors.exchange(0), tally.first_error, costs);
}

// (calls without a time as no event was left, ns of error of the device's clock, why a device failed) so far, as of the
// last resolve, and since the last time.
py::tuple device_tally(Recording& recording) {
  DeviceTimes& devices = recording.devices;
  return py::make_tuple(devices.untimed(), devices.error(), devices.failure());
}

void go(Recording& recording, const py::object& rows) {
  recording.rows = rows;
  current.store(&recording, std::memory_order_release);
}

uint32_t next_seq(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg) {
  Group* group = group_by_pg(recording, pg);
  return group == nullptr ? 0 : group->collectives.fetch_add(1);
}

py::dict layout() {
  py::dict offsets;
#define FIELD(name) offsets[#name] = offsetof(Record, name)
  FIELD(t_begin), FIELD(t_return), FIELD(t_wait), FIELD(t_start), FIELD(t_end), FIELD(payload), FIELD(local);
  FIELD(seq), FIELD(group), FIELD(site), FIELD(step), FIELD(micro_batch), FIELD(peer), FIELD(tag), FIELD(batch);
  FIELD(kind), FIELD(thread), FIELD(phase), FIELD(clock), FIELD(flags), FIELD(state);
#undef FIELD
  return offsets;
}

Plan make_plan(const std::string& space, const std::string& name, int number, int arguments, const std::string& form,
               const std::vector<int>& about, const py::dict& at, const py::dict& is) {
  static const std::map<std::string, Form> forms = {
      {"nothing", Form::kNothing},     {"buffers", Form::kBuffers},       {"pair", Form::kPair},
      {"lists", Form::kLists},         {"rooted", Form::kRooted},         {"all_to_all", Form::kAllToAll},
      {"all_to_all_single", Form::kAllToAllSingle},
  };
  if (number >= kMostPlans) throw py::value_error("too many operators");
  Plan plan;
  plan.space = space, plan.name = name, plan.number = number, plan.arguments = arguments, plan.form = forms.at(form);
  int* places[] = {&plan.first, &plan.second, &plan.third};
  for (size_t i = 0; i < about.size(); i++) *places[i] = about[i];
  plan.group_at = at["group"].cast<int>(), plan.async_at = at["async"].cast<int>();
  plan.reduce_op_at = at["reduce_op"].cast<int>(), plan.peer_at = at["peer"].cast<int>();
  plan.tag_at = at["tag"].cast<int>(), plan.output_at = at["output"].cast<int>();
  plan.sample_at = at["sample"].cast<int>();
  plan.coalesced = is["coalesced"].cast<bool>(), plan.blocking = is["blocking"].cast<bool>();
  plan.message = is["message"].cast<bool>(), plan.send = is["send"].cast<bool>();
  plan.barrier = is["barrier"].cast<bool>();
  return plan;
}

}  // namespace commtrace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace commtrace;
  libraries = new std::vector<std::unique_ptr<torch::Library>>;
  pthread_atfork(nullptr, nullptr, &before_fork_in_child);
  py::class_<Plan>(m, "Plan").def(py::init(&make_plan));
  py::class_<Recording, std::unique_ptr<Recording, py::nodelete>>(m, "Recording")
      .def(py::init(&make_recording))
      .def_property_readonly("free", [](const Recording& recording) { return recording.slots.free(); })
      .def("take", &take_slot)
      .def("give", [](Recording& recording, uint32_t slot) { recording.slots.give(slot); })
      .def("finished", &finished_slots)
      .def("release", &release)
      .def("close", &close_recording)
      .def("forked", [](Recording& recording) { recording.slots.forked(); })
      .def("tally", &take_tally)
      .def("go", &go)
      .def("resolve", [](Recording& recording) { recording.devices.resolve(); }, py::call_guard<py::gil_scoped_release>())
      .def("device_tally", &device_tally)
      .def("next_seq", &next_seq)
      .def("batch_begins", &batch_begins)
      .def("batch_ends", &batch_ends);
  m.def("install", &install);
  m.def("arm", &arm);
  m.def("disarm", &disarm);
  m.def("take_out", &take_out);
  m.def("waiting", &waiting_for);
  m.def("polled", &polled);
  m.def("layout", &layout);
  m.def("crossing", &crossing, py::call_guard<py::gil_scoped_release>());
}
