// The records of a ring, and which thread may write to which of them. Knows neither torch nor Python, so that a small
// program can put it under a thread sanitizer (tests/support/native_programs/slots_race.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

namespace commtrace {

// As commtrace.schema.RECORD.
struct Record {
  int64_t t_begin, t_return, t_wait, t_start, t_end, payload, local;
  uint32_t seq, group, site;
  int32_t step, micro_batch, peer, tag;
  uint32_t batch;
  uint16_t kind, thread;
  uint8_t phase, clock, flags, state;
};
static_assert(sizeof(Record) == 96, "the format of docs/reference/log-format.md");

// Offset of each field, for `layout()` of both libraries: Python compares it with commtrace.schema.RECORD on loading.
struct Field {
  const char* name;
  size_t offset;
};
#define FIELD(name) Field{#name, offsetof(Record, name)}
inline constexpr Field kLayout[] = {
    FIELD(t_begin), FIELD(t_return), FIELD(t_wait), FIELD(t_start), FIELD(t_end),       FIELD(payload), FIELD(local),
    FIELD(seq),     FIELD(group),    FIELD(site),   FIELD(step),    FIELD(micro_batch), FIELD(peer),    FIELD(tag),
    FIELD(batch),   FIELD(kind),     FIELD(thread), FIELD(phase),   FIELD(clock),       FIELD(flags),   FIELD(state)};
#undef FIELD

enum State : uint8_t { kFree, kBegun, kReturned, kComplete, kUnobservable, kFailed };
enum Phase : int { kUnmarked = -1, kOther = 0, kInit, kForwardPhase, kBackwardPhase, kOptimizerPhase };
enum Flag : uint8_t { kAsync = 1, kCoalesced = 2, kCaptured = 4, kObjects = 8, kSparse = 16, kUneven = 64 };
enum Clock : uint8_t { kNobody, kReturn, kWait, kFuture, kDevice, kTest, kDeviceWait };

inline int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// One call's claim to a slot: its number (24 bits) and how often the slot had changed hands. Eight bytes, so that a
// completion callback that carries it needs no memory of its own.
struct Handle {
  uint64_t bits = kNone;
  static constexpr uint64_t kNone = ~0ULL;
  uint32_t slot() const { return bits & 0xffffff; }
  uint64_t turn() const { return bits >> 24; }
  explicit operator bool() const { return bits != kNone; }
};

// Held for a few stores, never while anything is waited for.
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

// The slots of one ring. A call takes a slot and keeps a Handle; the drain thread gives the slot to somebody else, and
// from then on the Handle opens nothing: a completion that comes late, or after the log was closed, cannot write into
// another call's record or into memory that is no ring any more. Never freed, because callbacks may come at any time; but
// opened again, for another ring of the same size, with turns that go on.
class Slots {
 public:
  explicit Slots(uint32_t capacity) : capacity_(capacity) {
    turns_ = std::make_unique<std::atomic<uint64_t>[]>(capacity);
    next_ = std::make_unique<std::atomic<uint32_t>[]>(capacity);
    for (uint32_t i = 0; i < capacity; i++) {
      turns_[i].store(0, std::memory_order_relaxed);
      held_.push_back(capacity - 1 - i);
    }
  }

  // The slots of this memory may be taken; but for one that a thread took before the last log was closed and has yet to
  // give back. `log` tells this opening from others: such a thread must not write into it.
  void open(void* records, uint64_t* dropped, uint64_t log) {
    records_ = static_cast<Record*>(records);
    dropped_ = dropped;
    log_.store(log);
    closed_.store(false);
    for (uint32_t slot : held_) give(slot);
    held_.clear();
  }

  uint32_t capacity() const { return capacity_; }
  int64_t free() const { return free_.load(std::memory_order_relaxed); }

  uint32_t take() {
    int64_t left = 0;
    return take(left);
  }

  // A slot for anybody, kEmpty where there is none; `left`: how many there are besides. Of the threads that take slots at
  // the same time each is told another number.
  uint32_t take(int64_t& left) {
    uint64_t head = head_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t slot = head & 0xffffffff;
      if (slot == kEmpty) return kEmpty;
      // The upper half counts, so that a head that came back meanwhile (ABA) is seen to be another one.
      const uint64_t next = ((head >> 32) + 1) << 32 | next_[slot].load(std::memory_order_relaxed);
      if (head_.compare_exchange_weak(head, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
        left = free_.fetch_sub(1, std::memory_order_relaxed) - 1;
        return slot;
      }
    }
  }

