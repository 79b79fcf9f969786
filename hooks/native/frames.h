// The Python frames of the calling thread, without the GIL where this Python's own headers allow it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace commtrace {

// What frames show, as the bits of hooks/call_site.py.
enum Seen : uint8_t { kWrapper = 1, kObject = 2, kForward = 4, kOptimizer = 8, kHandle = 16, kBlocking = 32 };

// The row of the line that made a call, and what its frames show together.
struct CallSite {
  uint32_t site = 0;
  uint8_t seen = 0;
};

// One frame. `where` tells the instruction that it executes from every other instruction of living code.
struct Frame {
  void* frame = nullptr;
  uint64_t where = 0;
};

// Whether `innermost` and `outer` may be called without the GIL. A thread that is inside a call changes nothing about its
// own frames, and only these are read.
bool frames_need_gil();

// False where the thread has no Python frame.
bool innermost(Frame& frame);
bool outer(Frame& frame);
void finished(Frame& frame);  // gives back what `frame` holds (where the GIL is needed)

// The frame so many calls further out, as an object for Python (needs the GIL). A new reference, or null.
PyObject* frame_object(int depth);

}  // namespace commtrace
