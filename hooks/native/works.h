// Which records a wait is about: those of the Work, or of the tensor, that is waited for.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "slots.h"

namespace commtrace {

using WeakWork = c10::weak_intrusive_ptr<c10d::Work>;

// One entry per slot at most, so nothing is allocated on the way of a call, and an entry goes when its slot does.
//
// An entry's key is an address. Where only the wait shows the end, a weak reference keeps the address from being used
// again (and the Work's tensors in memory, so it is let go of at the wait, or by the next drain after the Work has died).
// Where the end comes by itself, and on a device, no reference is held: there a call is unlisted as soon as another object
// has the address (`add`, `add_batch`, `forget`).
class Waits {
 public:
  explicit Waits(uint32_t capacity) : entries_(std::make_unique<Entry[]>(capacity)) {}

  // With `by_wait` only a wait shows the end of this call.
  void add(const void* key, Handle handle, bool by_wait, std::optional<WeakWork> work = {}) {
    Bucket& bucket = of(key);
    Entry& entry = entries_[handle.slot()];
    Dropped dropped;
    std::lock_guard<std::mutex> held(bucket.mutex);
    if (work || !by_wait)  // a new object has this address: whoever had it before is gone
      unlink_if(bucket, dropped, [&](const Entry& other) { return other.key == key && !other.work; });
    list(bucket, entry, key, handle, by_wait, std::move(work));
  }

  // Several calls that end with one Work.
  void add_batch(const void* key, const std::vector<Handle>& handles, bool by_wait, const std::optional<WeakWork>& work) {
    Bucket& bucket = of(key);
    Dropped dropped;
    std::lock_guard<std::mutex> held(bucket.mutex);
    unlink_if(bucket, dropped, [&](const Entry& other) { return other.key == key && !other.work; });
    for (Handle handle : handles) list(bucket, entries_[handle.slot()], key, handle, by_wait, work);
  }

  struct Found {
    Handle handle;
    bool by_wait;
  };
  using AllFound = c10::SmallVector<Found, 4>;

  // The records that a wait for `key` is about. Those that end by themselves are not asked for again.
  AllFound begins(const void* key) {
    AllFound found;
    Dropped dropped;
    Bucket& bucket = of(key);
    std::lock_guard<std::mutex> held(bucket.mutex);
    unlink_if(bucket, dropped, [&](const Entry& entry) {
      if (entry.key == key) found.push_back({entry.handle, entry.by_wait});
      return entry.key == key && !entry.by_wait;
    });
    return found;
  }

  // A new object that no record is about has this address: whoever had it before is gone.
  void forget(const void* key) {
    Dropped dropped;
    Bucket& bucket = of(key);
    std::lock_guard<std::mutex> held(bucket.mutex);
    unlink_if(bucket, dropped, [&](const Entry& entry) { return entry.key == key && !entry.work; });
  }

  // The records that end with the end of a wait for `key`.
  AllFound ends(const void* key) {
    AllFound found;
    Dropped dropped;  // let go of after the lock: what dies with it may take its time
    Bucket& bucket = of(key);
    std::lock_guard<std::mutex> held(bucket.mutex);
    unlink_if(bucket, dropped, [&](const Entry& entry) {
      if (entry.key == key && entry.by_wait) found.push_back({entry.handle, true});
      return entry.key == key;
    });
    return found;
  }

  void remove(uint32_t slot) {
    Bucket* bucket = entries_[slot].listed.load(std::memory_order_acquire);
    if (bucket == nullptr) return;
    Dropped dropped;
    std::lock_guard<std::mutex> held(bucket->mutex);
    unlink_if(*bucket, dropped, [&](const Entry& entry) { return &entry == &entries_[slot]; });
  }

  // Whether this slot's call was to end with a Work that has died; the entry goes then.
  bool died(uint32_t slot) {
    Bucket* bucket = entries_[slot].listed.load(std::memory_order_acquire);
    if (bucket == nullptr) return false;
    Dropped dropped;
    std::lock_guard<std::mutex> held(bucket->mutex);
    unlink_if(*bucket, dropped, [&](const Entry& entry) {
      return &entry == &entries_[slot] && entry.work && entry.work->expired();
    });
    return !dropped.empty();
  }

 private:
  using Dropped = c10::SmallVector<WeakWork, 1>;

  struct Bucket {
    std::mutex mutex;
    uint32_t first = Slots::kEmpty;
  };

  struct Entry {
    const void* key = nullptr;
    Handle handle;
    bool by_wait = false;
    std::optional<WeakWork> work;
    uint32_t next = Slots::kEmpty;
    std::atomic<Bucket*> listed{nullptr};
  };

  Bucket& of(const void* key) { return buckets_[(reinterpret_cast<uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ULL >> 54]; }

  static void list(Bucket& bucket, Entry& entry, const void* key, Handle handle, bool by_wait,
                   std::optional<WeakWork> work) {
    entry.key = key;
    entry.handle = handle;
    entry.by_wait = by_wait;
    entry.work = std::move(work);
    entry.next = bucket.first;
    bucket.first = handle.slot();
    entry.listed.store(&bucket, std::memory_order_release);
  }

  template <typename Test>
  void unlink_if(Bucket& bucket, Dropped& dropped, Test test) {
    for (uint32_t* link = &bucket.first; *link != Slots::kEmpty;) {
      Entry& entry = entries_[*link];
      if (!test(entry)) {
        link = &entry.next;
        continue;
      }
      *link = entry.next;
      if (entry.work) dropped.push_back(*std::exchange(entry.work, {}));
      entry.listed.store(nullptr, std::memory_order_release);
    }
  }

  std::unique_ptr<Entry[]> entries_;
  std::array<Bucket, 1024> buckets_;
};

}  // namespace commtrace