  // The slot that is likely to be taken next, kEmpty where none is left; its memory is fetched. The drain thread had it
  // last, so it is in another core's cache, and a call that had to wait for each part of it would take half as long again.
  uint32_t prefetch_next() const {
    const uint32_t slot = head_.load(std::memory_order_relaxed) & 0xffffffff;
    if (slot == kEmpty) return slot;
    const char* record = reinterpret_cast<const char*>(&records_[slot]);
    __builtin_prefetch(record, 1);
    __builtin_prefetch(record + sizeof(Record) - 1, 1);
    __builtin_prefetch(&turns_[slot], 1);
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

  // Writes the whole record of a slot that was taken; `record.state` goes last, as a process may be killed in between.
  // No Handle: the log is closed, or was so meanwhile.
  Handle begin(uint32_t slot, const Record& record, uint64_t log) {
    const uint64_t turn = lock(slot);
    if (closed_.load(std::memory_order_acquire) || log_.load(std::memory_order_relaxed) != log) {
      unlock(slot, turn);
      give(slot);
      return {};
    }
    Record& place = records_[slot];
    const uint8_t state = record.state;
    copy_all_but_state(place, record);
    publish(place, state);
    unlock(slot, turn + 1);
    return {(turn + 1) << 24 | slot};
  }

  // Calls `write(record)` if the slot is still this call's; whatever state it gives back is written last.
  template <typename Write>
  bool update(Handle handle, Write write) {
    if (!handle || gone_.load(std::memory_order_relaxed) || !lock_if(handle.slot(), handle.turn())) return false;
    Record& record = records_[handle.slot()];
    publish(record, write(record));
    unlock(handle.slot(), handle.turn());
    return true;
  }

  // Calls that found no place, counted in the ring itself, where recovery finds them, too. False: the log is closed.
  bool drop(uint64_t calls) {
    const uint64_t turn = lock(0);  // any slot's lock keeps the ring open
    const bool open = !closed_.load(std::memory_order_acquire);  // and what open() wrote before
    if (open) __atomic_fetch_add(dropped_, calls, __ATOMIC_RELAXED);
    unlock(0, turn);
    return open;
  }

  // Takes a slot in this state from its call, whose Handle opens nothing any more, and gives it another one.
  bool settle(uint32_t slot, uint8_t only_if, uint8_t state_then) {
    const uint64_t turn = lock(slot);
    const bool yes = state(slot) == only_if;
    if (yes) publish(records_[slot], state_then);
    unlock(slot, yes ? turn + 1 : turn);
    return yes;
  }

  // As it is now, for the log.
  void copy(uint32_t slot, Record& to) {
    const uint64_t turn = lock(slot);
    to = records_[slot];
    unlock(slot, turn);
  }

  // Its record is on disk: nobody's slot.
  void release(uint32_t slot) {
    const uint64_t turn = lock(slot);
    publish(records_[slot], kFree);
    unlock(slot, turn + 1);
    if (!closed_.load(std::memory_order_relaxed)) give(slot);
  }

  // No slot is given out from here on, and no Handle opens anything. When this comes back, no thread is writing.
  // Returns how many slots had been taken by calls that had not begun to write.
  uint32_t close() {
    closed_.store(true);
    for (uint32_t slot = take(); slot != kEmpty; slot = take()) held_.push_back(slot);
    for (uint32_t slot = 0; slot < capacity_; slot++) {
      const uint64_t turn = lock(slot);
      if (state(slot) != kFree) held_.push_back(slot);
      unlock(slot, turn + 1);
    }
    return capacity_ - static_cast<uint32_t>(held_.size());
  }

  bool gone() const { return gone_.load(std::memory_order_relaxed); }

  // In a forked child: the ring is the parent's. Other threads may have held locks, and are not here.
  void forked() {
    closed_.store(true);
    gone_.store(true);
  }

  uint8_t state(uint32_t slot) const { return __atomic_load_n(&records_[slot].state, __ATOMIC_ACQUIRE); }
  int64_t begun(uint32_t slot) const { return __atomic_load_n(&records_[slot].t_begin, __ATOMIC_RELAXED); }

  static constexpr uint32_t kEmpty = 0xffffffff;

 private:
  // A turn is a count in the upper bits and a lock in the lowest; it is held for a few stores.
  uint64_t lock(uint32_t slot) {
    for (int tries = 0;; tries++) {
      uint64_t word = turns_[slot].load(std::memory_order_relaxed) & ~1ULL;
      if (turns_[slot].compare_exchange_weak(word, word | 1, std::memory_order_acquire)) return word >> 1;
      if (tries > 64) std::this_thread::yield();
    }
  }

  bool lock_if(uint32_t slot, uint64_t turn) {
    for (int tries = 0;; tries++) {
      uint64_t word = turn << 1;
      if (turns_[slot].compare_exchange_weak(word, word | 1, std::memory_order_acquire)) return true;
      if ((word >> 1) != turn) return false;
      if (tries > 64) std::this_thread::yield();
    }
  }

  void unlock(uint32_t slot, uint64_t turn) { turns_[slot].store(turn << 1, std::memory_order_release); }

  static void publish(Record& record, uint8_t state) { __atomic_store_n(&record.state, state, __ATOMIC_RELEASE); }

  static void copy_all_but_state(Record& place, const Record& record) {
    __builtin_memcpy(&place, &record, offsetof(Record, state));
  }

  const uint32_t capacity_;
  Record* records_ = nullptr;
  uint64_t* dropped_ = nullptr;
  std::unique_ptr<std::atomic<uint64_t>[]> turns_;
  std::unique_ptr<std::atomic<uint32_t>[]> next_;
  std::vector<uint32_t> held_;  // what may not be taken while no log is open
  alignas(64) std::atomic<uint64_t> head_{kEmpty};
  alignas(64) std::atomic<int64_t> free_{0};
  std::atomic<uint64_t> log_{0};
  std::atomic<bool> closed_{true}, gone_{false};
};

}  // namespace commtrace
