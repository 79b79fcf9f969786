// Kernels that run before torch's own: they record a call and redispatch it.
//
// Rules, all from observed deadlocks and crashes:
//   - never acquire the GIL while holding one of our locks, and never hold the GIL while a call is redispatched;
//   - a Work may be null (NCCL's synchronous calls), and not every backend's future shows the end of its Work;
//   - a backend's thread may report a completion after the log was closed: the Handle is then invalid.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "recording.h"

namespace commtrace {

using c10::DispatchKeySet;
using torch::jit::Stack;

// Tracing is on but no recording has begun: the next call makes Python begin one.
inline std::atomic<bool> armed{false};
inline PyObject* begin_recording = nullptr;

// Makes the next call run `begin()`, which starts the recording. It returns whether later calls may try again.
static void arm(const py::object& begin) {
  begin_recording = begin.inc_ref().ptr();
  armed.store(true);
}

static void disarm() { armed.store(false); }

static void redispatch(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
}

// ---- ends --------------------------------------------------------------------------------------------------------------

// The program's wait for calls on a device. If an exception destroys it, the calls have failed.
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

// The future that shows the end of a call on the host; null if the backend has none.
static c10::intrusive_ptr<c10::ivalue::Future> future_of(Group& group, int plan, c10d::Work& work) {
  constexpr uint32_t kMostDoubts = 8;
  const uint64_t bit = 1ULL << plan;
  if (group.futureless.load(std::memory_order_relaxed) & bit) return nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work.getFuture();
  } catch (const std::exception&) {  // gloo's send and recv
  }
  if (!future) {
    group.futureless.fetch_or(bit);
    return nullptr;
  }
  if (group.trusted.load(std::memory_order_relaxed) & bit) return future;
  if (!future->completed()) {
    group.trusted.fetch_or(bit);
    return future;
  }
  if (work.isCompleted()) return future;
  // The future is complete and the Work is not: briefly with gloo; always with NCCL and torch's fake process group,
  // where it does not show the end.
  if (group.doubts.fetch_add(1, std::memory_order_relaxed) >= kMostDoubts) group.futureless.fetch_or(bit);
  return nullptr;
}

// Records the end of the call when this future completes.
static void follow(Recording* recording, Handle handle, c10::ivalue::Future& future) {
  future.addCallback(
      [recording, handle](c10::ivalue::Future& ended) {
        recording->ended(handle, now(), kFuture, ended.hasError() ? kFailed : kComplete);
      },
      false);
}

// ---- before the call ---------------------------------------------------------------------------------------------------

// A call that has not returned yet.
struct Call {
  Recording* recording;
  const Plan& plan;
  Handle handle;
  Group* group = nullptr;
  bool on_host = true;
  std::optional<DeviceStart> on_device;  // if it is not on the host
  bool asynchronous = false, sampled = false;
  c10::StorageImpl* storage = nullptr;  // of the tensor that the wait for a functional call names
  int64_t entered = 0, begun = 0;
  int64_t looked_up = 0;  // when a first call began to look up something new

  bool timed() const { return on_device && *on_device; }
};

// Whether the tensor belongs to a compiler that traces the program: nothing is communicated.
static bool is_fake(const at::Tensor& tensor) {
  if (tensor.is_meta()) return true;
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return false;
  py::gil_scoped_acquire gil;
  const auto fake = py::module_::import("torch._subclasses.fake_tensor").attr("FakeTensor");
  return py::isinstance(py::cast(tensor), fake);
}

static Recording* begin_if_armed(const at::Tensor* sample) {
  if (!armed.load(std::memory_order_acquire) || (sample != nullptr && is_fake(*sample)) || interpreter_ends()) return nullptr;
  py::gil_scoped_acquire gil;
  if (begin_recording == nullptr) return nullptr;
  armed.store(py::reinterpret_borrow<py::object>(begin_recording)().cast<bool>());
  return current.load();
}

