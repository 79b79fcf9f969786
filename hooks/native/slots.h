// The slots of a ring: allocation, and exclusive access to their records. Independent of torch and Python, so that it can
// be tested under a thread sanitizer (tests/support/native_programs/slots_race.cpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "record.h"

namespace commtrace {

// A call's reference to its slot: the slot number (24 bits) and the slot's generation, which distinguishes the successive
// calls in that slot. It has eight bytes, so that a completion callback can capture it without an allocation.
struct Handle {
  uint64_t bits = kNone;
  static constexpr uint64_t kNone = ~0ULL;
  uint32_t slot() const { return bits & 0xffffff; }
  uint64_t generation() const { return bits >> 24; }
  explicit operator bool() const { return bits != kNone; }
};

// Whether the cost of a call is measured, by its number: of the first 2^bits calls the one after `first`, and of as many
// further ones one at a varying position. At a fixed one, it would always be the same call in a program whose steps make a
// multiple of 2^bits calls.
template <uint32_t bits, uint32_t first>
bool in_sample(uint32_t number) {
  constexpr uint32_t kMask = (1U << bits) - 1, kGoldenRatio = 0x9E3779B1;
  const uint32_t position = ((number >> bits) * kGoldenRatio >> (32 - bits)) + first;
  return ((number ^ position) & kMask) == 0;
}

// Spin lock, only for critical sections of a few stores that never block.
class SpinLock {
 public:
  void lock() {
    for (int tries = 0; held_.test_and_set(std::memory_order_acquire); tries++)
      if (tries > 64) std::this_thread::yield();
  }

  void unlock() { held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag held_ = ATOMIC_FLAG_INIT;
};

// The slots of one ring. A call takes a slot and keeps a Handle. When the drain thread releases the slot, it increments
// the slot's generation, which invalidates the Handle: a late completion, or one after the log was closed, cannot write to
// another call's record or to unmapped memory. The object is never freed, because callbacks may run at any time. After
// close() it can be opened again for another ring of the same size; generations keep increasing.
class Slots {
 public:
  explicit Slots(uint32_t capacity) : capacity_(capacity) {
    generations_ = std::make_unique<std::atomic<uint64_t>[]>(capacity);
    next_ = std::make_unique<std::atomic<uint32_t>[]>(capacity);
    for (uint32_t i = 0; i < capacity; i++) {
      generations_[i].store(0, std::memory_order_relaxed);
      held_.push_back(capacity - 1 - i);
    }
  }

  // Makes the slots available, except those that a thread took before the last close() and has not given back. `log`
  // identifies this opening, so that such a thread does not write to the new ring.
  void open(void* records, uint64_t* dropped, uint64_t log) {
    records_ = static_cast<Record*>(records);
    dropped_ = dropped;
    log_.store(log);
    used_.store(0);
    closed_.store(false);
    std::sort(held_.begin(), held_.end(), std::greater<>());  // the lowest slot is given last, so it is taken first
    for (uint32_t slot : held_) give(slot);
    held_.clear();
  }

  uint32_t capacity() const { return capacity_; }
  int64_t free() const { return free_.load(std::memory_order_relaxed); }

  // Only slots below this number were taken since open(); the drain thread skips the others. The last slot given is the
  // first taken, and open() gives the lowest slots last, so the number stays close to the largest number of slots that
  // calls held at the same time.
  uint32_t used() const { return used_.load(std::memory_order_relaxed); }

  // Takes a free slot; kEmpty if there is none. `left` receives the number of slots still free, which differs between
  // threads that take slots concurrently.
  uint32_t take(int64_t* left = nullptr) {
    uint64_t head = head_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t slot = head & 0xffffffff;
      if (slot == kEmpty) return kEmpty;
      // The upper half is a counter against the ABA problem.
      const uint64_t next = ((head >> 32) + 1) << 32 | next_[slot].load(std::memory_order_relaxed);
      if (head_.compare_exchange_weak(head, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
        const int64_t before = free_.fetch_sub(1, std::memory_order_relaxed);
        uint32_t used = used_.load(std::memory_order_relaxed);
        while (slot >= used && !used_.compare_exchange_weak(used, slot + 1, std::memory_order_relaxed)) {
        }
        if (left != nullptr) *left = before - 1;
        return slot;
      }
    }
  }

  // Prefetches the slot that is likely to be taken next and returns it; kEmpty if there is none. The drain thread wrote to
  // it last, so it is in another core's cache; without the prefetch a call takes half as long again.
  uint32_t prefetch_next() const {
    const uint32_t slot = head_.load(std::memory_order_relaxed) & 0xffffffff;
    if (slot == kEmpty) return slot;
    const char* record = reinterpret_cast<const char*>(&records_[slot]);
    __builtin_prefetch(record, 1);
    __builtin_prefetch(record + sizeof(Record) - 1, 1);
    __builtin_prefetch(&generations_[slot], 1);
    __builtin_prefetch(&next_[slot], 1);
    return slot;
  }

  void give(uint32_t slot) {
    uint64_t head = head_.load(std::memory_order_relaxed);
    for (;;) {
      next_[slot].store(head & 0xffffffff, std::memory_order_relaxed);
      const uint64_t next = ((head >> 32) + 1) << 32 | slot;
      if (head_.compare_exchange_weak(head, next, std::memory_order_acq_rel, std::memory_order_relaxed)) break;
    }
    free_.fetch_add(1, std::memory_order_relaxed);
  }

