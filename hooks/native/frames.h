// The Python frames of the calling thread, without the GIL where this Python's own headers allow it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace commtrace {

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