static Group* group_of(Recording& recording, Thread& thread, const c10::IValue& boxed) {
  auto* pg = unboxed<c10d::ProcessGroup>(boxed);
  auto& last = thread.groups[reinterpret_cast<uintptr_t>(pg) / sizeof(c10d::ProcessGroup) % 16];
  if (last.pg != pg) {
    Group* group = recording.group(pg);
    if (group == nullptr) return nullptr;
    last = {pg, group};
  }
  return last.group;
}

// What a message shows of the training, as _trained_message returns it in Python.
enum class Trained { kUnknown, kReceived, kSent };

static Trained trained_message(const Plan& plan, const at::Tensor* sample) {
  if (!plan.message || sample == nullptr || !sample->requires_grad() || !at::GradMode::is_enabled()) return Trained::kUnknown;
  if (!plan.send) return Trained::kReceived;
  return sample->is_leaf() ? Trained::kUnknown : Trained::kSent;
}

// Finds the call site and sets the record's site, phase and step, as CallContext.find does in Python.
static CallSite call_context(Recording& recording, Thread& thread, Record& record, uint32_t reducer, Trained trained) {
  Progress& progress = *recording.progress;
  const int mark = progress.get(progress.mark), task = torch::autograd::get_current_graph_task_id();
  int phase = task == -1 || mark == kInit || mark == kEvaluation ? mark : kBackwardPhase;
  const bool by_frames = phase == kUnmarked;
  const Marks marks{thread.purpose, reducer, task != -1};
  CallSite seen;
  if (by_frames || recording.sites_wanted)
    seen = recording.callsites.find(by_frames, recording.sites_wanted, marks, thread.sites);
  if (by_frames) {
    const int default_phase = progress.get(progress.step) < 0 ? kInit : kOther;
    phase = seen.seen & kForward ? kForwardPhase : seen.seen & kOptimizer ? kOptimizerPhase : default_phase;
    if (phase == default_phase && trained == Trained::kSent) phase = kForwardPhase;
    if (phase == default_phase && trained == Trained::kReceived && progress.between_steps()) {
      progress.note_activity();
      phase = kOther;
    }
  }
  if ((phase == kForwardPhase || phase == kBackwardPhase) && progress.between_steps()) {
    if (phase == kBackwardPhase || recording.trains(thread.sites))
      progress.note_activity();
    else
      phase = kEvaluation;
  }
  if (recording.sites_wanted && seen.site == 0 && task != -1) 
    seen.site = recording.site_of_backward(task, marks.purpose ? marks.purpose : reducer);
  record.phase = static_cast<uint8_t>(phase);
  record.step = progress.get(progress.step);
  record.micro_batch = progress.get(progress.micro_batch);
  record.site = seen.site;
  return seen;
}

// The purpose of a call if C++ code makes it within autograd, as _reducer_purpose returns it in Python.
static uint32_t reducer_purpose(const Recording& recording, const Plan& plan, const at::Tensor* sample, bool functional) {
  if (!plan.all_reduce || functional || sample == nullptr) return kNoPurpose;
  if (!recording.progress->get(recording.progress->reduces_gradients)) return kNoPurpose;
  const c10::ScalarType type = sample->scalar_type();
  return c10::isFloatingType(type) || c10::isComplexType(type) ? kGradientsReduced : kUsedParameters;
}

