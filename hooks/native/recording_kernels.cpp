#include "recording_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/library.h>

namespace commtrace {

namespace {

using c10::DispatchKeySet;
using torch::jit::Stack;

// Tracing is on and nothing records yet: the first call lets Python begin.
std::atomic<bool> armed{false};
PyObject* begin_recording = nullptr;

void hand_on(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), stack);
}

// ---- before the call ---------------------------------------------------------------------------------------------------

// A call that has begun and not returned yet.
struct Entry {
  Recording* recording;
  const Plan& plan;
  Handle handle;
  Group* group = nullptr;
  bool on_host = true;
  std::optional<Begun> on_device;  // of a call that is not on the host
  bool asynchronous = false, sampled = false;
  c10::StorageImpl* storage = nullptr;  // a functional call is waited for by a tensor of this one
  int64_t entered = 0, begun = 0;
  int64_t looked_up = 0;  // of a first call: since when it has looked up something new

  bool timed() const { return on_device && *on_device; }
};

// Whether a compiler traces the program: such a call is no communication.
bool is_fake(const at::Tensor& tensor) {
  if (tensor.is_meta()) return true;
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return false;
  py::gil_scoped_acquire gil;
  const auto fake = py::module_::import("torch._subclasses.fake_tensor").attr("FakeTensor");
  return py::isinstance(py::cast(tensor), fake);
}

Recording* begin_if_armed(const at::Tensor* sample) {
  if (!armed.load(std::memory_order_acquire) || (sample != nullptr && is_fake(*sample)) || interpreter_ends()) return nullptr;
  py::gil_scoped_acquire gil;
  if (begin_recording == nullptr) return nullptr;
  armed.store(py::reinterpret_borrow<py::object>(begin_recording)().cast<bool>());
  return current.load();
}

Group* group_of(Recording& recording, Thread& thread, const c10::IValue& boxed) {
  auto* pg = unboxed<c10d::ProcessGroup>(boxed);
  auto& last = thread.groups[reinterpret_cast<uintptr_t>(pg) / sizeof(c10d::ProcessGroup) % 16];
  if (last.pg != pg) {
    Group* group = recording.group(pg);
    if (group == nullptr) return nullptr;
    last = {pg, group};
  }
  return last.group;
}

// The call site, and what its frames show; fills in the phase and the step. As CallContext.find in Python.
CallSite call_context(Recording& recording, Record& record) {
  Progress& progress = *recording.progress;
  const int mark = progress.get(progress.mark), task = torch::autograd::get_current_graph_task_id();
  int phase = task == -1 ? mark : mark == kInit ? kInit : kBackwardPhase;
  const bool by_frames = phase == kUnmarked;
  CallSite seen;
  if (by_frames || recording.sites_wanted)
    seen = recording.callsites.find(by_frames, recording.sites_wanted);
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
    return entry.on_device->captured;
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
  const CallSite seen = call_context(recording, record);
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
      entry.storage = output->storage().unsafeGetStorageImpl();
  const bool captured = !entry.on_host && begin_on_device(entry, *sample, record.batch != 0);
  if (captured) record.flags |= kCaptured;
  entry.asynchronous = record.flags & kAsync;
  entry.begun = now();
  record.t_begin = entry.timed() ? entry.on_device->point.submitted : entry.begun;
  entry.handle = recording.begin(record, thread.log);
  return static_cast<bool>(entry.handle);
}

// Throws only exceptions of Python (an interrupt).
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

