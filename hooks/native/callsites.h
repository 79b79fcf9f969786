// Call sites, found as in hooks/call_site.py. The properties of a frame, and the row of its line, are looked up in
// Python once per instruction and cached. Independent of torch.
#pragma once

#include <array>

#include "frames.h"

namespace commtrace {

// The row of a call site, and the properties of the frames that were walked.
struct CallSite {
  uint32_t site = 0;
  uint8_t seen = 0;
  bool failed = false;  // a lookup failed
};

// Results of lookups in Python, by instruction. Clear it when code objects are released: addresses may be reused.
class SiteCache {
 public:
  void clear() { entries_.fill({}); }

  // Finds the call site of the running call, as CallSites.find does in Python; its row only if `numbered`.
  // `kind(depth)` and `site(depth, depth of the caller or -1)` call Python; a negative result means failure.
  template <typename Kind, typename Site>
  CallSite find(bool deep, bool numbered, Kind kind, Site site) {
    CallSite result;
    Frame frame;
    if (!innermost(frame)) return result;
    int depth = 0;
    Place named{0, frame.where}, caller;
    uint8_t skipped = kWrapper;  // skip frames with these properties; 0: all places are found
    for (bool more = true; more; more = outer(frame), depth++) {
      const uint8_t seen = kind_of(frame, depth, kind, result);
      result.seen |= seen;
      if (skipped && !(seen & skipped)) {
        (skipped == kWrapper ? named : caller) = {depth, frame.where};
        skipped = seen & kShared ? kWrapper | kShared : 0;
      }
      if (!skipped && (!deep || result.seen & (kForward | kOptimizer))) break;
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

  // A frame: its depth (0: innermost; -1: none) and its instruction.
  struct Place {
    int depth = -1;
    uint64_t where = 0;
  };

  Entry& at(uint64_t where) { return entries_[where * 0x9E3779B97F4A7C15ULL >> 54]; }

  template <typename Kind>
  [[gnu::always_inline]] uint8_t kind_of(const Frame& frame, int depth, Kind look_up, CallSite& result) {
    const Entry& known = at(frame.where);
    if (known.where == frame.where) return known.kind;
    const int64_t kind = look_up(depth);
    result.failed |= kind < 0;
    if (kind < 0) return 0;
    at(frame.where) = {frame.where, static_cast<uint8_t>(kind), kUnknown};
    return static_cast<uint8_t>(kind);
  }

  template <typename Site>
  uint32_t site_of(Place named, Place caller, Site look_up, CallSite& result) {
    // The highest bit distinguishes pairs of instructions from single ones.
    const uint64_t pair = (named.where ^ caller.where * 0x9E3779B97F4A7C15ULL) | 1ULL << 63;
    const uint64_t key = caller.depth < 0 ? named.where : pair;
    const Entry& known = at(key);
    if (known.where == key && known.site != kUnknown) return known.site;
    const int64_t site = look_up(named.depth, caller.depth);
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