static void set_address(const Plan& plan, Arguments args, Group& group, Record& record) {
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

static bool is_async(const Plan& plan, Arguments args, uint16_t seen, bool functional) {
  if (!plan.message) return plan.async_at >= 0 && args[plan.async_at].toBool();
  // One operator serves blocking and non-blocking messages; the frames show which of the two a call is.
  return functional || ((seen & kHandle) && !(seen & kBlocking));
}

// Sets the beginning of the call, or of its batch if it is coalesced, on its device. Returns whether it is captured.
static bool begin_on_device(Call& call, const at::Tensor& sample, bool batched) {
  if (!batched) {
    call.on_device = call.recording->devices.begins(sample.device());
    return call.on_device->captured;
  }
  Group& group = *call.group;
  {
    std::lock_guard<std::mutex> held(group.mutex);
    const DeviceStart& begun = group.batch_on_device;
    if (begun.device != nullptr) {
      if (!begun && !begun.captured) call.recording->devices.count_untimed();
      return begun.captured;
    }
  }
  DeviceStart begun = call.recording->devices.begins(sample.device());
  std::lock_guard<std::mutex> held(group.mutex);
  group.batch_on_device = std::move(begun);
  return group.batch_on_device.captured;
}

// Records that the call begins. False if it is not recorded.
static bool record_call(Call& call, Thread& thread, Arguments args, const at::Tensor* sample) {
  if (sample != nullptr && is_fake(*sample)) return false;  // first, as its size may be symbolic
  Recording& recording = *call.recording;
  const Plan& plan = call.plan;
  Record record{};
  Group* group = call.group = group_of(recording, thread, args[plan.group_at]);
  if (group == nullptr) {  // Python counted the error
    recording.tally.unrecorded.fetch_add(1);
    return false;
  }
  const Size size = plan.measure(plan, args, group->size, group->rank);
  const bool typed = sample != nullptr && !plan.barrier, functional = thread.functional > 0;
  const CallSite seen = call_context(recording, thread, record, reducer_purpose(recording, plan, sample, functional),
                                     trained_message(plan, sample));
  const auto* reduce_op = plan.reduce_op_at < 0 ? nullptr : unboxed<c10d::ReduceOp>(args[plan.reduce_op_at]);
  record.kind = recording.kind(plan, typed ? static_cast<int>(sample->scalar_type()) : -1,
                               reduce_op == nullptr ? -1 : static_cast<int>(reduce_op->op_));
  record.payload = size.payload;
  record.local = size.local;
  record.group = group->number;
  record.batch = group->batch.load(std::memory_order_relaxed);
  record.thread = thread.number;
  call.asynchronous = is_async(plan, args, seen.seen, functional);
  record.flags = (call.asynchronous ? kAsync : 0) | (seen.seen & kObject ? kObjects : 0) | (size.uneven ? kUneven : 0) |
                 (record.batch != 0 || plan.coalesced ? kCoalesced : 0) |
                 (sample != nullptr && sample->layout() != at::kStrided ? kSparse : 0);
  record.state = kBegun;
  set_address(plan, args, *group, record);  // last, as it increments counters
  call.on_host = sample == nullptr || sample->is_cpu();
  const at::Tensor* output = functional ? first_tensor(args[plan.output_at]) : nullptr;
  if (output != nullptr) call.storage = output->storage().unsafeGetStorageImpl();
  if (!call.on_host && begin_on_device(call, *sample, record.batch != 0)) record.flags |= kCaptured;
  call.begun = now();
  record.t_begin = call.timed() ? call.on_device->point.submitted : call.begun;
  call.handle = recording.begin(record, thread.log);
  return static_cast<bool>(call.handle);
}

// Same as `record_call`, but throws only Python exceptions (such as an interrupt).
static bool before(Call& call, Thread& thread, Arguments args, const at::Tensor* sample) {
  try {
    return record_call(call, thread, args, sample);
  } catch (py::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    call.recording->tally.count_fault(error.what());
    call.recording->tally.unrecorded.fetch_add(1);
    return false;
  }
}

// ---- after the call ----------------------------------------------------------------------------------------------------

// Adds the call to the open batch, whose Work shows its end. False if the batch was closed.
static bool join_batch(const Call& call) {
  Group& group = *call.group;
  std::lock_guard<std::mutex> held(group.mutex);
  if (group.batch.load() == 0) return false;
  group.batched.push_back(call.handle);
  group.batch_on_host |= call.on_host;
  return true;
}

static State note_return(Record& record, int64_t t_return, State state, Clock clock) {
  record.t_return = t_return;
  if (state == kComplete) {
    record.t_end = t_return;
    record.clock = clock;
  }
  return state;
}

static void returned(Call& call, int64_t t_return, State state, Clock clock = kNoClock) {
  call.recording->slots.update(call.handle,
                                [=](Record& record) { return note_return(record, t_return, state, clock); });
}

static void after(Call& call, Stack* stack, int64_t t_return) {
  Recording& recording = *call.recording;
  if (call.plan.blocking) {
    returned(call, t_return, kComplete, kReturn);
    return;
  }
  if (call.group->batch.load(std::memory_order_relaxed) != 0) {
    returned(call, t_return, kReturned);
    if (!join_batch(call)) recording.unobservable(call.handle);
    return;
  }
  auto* work = unboxed<c10d::Work>(stack->back());
  if (work == nullptr) {
    // A synchronous call without a Work runs in the current stream, between two events.
    const bool in_stream = call.timed() && !call.asynchronous;
    returned(call, t_return, in_stream ? kReturned : kUnobservable);
    if (in_stream && !recording.devices.ends(call.handle, std::move(*call.on_device)))
      recording.unobservable(call.handle);
    return;
  }
  const bool on_device = call.timed() && recording.devices.runs(call.handle, std::move(*call.on_device));
  const auto future = call.on_host ? future_of(*call.group, call.plan.number, *work) : nullptr;
  c10::intrusive_ptr_target* waited = work;
  if (call.storage != nullptr) waited = call.storage;
  const bool by_wait = call.on_host && !future, complete = future && future->completed() && !future->hasError();
  const State state = complete ? kComplete : call.on_host || on_device ? kReturned : kUnobservable;
  auto weak = by_wait ? std::optional<Weak>(weak_reference(waited)) : std::nullopt;
  // Done within `update`, before the state becomes kReturned: after that, the slot may be given to another call.
  recording.slots.update(call.handle, [&](Record& record) {
    recording.waits.add(waited, call.handle, std::move(weak));
    return note_return(record, t_return, state, kFuture);
  });
  if (future && !complete) follow(&recording, call.handle, *future);
}

// Same as `after`, but throws no exceptions and records the cost of the call.
static void finish_call(Call& call, Stack* stack) {
  const int64_t t_return = now();
  try {
    after(call, stack, t_return);
  } catch (const std::exception& error) {
    call.recording->tally.count_fault(error.what());
    call.recording->slots.update(call.handle, [=](Record& record) -> uint8_t {
      record.t_return = t_return;
      return record.state < kComplete ? kUnobservable : record.state;
    });
  }
  if (!call.sampled && call.looked_up == 0) return;
  Recording& recording = *call.recording;
  const int64_t ns_after = now() - t_return;
  if (call.looked_up != 0) recording.tally.first_call(call.begun - call.looked_up + ns_after);
  if (!call.sampled) return;
  recording.sample_wait.store(true, std::memory_order_relaxed);
  recording.tally.sample(call.begun - call.entered + ns_after + recording.wait_cost.load(), call.looked_up != 0);
}

// Redispatches a call that has no slot.
static void unrecorded(Recording& recording, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  redispatch(op, keys, stack);
  if (!recording.devices.wanted() || stack->empty()) return;
  if (const auto* work = unboxed<c10d::Work>(stack->back())) recording.waits.forget(work);
}

// ---- kernels -----------------------------------------------------------------------------------------------------------

class CallKernel : public c10::OperatorKernel {
 public:
  explicit CallKernel(const Plan& plan) : plan_(plan) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    Recording* recording = current.load(std::memory_order_acquire);
    if (recording == nullptr && !armed.load(std::memory_order_relaxed)) return redispatch(op, keys, stack);
    const Arguments args = torch::jit::last(*stack, plan_.arguments);
    const at::Tensor* sample = first_tensor(args[plan_.sample_at]);
    if (recording == nullptr) recording = begin_if_armed(sample);
    if (recording == nullptr) return redispatch(op, keys, stack);
    Thread& thread = Thread::current(*recording);
    Call call{recording, plan_, {}};
    call.sampled = in_sample<5, 15>(thread.calls++);
    if (call.sampled) call.entered = now();
    thread.looked_up = 0;
    if (!before(call, thread, args, sample)) return unrecorded(*recording, op, keys, stack);
    call.looked_up = thread.looked_up;
    try {
      redispatch(op, keys, stack);
    } catch (...) {
      returned(call, now(), kFailed);
      throw;
    }
    finish_call(call, stack);
  }

 private:
  const Plan& plan_;
};

