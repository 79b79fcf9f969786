// Waits, polls and coalesced calls that Python makes.
#pragma once

#include "recording_kernels.h"

namespace commtrace {

// Returns a replacement of `wait`, a method of this type, which is Work or derived from it.
py::object waiting_for(const py::object& type, const py::object& wait);

// `work.is_completed()` has returned true.
void polled(const py::object& work);

// Calls on this group belong together from here on, until `batch_ends`.
void batch_begins(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg);

// The calls end when `work` does; null if the backend has waited itself, or on a stream.
void batch_ends(Recording& recording, const c10::intrusive_ptr<c10d::ProcessGroup>& pg,
                const c10::intrusive_ptr<c10d::Work>& work);

}  // namespace commtrace
