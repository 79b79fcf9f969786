// Which records a wait is about: those of the Work, or of the tensor, that is waited for.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "slots.h"

namespace commtrace {

// A Work, or the storage of a tensor, that nobody is kept from letting go of.
using Weak = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

inline Weak weakly(c10::intrusive_ptr_target* target) {
  return Weak::reclaim(c10::raw::intrusive_ptr::make_weak(target));
}

// One entry per slot at most, so nothing is allocated on the way of a call, and an entry goes when its slot does.
//
// An entry's key is an address. Where only the wait shows the end, a weak reference keeps the address from being used
// again (and a Work's tensors in memory, so it is let go of at the wait, or by the next drain after the Work has died).
// Where the end comes by itself, and on a device, no reference is held: there a call is unlisted as soon as another object
// has the address (`add`, `forget`).
class Waits {
 public:
  explicit Waits(uint32_t capacity) : entries_(std::make_unique<Entry[]>(capacity)) {}

  // With `weak`, only a wait shows the end of this call. By whoever holds the call's slot (within Slots::update): the
  // entry of a slot that has become another call's must not be listed. `first`: of the calls that end with this object.
  void add(const void* key, Handle handle, std::optional<Weak> weak, bool first = true) {
    Bucket& bucket = of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    if (first) unlist_others(bucket, key);
    list(bucket, entries_[handle.slot()], key, handle, std::move(weak));
  }

  // A new object that no record is about has this address.
  void forget(const void* key) {
    Bucket& bucket = of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    unlist_others(bucket, key);
  }

  // This slot's entry is about to be used.
  void prefetch(uint32_t slot) const { __builtin_prefetch(&entries_[slot], 1); }

  struct Found {
    Handle handle;
    bool by_wait;
  };
  using AllFound = c10::SmallVector<Found, 4>;

  // The records that a wait for `key` is about, `by_wait` those that end with it. They are not asked for again: of two
  // waits for one object the first one counts.
  AllFound take(const void* key) {
    AllFound found;
    c10::SmallVector<Weak, 1> dropped;  // let go of after the lock: what dies with it may take its time
    Bucket& bucket = of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    for (uint32_t* link = &bucket.first; *link != Slots::kEmpty;) {
      Entry& entry = entries_[*link];
      if (entry.key != key) {
        link = &entry.next;
        continue;
      }
      found.push_back({entry.handle, entry.weak.has_value()});
      if (auto weak = unlink(entry, link)) dropped.push_back(std::move(*weak));
    }
    return found;
  }

  void remove(uint32_t slot) {
    unlink_if(slot, [](const Entry&) { return true; });
  }

  // Whether this slot's call was to end with a Work that has died; the entry goes then.
  bool died(uint32_t slot) {
    return unlink_if(slot, [](const Entry& entry) { return entry.weak && entry.weak->expired(); });
  }

 private:
  struct Bucket {
    SpinLock lock;
    uint32_t first = Slots::kEmpty;
  };

  struct Entry {
    const void* key = nullptr;
    Handle handle;
    std::optional<Weak> weak;
    uint32_t next = Slots::kEmpty;
    std::atomic<Bucket*> listed{nullptr};
  };

  Bucket& of(const void* key) { return buckets_[(reinterpret_cast<uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ULL >> 54]; }

  // A new object has this address: whoever had it before is gone.
  void unlist_others(Bucket& bucket, const void* key) {
    for (uint32_t* link = &bucket.first; *link != Slots::kEmpty;) {
      Entry& other = entries_[*link];
      if (other.key == key && !other.weak)
        unlink(other, link);
      else
        link = &other.next;
    }
  }

  static void list(Bucket& bucket, Entry& entry, const void* key, Handle handle, std::optional<Weak> weak) {
    entry.key = key;
    entry.handle = handle;
    entry.weak = std::move(weak);
    entry.next = bucket.first;
    bucket.first = handle.slot();
    entry.listed.store(&bucket, std::memory_order_release);
  }

  static std::optional<Weak> unlink(Entry& entry, uint32_t* link) {
    *link = entry.next;
    auto weak = std::exchange(entry.weak, std::nullopt);
    entry.listed.store(nullptr, std::memory_order_release);  // last: from here on the entry may be another call's
    return weak;
  }

  template <typename Test>
  bool unlink_if(uint32_t slot, Test test) {
    Entry& entry = entries_[slot];
    std::optional<Weak> dropped;  // after the lock
    Bucket* bucket = entry.listed.load(std::memory_order_acquire);
    if (bucket == nullptr) return false;
    std::lock_guard<SpinLock> held(bucket->lock);
    if (entry.listed.load(std::memory_order_relaxed) != bucket || !test(entry)) return false;
    uint32_t* link = &bucket->first;
    while (*link != slot) link = &entries_[*link].next;
    dropped = unlink(entry, link);
    return true;
  }

  std::unique_ptr<Entry[]> entries_;
  std::array<Bucket, 1024> buckets_;
};

}  // namespace commtrace