// Calls of `_c10d_functional` reach the operators of `c10d`; their waits name a tensor.
static void functional_kernel(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  struct Functional {
    Functional() { Thread::current().functional++; }
    ~Functional() { Thread::current().functional--; }
  } functional;
  redispatch(op, keys, stack);
}

static void wait_kernel(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  Recording* recording = current.load(std::memory_order_acquire);
  if (recording == nullptr) return redispatch(op, keys, stack);
  const int64_t t_wait = now();
  Waits::Calls calls;
  const auto wait_begins = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta() || !tensor.has_storage()) return;
    for (const auto& call : recording->wait_begins(tensor.storage().unsafeGetStorageImpl(), t_wait)) calls.push_back(call);
  };
  const c10::IValue& waited = stack->back();
  if (waited.isTensor())
    wait_begins(waited.toTensor());
  else
    for (const c10::IValue& item : waited.toListRef()) wait_begins(item.toTensor());
  if (calls.empty()) return redispatch(op, keys, stack);
  DeviceWait on_device(*recording, calls);
  redispatch(op, keys, stack);
  const int64_t t_end = now();
  on_device.ends(false);
  for (const auto& call : calls)
    if (call.by_wait) recording->ended(call.handle, t_end, kWait);
}

// ---- installation ------------------------------------------------------------------------------------------------------

