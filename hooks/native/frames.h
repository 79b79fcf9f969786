// The Python frames of the calling thread, read without the GIL if this Python's internal headers allow it.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace commtrace {

// Properties of frames, the bits of hooks/call_site.py.
enum Seen : uint16_t {
  kWrapper = 1, kObject = 2, kForward = 4, kOptimizer = 8, kHandle = 16, kBlocking = 32, kBackward = 64, kShared = 128,
  kDispatch = 256, kContext = 512
};

// Above these bits: the purpose of a function's calls, if it has one.
constexpr int kPurposeShift = 16;

// One frame. `where` uniquely identifies the instruction that it executes.
struct Frame {
  void* frame = nullptr;
  uint64_t where = 0;
};

// Whether the functions below need the GIL. If not, they read only the thread's own frames, which cannot change during a
// call.
bool frames_need_gil();

// Both return false if there is no such Python frame.
bool innermost(Frame& frame);
bool outer(Frame& frame);
void finished(Frame& frame);  // releases the reference that `frame` holds if the GIL is needed

// The first argument of the function that the frame runs, such as `self`: a new reference, or null. Needs the GIL.
PyObject* first_argument(const Frame& frame);

// Whether the functions above return the calling thread's frames as Python's public functions do. Needs the GIL. They do
// not if the library was compiled with the headers of a Python whose structures differ.
bool frames_agree();

// The frame object `depth` calls further out: a new reference, or null. Needs the GIL.
PyObject* frame_object(int depth);

}  // namespace commtrace