// Adds the call to the open batch, whose Work will show its end.
bool join_batch(const Entry& entry) {
  Group& group = *entry.group;
  if (group.batch.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard<std::mutex> held(group.mutex);
  if (group.batch.load() == 0) return false;
  group.batched.push_back(entry.handle);
  group.batch_on_host |= entry.on_host;
  return true;
}

State note_return(Record& record, int64_t t_return, State state, Clock clock) {
  record.t_return = t_return;
  if (state == kComplete) {
    record.t_end = t_return;
    record.clock = clock;
  }
  return state;
}

void returned(Entry& entry, int64_t t_return, State state, Clock clock = kNobody) {
  entry.recording->slots.update(entry.handle,
                                [=](Record& record) { return note_return(record, t_return, state, clock); });
}

void after(Entry& entry, Stack* stack, int64_t t_return) {
  Recording& recording = *entry.recording;
  if (entry.plan.blocking) {
    returned(entry, t_return, kComplete, kReturn);
    return;
  }
  if (entry.group->batch.load(std::memory_order_relaxed) != 0) {
    returned(entry, t_return, kReturned);
    if (!join_batch(entry)) recording.unobservable(entry.handle);
    return;
  }
  auto* work = unboxed<c10d::Work>(stack->back());
  if (work == nullptr) {
    // Without a Work, where none was asked for, the call is in the current stream, between two events.
    const bool in_stream = entry.timed() && !entry.asynchronous;
    returned(entry, t_return, in_stream ? kReturned : kUnobservable);
    if (in_stream && !recording.devices.ends(entry.handle, std::move(*entry.on_device)))
      recording.unobservable(entry.handle);
    return;
  }
  const bool on_device = entry.timed() && recording.devices.runs(entry.handle, std::move(*entry.on_device));
  const auto future = entry.on_host ? future_of(*entry.group, entry.plan.number, *work) : nullptr;
  c10::intrusive_ptr_target* waited = work;
  if (entry.storage != nullptr) waited = entry.storage;
  const bool by_wait = entry.on_host && !future, complete = future && future->completed() && !future->hasError();
  const State state = complete ? kComplete : entry.on_host || on_device ? kReturned : kUnobservable;
  auto weak = by_wait ? std::optional<Weak>(weakly(waited)) : std::nullopt;
  // Listed while the slot is this call's, and before it counts as returned: from then on it may become another one's.
  recording.slots.update(entry.handle, [&](Record& record) {
    recording.waits.add(waited, entry.handle, std::move(weak));
    return note_return(record, t_return, state, kFuture);
  });
  if (future && !complete) follow(&recording, entry.handle, *future);
}

void note_cost(const Entry& entry, int64_t after) {
  Recording& recording = *entry.recording;
  if (entry.looked_up != 0) recording.tally.first_call(entry.begun - entry.looked_up + after);
  if (!entry.sampled) return;
  recording.sample_wait.store(true, std::memory_order_relaxed);
  recording.tally.sample(entry.begun - entry.entered + after + recording.wait_cost.load(), entry.looked_up != 0);
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
  if (entry.sampled || entry.looked_up != 0) note_cost(entry, now() - t_return);
}

// Passes on a call that has no slot.
void unrecorded(Recording& recording, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  hand_on(op, keys, stack);
  if (!recording.devices.wanted() || stack->empty()) return;
  if (const auto* work = unboxed<c10d::Work>(stack->back())) recording.waits.forget(work);
}

// ---- kernels -----------------------------------------------------------------------------------------------------------

// The cost of one call in 32 is measured: of the first 32 the 16th, then another one of each 32. With a fixed position, a
// program whose steps have a multiple of it would always show the cost of the same calls.
bool to_sample(uint32_t call) {
  constexpr uint32_t kMask = 31, kFirst = 15, kGoldenRatio = 0x9E3779B1;
  const uint32_t of_this_32 = ((call / (kMask + 1)) * kGoldenRatio >> 27) + kFirst;
  return (call & kMask) == (of_this_32 & kMask);
}

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
    entry.sampled = to_sample(thread.calls++);
    if (entry.sampled) entry.entered = now();
    thread.looked_up = 0;
    if (!before(entry, thread, args, sample)) return unrecorded(*recording, op, keys, stack);
    entry.looked_up = thread.looked_up;
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
    const c10::intrusive_ptr_target* key = tensor->storage().unsafeGetStorageImpl();
    const int64_t t_wait = now();
    const auto found = recording->waits.take(key);
    for (const auto& call : found) recording->wait_begins(call.handle, t_wait);
    DeviceWait on_device(*recording, found);
    hand_on(op, keys, stack);
    const int64_t t_end = now();
    on_device.ends(false);
    for (const auto& call : found)
      if (call.by_wait) recording->ended(call.handle, t_end, kWait);
  }
};

class PassKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) { hand_on(op, keys, stack); }
};

// ---- installing --------------------------------------------------------------------------------------------------------

// Never freed: at exit the dispatcher may go first.
auto* const libraries = new std::vector<std::unique_ptr<torch::Library>>;

template <typename Kernel, typename... Arguments_>
std::unique_ptr<torch::Library> put_in(const std::string& space, const std::string& name, Arguments_... arguments) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::BackendSelect, __FILE__,
                                                  __LINE__);
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(arguments...)));
  return library;
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

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> future_of(Group& group, int plan, c10d::Work& work) {
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
  // Complete before its Work. gloo's is for a moment; NCCL's and that of torch's fake process group always, and says nothing.
  if (group.doubts.fetch_add(1, std::memory_order_relaxed) >= kMostDoubts) group.futureless.fetch_or(bit);
  return nullptr;
}

void follow(Recording* recording, Handle handle, c10::ivalue::Future& future) {
  future.addCallback(
      [recording, handle](c10::ivalue::Future& ended) {
        recording->ended(handle, now(), kFuture, ended.hasError() ? kFailed : kComplete);
      },
      false);
}

void forked_in_child() {
  Recording* parents = current.exchange(nullptr);
  if (parents == nullptr) return;
  parents->slots.forked();
  armed.store(true);
}

void install(const std::vector<Plan>& plans, const std::vector<std::string>& functional) {
  for (const Plan& plan : plans)
    libraries->push_back(put_in<CallKernel>(plan.space, plan.name, new Plan(plan)));
  for (const std::string& name : functional) {
    const char* space = "_c10d_functional";
    libraries->push_back(name == "wait_tensor" ? put_in<WaitKernel>(space, name) : put_in<FunctionalKernel>(space, name));
  }
}

void arm(const py::object& begin) {
  begin_recording = begin.inc_ref().ptr();
  armed.store(true);
}

void disarm() { armed.store(false); }

void remove_kernels() {
  py::gil_scoped_release unlocked;
  libraries->clear();
}

int64_t crossing() {
  static const bool defined = [] {
    auto library = std::make_unique<torch::Library>(torch::Library::DEF, "commtrace_native_calibration", std::nullopt, __FILE__,
                                                    __LINE__);
    for (const char* name : {"bare", "through"}) {
      library->def((std::string(name) + "(Tensor[] tensors, Tensor? none, bool flag, int number) -> Tensor[]").c_str());
      library->impl(name, torch::dispatch(c10::DispatchKey::CPU, &probe));
    }
    library.release();  // both stay
    put_in<PassKernel>("commtrace_native_calibration", "through").release();
    return true;
  }();
  (void)defined;
  return std::max<int64_t>(0, least_ns("commtrace_native_calibration::through") - least_ns("commtrace_native_calibration::bare"));
}

}  // namespace commtrace
