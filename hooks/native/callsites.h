// Call sites, found as in hooks/call_site.py. The properties of a frame, and the row of its line, are looked up in
// Python once per instruction and cached. Independent of torch.
#pragma once

#include <array>
#include <unordered_map>

#include "frames.h"

namespace commtrace {

// The row of a call site, and the properties of the frames that were walked.
struct CallSite {
  uint32_t site = 0;
  uint16_t seen = 0;
  bool failed = false;  // a lookup failed
};

// Purposes that are found here, the numbers of hooks/purposes.py. 0: the thread has no mark.
enum Purpose : uint32_t { kNoPurpose, kObjectsExchanged, kGradientsReduced, kUsedParameters };

// What a thread's hooks, and the call itself, say of its purpose.
struct Marks {
  uint32_t purpose = kNoPurpose;
  uint32_t reducer = kNoPurpose;  // if C++ code makes the call within autograd

  // `seen`: by all frames up to the call site; `first`: by the innermost one that is not torch's dispatch.
  uint32_t of(uint16_t seen, uint16_t first) const {
    return purpose ? purpose : seen & kObject ? kObjectsExchanged : first & kBackward ? reducer : kNoPurpose;
  }
};

// Results of lookups in Python, by instruction. Clear it when code objects are released: addresses may be reused.
class SiteCache {
 public:
  void clear() {
    entries_.fill({});
    with_purpose_.clear();
  }

  // Finds the call site of the running call, as CallSites.find does in Python; its row only if `numbered`.
  // `kind(depth)` and `site(depth, depth of the caller or -1, purpose)` call Python; a negative result means failure.
  template <typename Kind, typename Site>
  CallSite find(bool deep, bool numbered, Marks marks, Kind kind, Site site) {
    CallSite result;
    Frame frame;
    if (!innermost(frame)) return result;
    int depth = 0;
    Place named{0, frame.where}, caller;
    uint16_t skipped = kWrapper;  // skip frames with these properties; 0: all places are found
    uint16_t first = kDispatch, up_to_site = 0;
    for (bool more = true; more; more = outer(frame), depth++) {
      const uint16_t seen = kind_of(frame, depth, kind, result);
      result.seen |= seen;
      if (first & kDispatch) first = seen;
      if (skipped) up_to_site = result.seen;
      if (skipped && !(seen & skipped)) {
        (skipped == kWrapper ? named : caller) = {depth, frame.where};
        skipped = seen & kShared ? kWrapper | kShared : 0;
      }
      if (!skipped && (!deep || result.seen & (kForward | kOptimizer))) break;
    }
    finished(frame);
    if (numbered) result.site = site_of(named, caller, marks.of(up_to_site, first), site, result);
    return result;
  }

 private:
  static constexpr uint32_t kUnknown = 0xffffffff;

  struct Entry {
    uint64_t where = 0;
    uint16_t kind = 0;
    uint32_t site = kUnknown;
  };

  // A frame: its depth (0: innermost; -1: none) and its instruction.
  struct Place {
    int depth = -1;
    uint64_t where = 0;
  };

  Entry& at(uint64_t where) { return entries_[where * 0x9E3779B97F4A7C15ULL >> 54]; }

  template <typename Kind>
  [[gnu::always_inline]] uint16_t kind_of(const Frame& frame, int depth, Kind look_up, CallSite& result) {
    const Entry& known = at(frame.where);
    if (known.where == frame.where) return known.kind;
    const int64_t kind = look_up(depth);
    result.failed |= kind < 0;
    if (kind < 0) return 0;
    at(frame.where) = {frame.where, static_cast<uint16_t>(kind), kUnknown};
    return static_cast<uint16_t>(kind);
  }

  template <typename Site>
  uint32_t site_of(Place named, Place caller, uint32_t purpose, Site look_up, CallSite& result) {
    // The highest bit distinguishes pairs of instructions from single ones.
    const uint64_t pair = (named.where ^ caller.where * 0x9E3779B97F4A7C15ULL) | 1ULL << 63;
    const uint64_t key = caller.depth < 0 ? named.where : pair;
    if (purpose != kNoPurpose) {  // many of a few lines, which would displace each other in `entries_`
      const uint64_t with_purpose = key ^ purpose * 0xD6E8FEB86659FD93ULL;
      const auto known = with_purpose_.find(with_purpose);
      if (known != with_purpose_.end()) return known->second;
      const int64_t site = look_up(named.depth, caller.depth, purpose);
      result.failed |= site < 0;
      if (site < 0) return 0;
      return with_purpose_[with_purpose] = static_cast<uint32_t>(site);
    }
    const Entry& known = at(key);
    if (known.where == key && known.site != kUnknown) return known.site;
    const int64_t site = look_up(named.depth, caller.depth, purpose);
    result.failed |= site < 0;
    if (site < 0) return 0;
    Entry& entry = at(key);
    if (caller.depth >= 0) entry = {key, 0, static_cast<uint32_t>(site)};
    else if (entry.where == key) entry.site = static_cast<uint32_t>(site);
    return static_cast<uint32_t>(site);
  }

  std::array<Entry, 1024> entries_{};
  std::unordered_map<uint64_t, uint32_t> with_purpose_;  // rows of call sites by instruction and purpose
};

}  // namespace commtrace
