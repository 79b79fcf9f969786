// A backend that behaves like NCCL, on CPU tensors, and sends nothing.
//
// It returns no Work for a synchronous call. The futures of its asynchronous Works are complete at launch, like NCCL's;
// the Works themselves are complete only when they are waited for or finish() was called. It coalesces: calls between
// startCoalescing and endCoalescing share one Work.

// Not torch/extension.h, which has all of torch and takes three times as long to compile.
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<Work>;

std::atomic<bool> finished{false};

struct LaunchedWork : Work {
  LaunchedWork()
      : Work(-1, c10d::OpType::UNKNOWN),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(Tensors{});
  }
  bool isCompleted() override { return waited_ || finished; }
  bool isSuccess() const override { return waited_ || finished; }
  bool wait(std::chrono::milliseconds) override { return waited_ = true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool waited_ = false;
};

struct NullWorkBackend : c10d::Backend {
  NullWorkBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "nullwork"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  Handle endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<LaunchedWork>();
  }

  Handle allreduce(Tensors&, const c10d::AllreduceOptions& opts) override { return launch(opts.asyncOp); }
  Handle allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(opts.asyncOp);
  }
  Handle broadcast(Tensors&, const c10d::BroadcastOptions& opts) override { return launch(opts.asyncOp); }
  Handle reduce(Tensors&, const c10d::ReduceOptions& opts) override { return launch(opts.asyncOp); }
  Handle allgather(Lists&, Tensors&, const c10d::AllgatherOptions& opts) override { return launch(opts.asyncOp); }
  Handle _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions& opts) override {
    return launch(opts.asyncOp);
  }
  Handle reduce_scatter(Tensors&, Lists&, const c10d::ReduceScatterOptions& opts) override {
    return launch(opts.asyncOp);
  }
  Handle _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions& opts) override {
    return launch(opts.asyncOp);
  }
  Handle gather(Lists&, Tensors&, const c10d::GatherOptions& opts) override { return launch(opts.asyncOp); }
  Handle scatter(Tensors&, Lists&, const c10d::ScatterOptions& opts) override { return launch(opts.asyncOp); }
  Handle alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions& opts) override { return launch(opts.asyncOp); }
  Handle alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions& opts
  ) override {
    return launch(opts.asyncOp);
  }
  Handle barrier(const c10d::BarrierOptions& opts) override { return launch(opts.asyncOp); }
  Handle send(Tensors&, int, int) override { return launch(true); }
  Handle recv(Tensors&, int, int) override { return launch(true); }

 private:
  Handle launch(bool async) {
    if (coalescing_ || !async) {
      return nullptr;
    }
    return c10::make_intrusive<LaunchedWork>();
  }
  bool coalescing_ = false;
};

c10::intrusive_ptr<c10d::Backend> create(int rank, int size) {
  return c10::make_intrusive<NullWorkBackend>(rank, size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("create", &create);
  module.def("finish", [] { finished = true; });  // completes all Works, also those of later calls
}
