// Call sites, found as in hooks/call_site.py. The properties of a frame, and the row of its line, are looked up in
// Python once per instruction and cached. Independent of torch.
#pragma once

#include <cstddef>
#include <vector>

#include "frames.h"

namespace commtrace {

// The row of a call site, and the properties of the frames that were walked.
struct CallSite {
  uint32_t site = 0;
  uint16_t seen = 0;
  bool failed = false;  // a lookup failed
};

// Purposes that are found here, the numbers of hooks/purposes.py. 0: the thread has no mark.
enum Purpose : uint32_t { kNoPurpose, kObjectsExchanged, kGradientsReduced, kUsedParameters, kRecomputed, kActivations };

// What a thread's hooks, and the call itself, say of its purpose.
struct Marks {
  uint32_t purpose = kNoPurpose;
  uint32_t reducer = kNoPurpose;  // if C++ code makes the call within autograd
  bool in_backward = false;       // whether autograd runs in this thread

  // `function`: of the functions that run; `seen`: by all frames up to the call site; `first`: by the innermost one that
  // is not torch's dispatch.
  uint32_t of(uint32_t function, uint16_t seen, uint16_t first) const {
    if (purpose) return purpose;
    return function ? function : seen & kObject ? kObjectsExchanged : first & kBackward ? reducer : kNoPurpose;
  }
};

// The purpose of the functions that run, from the innermost frame to the outermost, if no mark claims the call.
class FunctionPurpose {
 public:
  FunctionPurpose(bool sought, bool in_backward) : sought_(sought), in_backward_(in_backward) {}

  // Whether a frame further out may change the purpose.
  bool sought() const { return sought_; }
  uint32_t purpose() const { return purpose_; }

  void see(uint32_t properties) {
    const uint32_t purpose = properties >> kPurposeShift;
    if (purpose == kRecomputed) {
      if (purpose_ == kNoPurpose || purpose_ == kActivations) purpose_ = purpose;
      sought_ = false;
      return;
    }
    if (purpose != kNoPurpose && !in_module_) purpose_ = purpose;  // a `backward` may call the `forward` of its function
    in_module_ |= (properties & (kForward | kOptimizer)) != 0;
    sought_ = !(properties & kBackward) && (in_backward_ || !in_module_);
  }

 private:
  bool sought_, in_backward_, in_module_ = false;
  uint32_t purpose_ = kNoPurpose;
};

// Numbers by keys, which are never 0. Exact: where keys displaced each other, each step would look some up in Python.
class NumberTable {
 public:
  // Returns the number of a key; null if it has none.
  const uint32_t* find(uint64_t key) const {
    const Entry& entry = entries_[place(key)];
    return entry.key == key ? &entry.number : nullptr;
  }

  // Adds a key, or replaces its number: a lookup in Python may have run a finalizer that communicates, too.
  uint32_t add(uint64_t key, uint32_t number) {
    if (used_ == kMost) clear();  // a program that creates code at run time
    if (2 * ++used_ > entries_.size()) grow();
    entries_[place(key)] = {key, number};
    return number;
  }

  void clear() {
    entries_.assign(kLeast, {});
    used_ = 0;
  }

 private:
  struct Entry {
    uint64_t key = 0;
    uint32_t number = 0;
  };

  // Returns where a key is or belongs: linear probing, half of the entries at most are in use.
  size_t place(uint64_t key) const {
    const size_t mask = entries_.size() - 1;
    size_t at = key * 0x9E3779B97F4A7C15ULL >> 32 & mask;
    while (entries_[at].key != key && entries_[at].key != 0) at = (at + 1) & mask;
    return at;
  }

  void grow() {
    std::vector<Entry> before(2 * entries_.size());
    entries_.swap(before);
    for (const Entry& entry : before)
      if (entry.key != 0) entries_[place(entry.key)] = entry;
  }

  static constexpr size_t kLeast = 256, kMost = 1 << 16;  // powers of two

  std::vector<Entry> entries_{kLeast};
  size_t used_ = 0;
};

// Results of lookups in Python, by instruction. Clear it when code objects are released: addresses may be reused.
class SiteCache {
 public:
  void clear() {
    kinds_.clear();
    sites_.clear();
  }

  // Finds the call site of the running call, as CallSites.find does in Python; its row only if `numbered`.
  // `kind(depth)` and `site(depth, depth of the caller or -1, purpose)` call Python; a negative result means failure.
  // `functions`: whether functions may have purposes; those that call MPI have none.
  template <bool functions = true, typename Kind, typename Site>
  CallSite find(bool deep, bool numbered, Marks marks, Kind kind, Site site) {
    CallSite result;
    Frame frame;
    if (!innermost(frame)) return result;
    int depth = 0;
    Place named{0, frame.where}, caller;
    uint16_t skipped = kWrapper;  // skip frames with these properties; 0: all places are found
    uint16_t first = kDispatch, up_to_site = 0;
    FunctionPurpose function(numbered && functions && !marks.purpose, marks.in_backward);
    for (bool more = true; more; more = outer(frame), depth++) {
      const uint32_t properties = kind_of(frame, depth, kind, result);
      const auto seen = static_cast<uint16_t>(properties);
      result.seen |= seen;
      if (function.sought()) function.see(properties);
      if (first & kDispatch) first = seen;
      if (skipped) up_to_site = result.seen;
      if (skipped && !(seen & skipped)) {
        (skipped == kWrapper ? named : caller) = {depth, frame.where};
        skipped = seen & kShared ? kWrapper | kShared : 0;
      }
      if (!skipped && !function.sought() && (!deep || result.seen & (kForward | kOptimizer))) break;
    }
    finished(frame);
    if (numbered) result.site = site_of(named, caller, marks.of(function.purpose(), up_to_site, first), site, result);
    return result;
  }

  // Calls `visit(frame, properties)` for each frame of the thread, the innermost first, until it returns false. Returns
  // whether all properties are known.
  template <typename Kind, typename Visit>
  bool each_frame(Kind kind, Visit visit) {
    CallSite walk;
    Frame frame;
    int depth = 0;
    bool more = innermost(frame);
    while (more && visit(frame, kind_of(frame, depth++, kind, walk))) more = outer(frame);
    finished(frame);
    return !walk.failed;
  }

 private:
  // A frame: its depth (0: innermost; -1: none) and its instruction.
  struct Place {
    int depth = -1;
    uint64_t where = 0;
  };

  template <typename Kind>
  [[gnu::always_inline]] uint32_t kind_of(const Frame& frame, int depth, Kind look_up, CallSite& result) {
    if (const uint32_t* known = kinds_.find(frame.where)) return *known;
    const int64_t kind = look_up(depth);
    result.failed |= kind < 0;
    return kind < 0 ? 0 : kinds_.add(frame.where, static_cast<uint32_t>(kind));
  }

  template <typename Site>
  uint32_t site_of(Place named, Place caller, uint32_t purpose, Site look_up, CallSite& result) {
    const uint64_t key = named.where ^ caller.where * 0x9E3779B97F4A7C15ULL ^ purpose * 0xD6E8FEB86659FD93ULL;
    if (const uint32_t* known = sites_.find(key)) return *known;
    const int64_t site = look_up(named.depth, caller.depth, purpose);
    result.failed |= site < 0;
    return site < 0 ? 0 : sites_.add(key, static_cast<uint32_t>(site));
  }

  NumberTable kinds_;  // properties of frames by instruction, and above them the purposes of their functions
  NumberTable sites_;  // rows of call sites by instruction, the caller's instruction and purpose
};

}  // namespace commtrace
