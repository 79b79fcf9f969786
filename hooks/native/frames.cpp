// Reading a thread's own frames needs no lock: they cannot change during a call. Python's public API creates objects and
// needs the GIL, so this file is compiled with the internal headers of the Python that it will run in: of the same minor
// version, because CPython compares the layouts of structures with each patch release (its check-abidump). `frames_agree`
// compares what is read. For versions with unknown internals it uses the public API, with the GIL.
#include "frames.h"

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
#define COMMTRACE_INTERNAL_FRAMES 1
#define Py_BUILD_CORE 1
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE
#elif PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

namespace commtrace {

#ifdef COMMTRACE_INTERNAL_FRAMES

bool frames_need_gil() { return false; }

static bool set_frame(Frame& frame, _PyInterpreterFrame* f) {
  while (f != nullptr && _PyFrame_IsIncomplete(f)) f = f->previous;
  frame.frame = f;
  if (f == nullptr) return false;
#if PY_VERSION_HEX >= 0x030D0000
  frame.where = reinterpret_cast<uint64_t>(f->instr_ptr);
#else
  frame.where = reinterpret_cast<uint64_t>(f->prev_instr);
#endif
  return true;
}

bool innermost(Frame& frame) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return false;
#if PY_VERSION_HEX >= 0x030D0000
  return set_frame(frame, thread->current_frame);
#else
  return set_frame(frame, thread->cframe->current_frame);
#endif
}

bool outer(Frame& frame) { return set_frame(frame, static_cast<_PyInterpreterFrame*>(frame.frame)->previous); }

void finished(Frame&) {}

PyObject* first_argument(const Frame& frame) {
  auto* f = static_cast<_PyInterpreterFrame*>(frame.frame);
#if PY_VERSION_HEX >= 0x030D0000
  const PyCodeObject* code = _PyFrame_GetCode(f);
#else
  const PyCodeObject* code = f->f_code;
#endif
  PyObject* value = code->co_argcount > 0 ? f->localsplus[0] : nullptr;
  if (value != nullptr && PyCell_Check(value)) value = PyCell_GET(value);  // an inner function uses it, too
  Py_XINCREF(value);
  return value;
}

// Whether the first argument is read as Python's public functions do.
static bool argument_agrees(const Frame& read, PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  PyObject *names = PyCode_GetVarnames(code), *locals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_locals");
  PyObject *argument = first_argument(read), *named = nullptr;
  if (names != nullptr && locals != nullptr && code->co_argcount > 0) named = PyObject_GetItem(locals, PyTuple_GET_ITEM(names, 0));
  PyErr_Clear();
  const bool agrees = argument == named;
  PyObject* const owned[] = {argument, named, locals, names, reinterpret_cast<PyObject*>(code)};
  for (PyObject* object : owned) Py_XDECREF(object);
  return agrees;
}

bool frames_agree() {
  Frame read;
  bool found = innermost(read);
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (!found || frame == nullptr || !argument_agrees(read, frame)) return false;
  while (found && frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const uint64_t where = reinterpret_cast<uint64_t>(_PyCode_CODE(code)) + PyFrame_GetLasti(frame);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(code);
    Py_DECREF(frame);
    frame = back;
    if (read.where != where) break;
    found = outer(read);
  }
  const bool agree = !found && frame == nullptr;
  Py_XDECREF(frame);
  return agree;
}

#else

bool frames_need_gil() { return true; }

static bool set_frame(Frame& frame, PyFrameObject* f) {
  Py_XDECREF(static_cast<PyObject*>(frame.frame));
  frame.frame = f;
  if (f == nullptr) return false;
  PyCodeObject* code = PyFrame_GetCode(f);
#if PY_VERSION_HEX >= 0x030B0000
  const long at = PyFrame_GetLasti(f);
#else
  const long at = f->f_lasti;
#endif
  frame.where = reinterpret_cast<uint64_t>(code) << 17 | (at & 0x1ffff);  // addresses have 47 bits
  Py_DECREF(code);
  return true;
}

bool innermost(Frame& frame) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  return thread != nullptr && set_frame(frame, PyThreadState_GetFrame(thread));
}

bool outer(Frame& frame) { return set_frame(frame, PyFrame_GetBack(static_cast<PyFrameObject*>(frame.frame))); }

void finished(Frame& frame) {
  Py_XDECREF(static_cast<PyObject*>(frame.frame));
  frame.frame = nullptr;
}

PyObject* first_argument(const Frame& frame) {
  auto* f = static_cast<PyFrameObject*>(frame.frame);
  PyCodeObject* code = PyFrame_GetCode(f);
  PyObject* locals = code->co_argcount == 0 ? nullptr : PyObject_GetAttrString(reinterpret_cast<PyObject*>(f), "f_locals");
  PyObject* names = locals == nullptr ? nullptr : PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_varnames");
  PyObject* value = names == nullptr ? nullptr : PyObject_GetItem(locals, PyTuple_GET_ITEM(names, 0));
  PyObject* const owned[] = {names, locals, reinterpret_cast<PyObject*>(code)};
  for (PyObject* object : owned) Py_XDECREF(object);
  PyErr_Clear();
  return value;
}

bool frames_agree() { return true; }

#endif

PyObject* frame_object(int depth) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  PyFrameObject* frame = thread == nullptr ? nullptr : PyThreadState_GetFrame(thread);
  for (; frame != nullptr && depth > 0; depth--) {
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return reinterpret_cast<PyObject*>(frame);
}

}  // namespace commtrace
