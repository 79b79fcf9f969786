// Call sites, as hooks/call_site.py finds them. What a frame shows, and its line's row, are looked up in Python once for
// each instruction and cached by thread.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "frames.h"
#include "python.h"

namespace commtrace {

class CallSites {
 public:
  explicit CallSites(const PythonRows& rows) : rows_(rows) {}

  // As CallSites.find in Python; without the site's row unless it is `numbered`.
  CallSite find(bool deep, bool numbered) {
    std::optional<py::gil_scoped_acquire> gil;
    if (frames_need_gil()) gil.emplace();
    Frame frame;
    if (!innermost(frame)) return {};
    const CallSite site = walk(frame, deep, numbered);
    finished(frame);
    return site;
  }

  // Invalidates the caches of all threads. Needs the GIL.
  void forget() {
    epoch_.store(next_epoch());
    const auto old = std::move(codes_);  // destroyed when `codes_` is consistent again, as that may run Python code
    codes_.clear();
  }

 private:
  static constexpr size_t kMaxCodes = 50000;
  static constexpr uint32_t kUnknown = 0xffffffff;

  struct Entry {
    uint64_t where = 0;
    uint8_t kind = 0;
    uint32_t site = kUnknown;
  };

  // Entries by instruction, of one thread.
  struct Cache {
    std::array<Entry, 1024> entries{};
    uint64_t epoch = 0;

    Entry& at(uint64_t where) { return entries[where * 0x9E3779B97F4A7C15ULL >> 54]; }

    // Clears entries with other row numbers, or of code that is not kept alive any more.
    void renew(uint64_t current) {
      if (epoch == current) return;
      entries.fill({});
      epoch = current;
    }
  };

  // A frame: how many calls further out, and its instruction. Depth -1: none.
  struct Place {
    int depth = -1;
    uint64_t where = 0;
  };

  static Cache& cache_of_thread() {
    static thread_local std::unique_ptr<Cache> cache;
    if (!cache) cache = std::make_unique<Cache>();
    return *cache;
  }

  CallSite walk(Frame& frame, bool deep, bool numbered) {
    Cache& cache = cache_of_thread();
    cache.renew(epoch_.load(std::memory_order_acquire));
    CallSite result;
    int depth = 0;
    Place named{0, frame.where}, caller;
    uint8_t passed_over = kWrapper;  // frames that are passed over in search of the next place; 0: all are found
    for (bool more = true; more; more = outer(frame), depth++) {
      const uint8_t kind = kind_of(cache, frame, depth);
      result.seen |= kind;
      if (passed_over && !(kind & passed_over)) {
        (passed_over == kWrapper ? named : caller) = {depth, frame.where};
        passed_over = kind & kShared ? kWrapper | kShared : 0;
      }
      if (!passed_over && (!deep || result.seen & (kForward | kOptimizer))) break;
    }
    if (numbered) result.site = site_of(cache, named, caller);
    return result;
  }

  uint8_t kind_of(Cache& cache, const Frame& frame, int depth) {
    const Entry& entry = cache.at(frame.where);
    if (entry.where == frame.where) return entry.kind;
    return rows_.look_up(uint8_t{0}, [&](const py::object& rows) {
      const auto object = py::reinterpret_steal<py::object>(frame_object(depth));
      if (!object) return uint8_t{0};
      if (codes_.size() >= kMaxCodes) forget();
      codes_.push_back(object.attr("f_code"));
      const auto kind = rows.attr("classify")(object).cast<uint8_t>();
      cache.renew(epoch_.load(std::memory_order_acquire));
      cache.at(frame.where) = {frame.where, kind, kUnknown};
      return kind;
    });
  }

  uint32_t site_of(Cache& cache, Place named, Place caller) {
    // The highest bit keeps pairs of instructions apart from instructions.
    const uint64_t pair = (named.where ^ caller.where * 0x9E3779B97F4A7C15ULL) | 1ULL << 63;
    const uint64_t key = caller.depth < 0 ? named.where : pair;
    Entry& entry = cache.at(key);
    if (entry.where == key && entry.site != kUnknown) return entry.site;
    return rows_.look_up(uint32_t{0}, [&](const py::object& rows) {
      const auto object = py::reinterpret_steal<py::object>(frame_object(named.depth));
      const auto above = py::reinterpret_steal<py::object>(caller.depth < 0 ? nullptr : frame_object(caller.depth));
      const auto site = !object ? 0 : (above ? rows.attr("site")(object, above) : rows.attr("site")(object)).cast<uint32_t>();
      if (caller.depth >= 0) entry = {key, 0, site};
      else if (entry.where == key) entry.site = site;
      return site;
    });
  }

  static uint64_t next_epoch() {
    static std::atomic<uint64_t> epochs{0};
    return ++epochs;
  }

  const PythonRows& rows_;
  std::atomic<uint64_t> epoch_{next_epoch()};
  std::vector<py::object> codes_;  // kept alive, so that the addresses of their instructions stay unique
};

}  // namespace commtrace
