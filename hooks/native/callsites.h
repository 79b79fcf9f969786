// Which line of the program made a call, and what the frames above it tell: hooks/call_site.py, remembered.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "frames.h"
#include "python.h"

namespace commtrace {

// What one thread remembers of instructions it has seen before. No lock, no GIL: it is the thread's own.
class SeenFrames {
 public:
  struct Entry {
    uint64_t where = 0;
    uint8_t kind = 0;
    uint32_t site = kUnasked;
  };
  static constexpr uint32_t kUnasked = 0xffffffff;

  // Forgets everything when `epoch` is another one: other numbers, or code that is kept alive no more.
  void renew(uint64_t epoch) {
    if (epoch == epoch_) return;
    entries_.fill({});
    epoch_ = epoch;
  }

  Entry& at(uint64_t where) { return entries_[where * 0x9E3779B97F4A7C15ULL >> 54]; }

  static SeenFrames& mine() {
    static thread_local std::unique_ptr<SeenFrames> frames;
    if (!frames) frames = std::make_unique<SeenFrames>();
    return *frames;
  }

 private:
  std::array<Entry, 1024> entries_{};
  uint64_t epoch_ = 0;
};

class CallSites {
 public:
  explicit CallSites(const Asked& ask) : ask_(ask) {}

  // As CallSites.find of the twin; what a frame tells, and its line's number, are asked of Python once per instruction.
  CallSite find(bool deep, bool numbered) {
    const auto gil = frames_need_gil() ? std::make_unique<py::gil_scoped_acquire>() : nullptr;
    Frame frame;
    if (!innermost(frame)) return {};
    const CallSite found = walk(frame, deep, numbered);
    finished(frame);
    return found;
  }

  // With the GIL: what threads remember counts no more.
  void forget() {
    epoch_.store(next_epoch());
    const auto old = std::move(kept_);  // let go of when the list is whole again: what dies may run code
    kept_.clear();
  }

 private:
  static constexpr size_t kMost = 50000;

  // With the GIL. Code that has been seen is kept, so that its instructions' addresses stay its own; but not without bound.
  void keep(py::object code) {
    if (kept_.size() >= kMost) forget();
    kept_.push_back(std::move(code));
  }

  CallSite walk(Frame& frame, bool deep, bool numbered) {
    SeenFrames& known = SeenFrames::mine();
    known.renew(epoch_.load(std::memory_order_acquire));
    CallSite found;
    int depth = 0, named = 0;
    uint64_t named_where = frame.where;
    bool more = true, within = true;  // within: all frames so far only pass the call on
    for (; more; more = outer(frame), depth++) {
      const uint8_t kind = kind_of(known, frame, depth);
      found.seen |= kind;
      if (within && !(kind & kWrapper)) {
        within = false;
        named = depth;
        named_where = frame.where;
        if (!deep) break;
      }
      if (!within && found.seen & (kForward | kOptimizer)) break;
    }
    if (numbered) found.site = site_of(known, named_where, named);
    return found;
  }

  uint8_t kind_of(SeenFrames& known, const Frame& frame, int depth) {
    const SeenFrames::Entry& entry = known.at(frame.where);
    if (entry.where == frame.where) return entry.kind;
    return ask_.look_up(uint8_t{0}, [&](const py::object& rows) {
      const auto object = py::reinterpret_steal<py::object>(frame_object(depth));
      if (!object) return uint8_t{0};
      keep(object.attr("f_code"));
      const auto kind = rows.attr("classify")(object).cast<uint8_t>();
      known.renew(epoch_.load(std::memory_order_acquire));
      known.at(frame.where) = {frame.where, kind, SeenFrames::kUnasked};
      return kind;
    });
  }

  uint32_t site_of(SeenFrames& known, uint64_t where, int depth) {
    SeenFrames::Entry& entry = known.at(where);
    if (entry.where == where && entry.site != SeenFrames::kUnasked) return entry.site;
    return ask_.look_up(uint32_t{0}, [&](const py::object& rows) {
      const auto object = py::reinterpret_steal<py::object>(frame_object(depth));
      const auto site = object ? rows.attr("site")(object).cast<uint32_t>() : 0;
      if (entry.where == where) entry.site = site;
      return site;
    });
  }

  static uint64_t next_epoch() {
    static std::atomic<uint64_t> epochs{0};
    return ++epochs;
  }

  const Asked& ask_;
  std::atomic<uint64_t> epoch_{next_epoch()};
  std::vector<py::object> kept_;
};

}  // namespace commtrace
