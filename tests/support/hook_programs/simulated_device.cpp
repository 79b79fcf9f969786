// A simulated device: streams, events and allocations of the type PrivateUse1, and a backend on it that behaves like
// NCCL. Everything that a recorder must not do to a device is counted and refused.
//
// Its clock is the host's with another origin. Work on a stream runs in the order of submission, for as long as the test
// says. A held device begins its work when it is released, however long the host took to submit it, so that times do not
// depend on the load of this machine.

// Not torch/extension.h, which has all of torch and takes three times as long to compile.
#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <map>
#include <mutex>
#include <thread>

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<Work>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kInternal = 100;  // the backend's own stream

int64_t host_now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// ---- the device --------------------------------------------------------------------------------------------------------

// A time of the device: absolute, or counted from the release of a device that is held.
struct Moment {
  size_t epoch = 0;
  int64_t ns = 0;
};

struct Event {
  Moment at;
  bool timed = false;
};

struct Simulation {
  std::mutex mutex;
  const int64_t zero = host_now() - 777'000'000'000;  // host time at which its clock shows 0
  std::vector<int64_t> epochs{0};                     // device time of each release
  bool held = false, broken = false, capturing = false;
  std::map<c10::StreamId, Moment> busy_until;
  int64_t next_kernel = 1'000'000;
  std::atomic<int64_t> records{0}, queries{0}, synchronizations{0}, trespasses{0}, allocated{0}, peeks{0};

  int64_t now() const { return host_now() - zero; }

  Moment stream_at(c10::StreamId stream) {
    const Moment until = busy_until.count(stream) ? busy_until[stream] : Moment{};
    if (held) return until.epoch == epochs.size() ? until : Moment{epochs.size(), 0};
    return {0, std::max(absolute(until), now())};
  }

  bool released(const Moment& moment) const { return moment.epoch < epochs.size(); }
  int64_t absolute(const Moment& moment) const { return epochs.at(moment.epoch) + moment.ns; }
  bool passed(const Moment& moment) const { return released(moment) && absolute(moment) <= now(); }

  static Moment later(const Moment& one, const Moment& other) {  // both of the same epoch, or one is long past
    if (one.epoch != other.epoch) return one.epoch > other.epoch ? one : other;
    return one.ns > other.ns ? one : other;
  }
} simulation;

std::lock_guard<std::mutex> locked() { return std::lock_guard<std::mutex>(simulation.mutex); }

thread_local c10::StreamId current_stream = 0;

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }

