// Calls of Python: the rows of tables that are new to C++ (rows.py).
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "slots.h"

namespace commtrace {

namespace py = pybind11;

// Marks the running call of this thread as one that looks something up for the first time, since `ns` (recording.h).
inline void note_lookup(int64_t ns);

// Whether a thread that asks for the GIL would be ended in the middle of our code.
inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// The `Rows` of the running recording. All methods but `call` and `look_up` need the GIL.
class PythonRows {
 public:
  void open(py::object rows) { rows_ = std::move(rows); }
  void close() { const py::object last = std::move(rows_); }

  // Whether an answer of these rows may be cached: Python may have let another thread close the log meanwhile and open
  // the next one, whose rows have other numbers.
  bool current(const py::object& rows) const { return rows.is(rows_); }

  // Returns `query(rows)`; `otherwise` if the log is closed or the interpreter ends.
  template <typename Answer, typename Query>
  Answer call(Answer otherwise, Query query) const {
    if (interpreter_ends()) return otherwise;
    py::gil_scoped_acquire gil;
    const py::object rows = rows_;  // keeps it alive, as the log may be closed meanwhile
    return rows ? query(rows) : otherwise;
  }

  // As `call`, for an answer that is cached: the time counts as the cost of a first call.
  template <typename Answer, typename Query>
  Answer look_up(Answer otherwise, Query query) const {
    note_lookup(now());
    return call(otherwise, query);
  }

 private:
  py::object rows_;
};

}  // namespace commtrace