// Kernels stay, and only redispatch while nothing is recorded: removing a kernel that another thread runs crashes, and at
// exit the dispatcher may be destroyed first.
inline auto* const libraries = new std::vector<std::unique_ptr<torch::Library>>;

static void add_kernel(const char* space, const std::string& name, torch::CppFunction kernel) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::BackendSelect, __FILE__,
                                                  __LINE__);
  library->impl(name.c_str(), std::move(kernel));
  libraries->push_back(std::move(library));
}

static std::vector<at::Tensor> probe(at::TensorList tensors, const std::optional<at::Tensor>&, bool, int64_t) {
  return tensors.vec();
}

static int64_t least_ns(const char* name) {
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

// Detaches a forked child from the parent's recording, so that it can begin its own.
static void forked_in_child() {
  Recording* parents = current.exchange(nullptr);
  if (parents == nullptr) return;
  parents->slots.forked();
  armed.store(true);
}

// Removes the kernels. Only safe if no other thread communicates (benchmarks).
static void remove_kernels() {
  py::gil_scoped_release unlocked;
  libraries->clear();
}

// Returns the ns that a call spends entering and leaving a kernel, which the kernel itself cannot measure: the
// difference between two operators of our own, one with such a kernel and one without, each timed as the minimum of
// several trials.
static int64_t crossing() {
  static const bool defined = [] {
    auto* library = new torch::Library(torch::Library::DEF, "commtrace_native_calibration", std::nullopt, __FILE__,
                                       __LINE__);
    for (const char* name : {"bare", "through"}) {
      library->def((std::string(name) + "(Tensor[] tensors, Tensor? none, bool flag, int number) -> Tensor[]").c_str());
      library->impl(name, torch::dispatch(c10::DispatchKey::CPU, &probe));
    }
    library->impl("through", torch::dispatch(c10::DispatchKey::BackendSelect,
                                             torch::CppFunction::makeFromBoxedFunction<&redispatch>()));
    return true;  // the library stays
  }();
  (void)defined;
  const int64_t through = least_ns("commtrace_native_calibration::through");
  return std::max<int64_t>(0, through - least_ns("commtrace_native_calibration::bare"));
}

}  // namespace commtrace
