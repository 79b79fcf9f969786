// The records of the calls that a wait ends, by the address of the Work or tensor storage that is waited for.
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

// A weak reference to a Work or to the storage of a tensor.
using Weak = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

inline Weak weak_reference(c10::intrusive_ptr_target* target) {
  return Weak::reclaim(c10::raw::intrusive_ptr::make_weak(target));
}

// A hash table with at most one entry per slot: recording a call allocates nothing, and an entry is removed with its slot.
//
// The key is an address. If only a wait shows the end, the entry holds a weak reference, which keeps the address from being
// reused. It also keeps a Work's tensors in memory, so it is dropped at the wait, or by the next drain after the Work died.
// Calls that end by a callback, or on a device, hold no reference: their entries are removed when another object is found
// at the address (`add`, `forget`).
class Waits {
 public:
  explicit Waits(uint32_t capacity) : entries_(std::make_unique<Entry[]>(capacity)) {}

  // Adds a call; `weak` if only a wait shows its end, `first` for the first of the calls that end with this object. Call it
  // within Slots::update, as the slot must still belong to the call.
  void add(const void* key, Handle handle, std::optional<Weak> weak, bool first = true) {
    Bucket& bucket = bucket_of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    if (first) unlink_stale(bucket, key);
    Entry& entry = entries_[handle.slot()];
    entry.key = key;
    entry.handle = handle;
    entry.weak = std::move(weak);
    entry.next = bucket.first;
    bucket.first = handle.slot();
    entry.listed.store(&bucket, std::memory_order_release);
  }

  // Removes the entries of an address, which now belongs to an object without a record.
  void forget(const void* key) {
    Bucket& bucket = bucket_of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    unlink_stale(bucket, key);
  }

  void prefetch(uint32_t slot) const { __builtin_prefetch(&entries_[slot], 1); }

  struct Call {
    Handle handle;
    bool by_wait;  // ends with the wait
  };
  using Calls = c10::SmallVector<Call, 4>;

  // Removes and returns the calls of `key`, for a wait: only the first of two waits for an object counts.
  Calls take(const void* key) {
    Calls calls;
    c10::SmallVector<Weak, 1> dropped;  // destroyed after the lock is released, as that may take long
    Bucket& bucket = bucket_of(key);
    std::lock_guard<SpinLock> held(bucket.lock);
    for (uint32_t* link = &bucket.first; *link != Slots::kEmpty;) {
      Entry& entry = entries_[*link];
      if (entry.key != key) {
        link = &entry.next;
        continue;
      }
      calls.push_back({entry.handle, entry.weak.has_value()});
      if (auto weak = unlink(entry, link)) dropped.push_back(std::move(*weak));
    }
    return calls;
  }

  void remove(uint32_t slot) { unlink_if(slot, [](const Entry&) { return true; }); }

  // Removes the slot's entry if the Work that should end its call has died. Returns whether it has.
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

  Bucket& bucket_of(const void* key) { return buckets_[(reinterpret_cast<uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ULL >> 54]; }

  // Removes entries of the object that had this address before.
  void unlink_stale(Bucket& bucket, const void* key) {
    for (uint32_t* link = &bucket.first; *link != Slots::kEmpty;) {
      Entry& entry = entries_[*link];
      if (entry.key == key && !entry.weak)
        unlink(entry, link);
      else
        link = &entry.next;
    }
  }

  static std::optional<Weak> unlink(Entry& entry, uint32_t* link) {
    *link = entry.next;
    auto weak = std::exchange(entry.weak, std::nullopt);
    entry.listed.store(nullptr, std::memory_order_release);  // last: the entry may be reused from here on
    return weak;
  }

  template <typename Test>
  bool unlink_if(uint32_t slot, Test test) {
    Entry& entry = entries_[slot];
    std::optional<Weak> dropped;  // destroyed after the lock is released
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
