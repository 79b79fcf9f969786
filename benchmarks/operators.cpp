// Cuts a step of the thread that trains into the operators of torch and what is between them: see operators.py.

#include <ATen/record_function.h>
#include <torch/python.h>

#include <ctime>
#include <string_view>
#include <utility>
#include <vector>

namespace {

// As operators.Kind in Python.
enum Kind : int64_t { kOutside = 0, kComputation = 1, kCommunication = 2 };

// Processor time of this thread: what other threads on its core take meanwhile is not part of it.
int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

struct Thread {
  int depth = 0;  // operators under way: what an operator calls is part of it
  Kind kind = kOutside;
  bool is_marked = false;
  int64_t cut = 0;
  std::vector<int64_t> pieces;  // 8 ns + 4 if marked + kind

  void ends(Kind piece) {
    const int64_t time = now();
    pieces.push_back((time - cut) << 3 | (is_marked ? 4 : 0) | piece);
    cut = time;
    is_marked = false;
  }
};
thread_local Thread here;

Kind kind_of(const at::RecordFunction& function) {
  const std::string_view name(function.name());
  return name.starts_with("c10d::") ? kCommunication : name.starts_with("aten::") ? kComputation : kOutside;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  const Kind kind = kind_of(function);
  if (kind == kOutside || here.depth++ > 0) return nullptr;
  here.kind = kind;
  here.ends(kOutside);
  return nullptr;
}

void leave(const at::RecordFunction& function, at::ObserverContext*) {
  if (kind_of(function) != kOutside && --here.depth == 0) here.ends(here.kind);
}

void begin() { at::addGlobalCallback(at::RecordFunctionCallback(&enter, &leave).scopes({at::RecordScope::FUNCTION})); }

// Ends this thread's step and returns its pieces.
py::bytes step_ended() {
  here.ends(kOutside);
  const auto pieces = std::exchange(here.pieces, {});
  return py::bytes(reinterpret_cast<const char*>(pieces.data()), pieces.size() * sizeof(pieces[0]));
}

void step_begins() {
  here.pieces.clear();
  here.is_marked = false;
  here.cut = now();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("begin", &begin);
  module.def("mark", [] { here.is_marked = true; });
  module.def("step_begins", &step_begins);
  module.def("step_ended", &step_ended);
}
