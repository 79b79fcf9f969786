// Questions to Python: the numbers of new rows (rows.py).
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "slots.h"

namespace commtrace {

namespace py = pybind11;

// The call that this thread makes looks up something for the first time, since `ns` at the latest (recording.h).
inline void note_lookup(int64_t ns);

// A thread that asks for the GIL now would be ended in the middle of our code.
inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

class Asked {
 public:
  // With the GIL: from here on `rows` answers.
  void answers(py::object rows) { rows_ = std::move(rows); }

  // With the GIL: nobody answers any more.
  void close() { const py::object last = std::move(rows_); }

  // With the GIL: whether what these rows have just answered may be remembered. Python may have let another thread close
  // the log meanwhile, and open the next one, whose rows have other numbers.
  bool still(const py::object& rows) const { return rows.is(rows_); }

  // As operator(), of a question whose answer is remembered: what it takes belongs to the cost of a first call.
  template <typename Answer, typename Question>
  Answer look_up(Answer otherwise, Question question) const {
    note_lookup(now());
    return (*this)(otherwise, question);
  }

  // What `question(rows)` gives; `otherwise` where the log is closed or the interpreter ends.
  template <typename Answer, typename Question>
  Answer operator()(Answer otherwise, Question question) const {
    if (interpreter_ends()) return otherwise;
    py::gil_scoped_acquire gil;
    const py::object rows = rows_;  // kept: the log may be closed while it answers
    return rows ? question(rows) : otherwise;
  }

 private:
  py::object rows_;
};

}  // namespace commtrace
