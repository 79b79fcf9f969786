// The cells of commtrace.current_step, read and written by C++ and Python. Independent of torch and Python.
#pragma once

#include <cstdint>

namespace commtrace {

// Same order as `Progress.cells` of commtrace/current_step.py.
struct Progress {
  int32_t step, micro_batch, mark, finished, by_program, reduces_gradients, batch, finishing;

  int32_t get(const int32_t& cell) const { return __atomic_load_n(&cell, __ATOMIC_RELAXED); }

  bool between_steps() const { return get(finished) && !get(by_program); }

  // Same as Progress.note_activity in Python; the caller excludes evaluations.
  void note_activity() {
    if (between_steps() && __atomic_exchange_n(&finished, 0, __ATOMIC_RELAXED))
      __atomic_fetch_add(&step, 1, __ATOMIC_RELAXED);
  }
};

}  // namespace commtrace
