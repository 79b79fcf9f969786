// Calls to Python: lookups of table rows that are new to C++ (rows.py).
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "slots.h"

namespace commtrace {

namespace py = pybind11;

// Notes that this thread's running call looks up something new since `ns`. Defined in recording.h.
inline void note_lookup(int64_t ns);

// Whether a thread that requests the GIL would be terminated in the middle of our code.
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

  // Whether a result from these rows may be cached: meanwhile another thread may have closed the log and opened the
  // next one, whose rows have other numbers.
  bool current(const py::object& rows) const { return rows.is(rows_); }

  // Returns `query(rows)`; `otherwise` if the log is closed or the interpreter ends.
  template <typename Result, typename Query>
  Result call(Result otherwise, Query query) const {
    if (interpreter_ends()) return otherwise;
    py::gil_scoped_acquire gil;
    const py::object rows = rows_;  // keeps it alive, as the log may be closed meanwhile
    return rows ? query(rows) : otherwise;
  }

  // Same as `call`, for a result that is cached: the time counts as the cost of a first call.
  template <typename Result, typename Query>
  Result look_up(Result otherwise, Query query) const {
    note_lookup(now());
    return call(otherwise, query);
  }

 private:
  py::object rows_;
};

}  // namespace commtrace