  // Writes the record of a slot that was taken; the state last, because the process may be killed in between. Returns
  // an empty Handle if the log is closed or another one was opened.
  Handle begin(uint32_t slot, const Record& record, uint64_t log) {
    const uint64_t generation = lock(slot);
    if (closed_.load(std::memory_order_acquire) || log_.load(std::memory_order_relaxed) != log) {
      unlock(slot, generation);
      give(slot);
      return {};
    }
    Record& place = records_[slot];
    __builtin_memcpy(&place, &record, offsetof(Record, state));
    publish(place, record.state);
    unlock(slot, generation + 1);
    return {(generation + 1) << 24 | slot};
  }

  // Calls `write(record)` if the Handle is valid, then writes the state that it returned.
  template <typename Write>
  bool update(Handle handle, Write write) {
    if (!handle || detached() || !lock_if(handle.slot(), handle.generation())) return false;
    Record& record = records_[handle.slot()];
    publish(record, write(record));
    unlock(handle.slot(), handle.generation());
    return true;
  }

  // Changes the state of a call that returned and whose end is not recorded yet.
  void finish(Handle handle, State new_state) {
    update(handle, [=](Record& record) -> uint8_t { return record.state == kReturned ? new_state : record.state; });
  }

  // Counts calls that found no free slot. The count is in the ring itself, so that recovery can read it. Returns false if
  // the log is closed.
  bool drop(uint64_t calls) {
    const uint64_t generation = lock(0);  // close() waits for the lock of every slot
    const bool open = !closed_.load(std::memory_order_acquire);  // acquires what open() wrote
    if (open) __atomic_fetch_add(dropped_, calls, __ATOMIC_RELAXED);
    unlock(0, generation);
    return open;
  }

  // Changes the state of a slot from `expected` to `new_state` and invalidates its Handle. Returns false, and changes
  // nothing, if the slot is in another state.
  bool settle(uint32_t slot, uint8_t expected, uint8_t new_state) {
    const uint64_t generation = lock(slot);
    const bool matches = state(slot) == expected;
    if (matches) publish(records_[slot], new_state);
    unlock(slot, matches ? generation + 1 : generation);
    return matches;
  }

  void copy(uint32_t slot, Record& to) {
    const uint64_t generation = lock(slot);
    to = records_[slot];
    unlock(slot, generation);
  }

  // Frees a slot whose record is no longer needed.
  void release(uint32_t slot) {
    const uint64_t generation = lock(slot);
    publish(records_[slot], kFree);
    unlock(slot, generation + 1);
    if (!closed_.load(std::memory_order_relaxed)) give(slot);
  }

  // Takes all free slots and invalidates all Handles; when it returns, no thread is writing. Returns the number of slots
  // that calls had taken but not yet written to.
  uint32_t close() {
    closed_.store(true);
    for (uint32_t slot = take(); slot != kEmpty; slot = take()) held_.push_back(slot);
    for (uint32_t slot = 0; slot < capacity_; slot++) {
      const uint64_t generation = lock(slot);
      if (state(slot) != kFree) held_.push_back(slot);
      unlock(slot, generation + 1);
    }
    return capacity_ - static_cast<uint32_t>(held_.size());
  }

  bool detached() const { return detached_.load(std::memory_order_relaxed); }

  // Detaches a forked child from the parent's ring. Takes no locks: threads of the parent may have held them.
  void forked() {
    closed_.store(true);
    detached_.store(true);
  }

  uint8_t state(uint32_t slot) const { return __atomic_load_n(&records_[slot].state, __ATOMIC_ACQUIRE); }
  int64_t begin_time(uint32_t slot) const { return __atomic_load_n(&records_[slot].t_begin, __ATOMIC_RELAXED); }

  static constexpr uint32_t kEmpty = 0xffffffff;

 private:
  // Each word of `generations_` is a generation and, in the lowest bit, a spin lock. Returns the generation.
  uint64_t lock(uint32_t slot) {
    for (;;) {
      const uint64_t generation = generations_[slot].load(std::memory_order_relaxed) >> 1;
      if (lock_if(slot, generation)) return generation;
    }
  }

  // Returns false if the slot has another generation.
  bool lock_if(uint32_t slot, uint64_t generation) {
    for (int tries = 0;; tries++) {
      uint64_t word = generation << 1;
      if (generations_[slot].compare_exchange_weak(word, word | 1, std::memory_order_acquire)) return true;
      if ((word >> 1) != generation) return false;
      if (tries > 64) std::this_thread::yield();
    }
  }

  void unlock(uint32_t slot, uint64_t generation) {
    generations_[slot].store(generation << 1, std::memory_order_release);
  }

  static void publish(Record& record, uint8_t state) { __atomic_store_n(&record.state, state, __ATOMIC_RELEASE); }

  const uint32_t capacity_;
  Record* records_ = nullptr;
  uint64_t* dropped_ = nullptr;
  std::unique_ptr<std::atomic<uint64_t>[]> generations_;
  std::unique_ptr<std::atomic<uint32_t>[]> next_;
  std::vector<uint32_t> held_;  // slots that become free with the next open()
  alignas(64) std::atomic<uint64_t> head_{kEmpty};
  alignas(64) std::atomic<int64_t> free_{0};
  std::atomic<uint32_t> used_{0};
  std::atomic<uint64_t> log_{0};
  std::atomic<bool> closed_{true}, detached_{false};
};

}  // namespace commtrace
