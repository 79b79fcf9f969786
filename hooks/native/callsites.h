// Call sites, as hooks/call_site.py finds them. What a frame shows, and its line's row, are looked up in Python once for
// each instruction and cached. Independent of torch.
#pragma once

#include <array>

#include "frames.h"

namespace commtrace {

// The row of a call site, and the properties of the frames that were walked.
struct CallSite {
  uint32_t site = 0;
  uint8_t seen = 0;
  bool failed = false;  // a look-up has failed
};

// What Python has answered, by instruction. To be cleared when code objects are released, whose addresses may be reused.
class SiteCache {
 public:
  void clear() { entries_.fill({}); }

  // Finds the call site of the running call, the same as CallSites.find in Python; without its row unless `numbered`.
  // `kind(depth)` and `site(depth, depth of the caller or -1)` ask Python about frames; a negative answer is none.
  template <typename Kind, typename Site>
  CallSite find(bool deep, bool numbered, Kind kind, Site site) {
    CallSite result;
    Frame frame;
    if (!innermost(frame)) return result;
    int depth = 0;
    Place named{0, frame.where}, caller;
    uint8_t passed_over = kWrapper;  // frames that are passed over in search of the next place; 0: all are found
    for (bool more = true; more; more = outer(frame), depth++) {
      const uint8_t seen = kind_of(frame, depth, kind, result);
      result.seen |= seen;
      if (passed_over && !(seen & passed_over)) {
        (passed_over == kWrapper ? named : caller) = {depth, frame.where};
        passed_over = seen & kShared ? kWrapper | kShared : 0;
      }
      if (!passed_over && (!deep || result.seen & (kForward | kOptimizer))) break;
    }
    finished(frame);
    if (numbered) result.site = site_of(named, caller, site, result);
    return result;
  }

 private:
  static constexpr uint32_t kUnknown = 0xffffffff;

  struct Entry {
    uint64_t where = 0;
    uint8_t kind = 0;
    uint32_t site = kUnknown;
  };

  // A frame: how many calls further out, and its instruction. Depth -1: none.
  struct Place {
    int depth = -1;
    uint64_t where = 0;
  };

  Entry& at(uint64_t where) { return entries_[where * 0x9E3779B97F4A7C15ULL >> 54]; }

  template <typename Kind>
  [[gnu::always_inline]] uint8_t kind_of(const Frame& frame, int depth, Kind ask, CallSite& result) {
    const Entry& known = at(frame.where);
    if (known.where == frame.where) return known.kind;
    const int64_t kind = ask(depth);
    result.failed |= kind < 0;
    if (kind < 0) return 0;
    at(frame.where) = {frame.where, static_cast<uint8_t>(kind), kUnknown};
    return static_cast<uint8_t>(kind);
  }

  template <typename Site>
  uint32_t site_of(Place named, Place caller, Site ask, CallSite& result) {
    // The highest bit keeps pairs of instructions apart from instructions.
    const uint64_t pair = (named.where ^ caller.where * 0x9E3779B97F4A7C15ULL) | 1ULL << 63;
    const uint64_t key = caller.depth < 0 ? named.where : pair;
    const Entry& known = at(key);
    if (known.where == key && known.site != kUnknown) return known.site;
    const int64_t site = ask(named.depth, caller.depth);
    result.failed |= site < 0;
    if (site < 0) return 0;
    Entry& entry = at(key);
    if (caller.depth >= 0) entry = {key, 0, static_cast<uint32_t>(site)};
    else if (entry.where == key) entry.site = static_cast<uint32_t>(site);
    return static_cast<uint32_t>(site);
  }

  std::array<Entry, 1024> entries_{};
};

}  // namespace commtrace
