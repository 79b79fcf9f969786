// Times the operators of torch that communicate, and pads the others: see operators.py.

#include <ATen/record_function.h>
#include <torch/python.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <string_view>
#include <unordered_map>

namespace {

constexpr size_t KEPT = 128;  // latest calls of an operator, of which its length is taken
constexpr double SHARE = 0.98;  // so many of these calls take less
constexpr size_t FEWEST = 8;  // with fewer calls, an operator is not padded
constexpr int64_t SHORTEST_NS = 5'000;  // nor if it is shorter

// What an operator took with arguments of the same sizes.
struct Calls {
  std::array<int64_t, KEPT> ns{};
  size_t count = 0;
  int64_t length = 0;

  void settle() {
    const size_t kept = std::min(count, KEPT);
    if (kept < FEWEST) return;
    auto sorted = ns;
    const auto at = sorted.begin() + static_cast<ptrdiff_t>(SHARE * static_cast<double>(kept - 1));
    std::nth_element(sorted.begin(), at, sorted.begin() + static_cast<ptrdiff_t>(kept));
    length = *at < SHORTEST_NS ? 0 : *at;
  }
};

// Of a thread, because the one that trains is of interest: gloo's threads call no operators.
struct Thread {
  int depth = 0;  // operators under way: what an operator calls is part of it
  int64_t begin = 0;
  Calls* computing = nullptr;
  int64_t communication_ns = 0, communication_calls = 0, padding_ns = 0;
  std::unordered_map<size_t, Calls> calls;
};
thread_local Thread here;

// Processor time of this thread: what another thread on its core takes meanwhile is not part of an operator.
int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

bool computes(const at::RecordFunction& function) { return std::string_view(function.name()).starts_with("aten::"); }

// Whether the operator is timed. Those that compute are only if they are padded, for which their inputs are needed.
bool is_timed(const at::RecordFunction& function) {
  return std::string_view(function.name()).starts_with("c10d::") || (function.needsInputs() && computes(function));
}

size_t key_of(const at::RecordFunction& function) {
  size_t key = reinterpret_cast<size_t>(function.name());  // each overload has its own
  for (const c10::IValue& value : function.inputs()) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    for (const int64_t size : value.toTensor().sizes()) key = c10::hash_combine(key, static_cast<size_t>(size));
  }
  return key;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  if (!is_timed(function)) return nullptr;
  if (here.depth++ == 0) {
    here.computing = computes(function) ? &here.calls[key_of(function)] : nullptr;
    here.begin = now();
  }
  return nullptr;
}

void leave(const at::RecordFunction& function, at::ObserverContext*) {
  if (!is_timed(function) || --here.depth > 0) return;
  const int64_t end = now();
  if (here.computing == nullptr) {
    here.communication_ns += end - here.begin;
    here.communication_calls++;
    return;
  }
  Calls& calls = *here.computing;
  calls.ns[calls.count++ % KEPT] = end - here.begin;
  int64_t padded = end;
  while (padded - here.begin < calls.length) padded = now();
  here.padding_ns += padded - end;
}

void begin(bool pads) {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&enter, &leave).needsInputs(pads).scopes({at::RecordScope::FUNCTION}));
}

void settle() {
  for (auto& [key, calls] : here.calls) calls.settle();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("begin", &begin);
  module.def("settle", &settle);
  module.def("counters", [] {
    return std::make_tuple(here.communication_ns, here.communication_calls, here.padding_ns);
  });
}