// The caller's stream is under capture: what is launched goes into a graph and does not run.
bool under_capture(c10::StreamId stream) { return simulation.capturing && stream != kInternal; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return under_capture(stream.id()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    const auto lock = locked();
    TORCH_CHECK(!simulation.broken, "the device is gone");
    simulation.records++;
    if (under_capture(stream.id())) {
      simulation.trespasses++;
      TORCH_CHECK(false, "the stream is under capture");
    }
    if (*event == nullptr) *event = new Event{{}, flag == c10::EventFlag::BACKEND_DEFAULT};
    auto* recorded = static_cast<Event*>(*event);
    recorded->at = simulation.busy_until[stream.id()] = simulation.stream_at(stream.id());
  }
  bool queryEvent(void* event) const override {
    const auto lock = locked();
    TORCH_CHECK(!simulation.broken, "the device is gone");
    simulation.queries++;
    return simulation.passed(static_cast<Event*>(event)->at);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto lock = locked();
    const auto &begin = *static_cast<Event*>(first), &end = *static_cast<Event*>(second);
    TORCH_CHECK(begin.timed && end.timed && simulation.passed(begin.at) && simulation.passed(end.at), "not ready");
    // In single precision, like CUDA.
    return static_cast<float>((simulation.absolute(end.at) - simulation.absolute(begin.at)) / 1e6);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const c10::Stream&) const override { refuse(); }
  void synchronizeStream(const c10::Stream&) const override { refuse(); }
  void synchronizeEvent(void*) const override { refuse(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { refuse(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return refuse(), stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return refuse(), stream_of(0); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { refuse(); }

  static void refuse() {
    simulation.synchronizations++;
    TORCH_CHECK(false, "only the program may do this to the device");
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    simulation.allocated++;
    void* made = std::malloc(bytes + 1);
    return {made, made, &release, {kType, 0}};
  }
  static void release(void* made) {
    simulation.allocated--;
    std::free(made);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override {}
} memory;

at::Tensor make(int64_t size) {
  return at::detail::empty_generic({size}, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::kFloat,
                                   std::nullopt);
}

// Runs a kernel in this stream; returns its begin and end.
std::pair<Moment, Moment> run(c10::StreamId stream, int64_t ns) {
  const Moment begin = simulation.stream_at(stream);
  const Moment end{begin.epoch, begin.ns + ns};
  simulation.busy_until[stream] = end;
  return {begin, end};
}

// ---- the backend -------------------------------------------------------------------------------------------------------

std::vector<std::pair<Moment, Moment>> kernels;  // of all collectives, in the order of their launch

struct SimulatedWork : Work {
  SimulatedWork(Moment begin, Moment end, const Tensors& tensors)
      : Work(-1, c10d::OpType::UNKNOWN),
        begin_(begin),
        end_(end),
        tensors_(tensors),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(tensors);  // at launch
  }
  // Counted: a caller may keep the Work alive, or trigger an error that the program should get.
  bool isCompleted() override { return simulation.peeks++, simulation.passed(end_); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return simulation.peeks++, future_; }
  float getDuration() const override {
    simulation.peeks++;
    return static_cast<float>((simulation.absolute(end_) - simulation.absolute(begin_)) / 1e6);
  }
  void synchronize() override { Guard::refuse(); }
  // The caller's stream waits, and the host does not.
  bool wait(std::chrono::milliseconds) override {
    TORCH_CHECK(!fails_, "the communicator was aborted");
    const auto lock = locked();
    if (under_capture(current_stream)) return true;
    simulation.busy_until[current_stream] = Simulation::later(simulation.stream_at(current_stream), end_);
    return true;
  }
  static inline bool fails_ = false;

 private:
  const Moment begin_, end_;
  const Tensors tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct SimulatedBackend : c10d::Backend {
  SimulatedBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "simulated"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_.emplace(); }
  Handle endCoalescing() override {
    const Batch batch = *std::exchange(batch_, std::nullopt);
    return launch(batch.tensors, batch.async);
  }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return collective(tensors, opts.asyncOp);
  }
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return collective(tensors, opts.asyncOp);
  }
  Handle _allgather_base(at::Tensor& output, at::Tensor&, const c10d::AllgatherOptions& opts) override {
    return collective({output}, opts.asyncOp);
  }

 private:
  struct Batch {
    Tensors tensors;
    bool async = false;
  };

  Handle collective(const Tensors& tensors, bool async) {
    if (!batch_) return launch(tensors, async);
    batch_->async = async;
    batch_->tensors.insert(batch_->tensors.end(), tensors.begin(), tensors.end());
    return nullptr;
  }

  static Handle launch(const Tensors& tensors, bool async) {
    const auto lock = locked();
    if (under_capture(current_stream)) return async ? c10::make_intrusive<SimulatedWork>(Moment{}, Moment{}, tensors) : nullptr;
    const c10::StreamId stream = async ? kInternal : current_stream;
    if (async)
      simulation.busy_until[stream] =
          Simulation::later(simulation.stream_at(stream), simulation.stream_at(current_stream));
    const auto kernel = run(stream, simulation.next_kernel);
    kernels.push_back(kernel);
    return async ? c10::make_intrusive<SimulatedWork>(kernel.first, kernel.second, tensors) : nullptr;
  }

  std::optional<Batch> batch_;
};

// ---- for the test ------------------------------------------------------------------------------------------------------

void hold() {
  const auto lock = locked();
  simulation.held = true;
}

void release() {
  const auto lock = locked();
  simulation.held = false;
  int64_t begin = simulation.now();
  for (const auto& [stream, until] : simulation.busy_until)
    if (simulation.released(until)) begin = std::max(begin, simulation.absolute(until));
  simulation.epochs.push_back(begin);
}

// Waits until the device has finished its work.
void join() {
  int64_t until = 0;
  {
    const auto lock = locked();
    for (const auto& [stream, moment] : simulation.busy_until) until = std::max(until, simulation.absolute(moment));
  }
  while (simulation.now() <= until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Returns when the collectives so far truly began and ended, in ns of the host's clock.
std::vector<std::pair<int64_t, int64_t>> truth() {
  const auto lock = locked();
  std::vector<std::pair<int64_t, int64_t>> times;
  for (const auto& [begin, end] : kernels)
    times.emplace_back(simulation.absolute(begin) + simulation.zero, simulation.absolute(end) + simulation.zero);
  return times;
}

std::map<std::string, int64_t> counts() {
  return {{"records", simulation.records}, {"queries", simulation.queries}, {"trespasses", simulation.trespasses},
          {"synchronizations", simulation.synchronizations}, {"allocated", simulation.allocated},
          {"peeks", simulation.peeks}};
}

c10::intrusive_ptr<c10d::Backend> create(int rank, int size) {
  return c10::make_intrusive<SimulatedBackend>(rank, size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kType, &memory);
  module.def("create", &create);
  module.def("make", &make);
  module.def("hold", &hold);
  module.def("release", &release);
  module.def("join", &join, py::call_guard<py::gil_scoped_release>());
  module.def("truth", &truth);
  module.def("counts", &counts);
  module.def("launched", [] { return kernels.size(); });
  module.def("next_kernel", [](int64_t ns) { simulation.next_kernel = ns; });
  module.def("compute", [](int64_t ns) {
    const auto lock = locked();
    run(current_stream, ns);
  });
  module.def("stream", [](int64_t id) { return std::exchange(current_stream, id); });
  module.def("capture", [](bool on) { simulation.capturing = on; });
  module.def("breaks", [] { simulation.broken = true; });
  module.def("waits_fail", [](bool yes) { SimulatedWork::fails_ = yes; });
}
