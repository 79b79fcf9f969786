// The state of one recording, from the first call until the log is closed. A Recording is never freed, because completions
// may come at any time; a closed one is reused for the next log.
#pragma once

#include <c10/core/GradMode.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>

#include "callsites.h"
#include "device.h"
#include "plan.h"
#include "progress.h"
#include "python.h"
#include "slots.h"
#include "works.h"

namespace commtrace {

// A thread's cache of call sites.
struct ThreadSites {
  SiteCache sites;
  uint64_t epoch = 0;

  void renew(uint64_t current) {
    if (epoch == current) return;
    sites.clear();
    epoch = current;
  }
};

// What the frames of a call in a model show.
struct Caller {
  py::object module;                         // the innermost one that is being called; null: none
  c10::SmallVector<py::object, 2> contexts;  // of autograd functions within it
  bool repeats = false;                      // a forward pass is repeated in a backward pass
  bool optimizes = false;                    // an optimizer steps
  bool known = false;                        // all frames could be looked up
};

// Call sites of one recording.
class CallSites {
 public:
  explicit CallSites(const PythonRows& rows) : rows_(rows) {}

  // `cache`: the calling thread's; null if it has none yet.
  CallSite find(bool deep, bool numbered, Marks marks, ThreadSites*& cache) {
    std::optional<py::gil_scoped_acquire> gil;
    if (frames_need_gil()) gil.emplace();
    return renewed(cache).find(
        deep, numbered, marks, [&](int depth) { return classify(depth, *cache); },
        [&](int depth, int caller, uint32_t purpose) { return number(depth, caller, purpose); });
  }

  // Returns the modules that are being called, the innermost first. Needs the GIL.
  py::list modules(ThreadSites*& cache) {
    py::list called;
    renewed(cache).each_frame([&](int depth) { return classify(depth, *cache); },
                              [&](const Frame& frame, uint32_t properties) {
                                if (!(properties & kForward)) return true;
                                const auto module = py::reinterpret_steal<py::object>(first_argument(frame));
                                if (module) called.append(module);
                                return true;
                              });
    return called;
  }

  // Same as _Caller of hooks/torch/redistribution.py. Needs the GIL.
  Caller caller(ThreadSites*& cache, bool in_backward) {
    Caller found;
    found.known = renewed(cache).each_frame(
        [&](int depth) { return classify(depth, *cache); },
        [&](const Frame& frame, uint32_t properties) {
          if (!found.module && properties & (kForward | kContext)) {
            auto argument = py::reinterpret_steal<py::object>(first_argument(frame));
            if (properties & kForward) found.module = std::move(argument);
            else if (argument) found.contexts.push_back(std::move(argument));
          }
          found.repeats |= in_backward && properties >> kPurposeShift == kRecomputed;
          found.optimizes |= (properties & kOptimizer) != 0;
          return in_backward ? !(properties & kBackward) : !found.module;
        });
    return found;
  }

  // Invalidates the caches of all threads: row numbers have changed, or code objects are no longer kept alive.
  void forget() { epoch_.store(next_epoch()); }

 private:
  static ThreadSites& cache_of_thread();

  SiteCache& renewed(ThreadSites*& cache) const {
    if (cache == nullptr) cache = &cache_of_thread();
    cache->renew(epoch_.load(std::memory_order_acquire));
    return cache->sites;
  }

  // Returns the properties of the frame at this depth; -1: there is no result.
  int64_t classify(int depth, ThreadSites& cache) const {
    const int64_t kind = rows_.look_up(int64_t{-1}, [&](const py::object& rows) -> int64_t {
      const auto frame = py::reinterpret_steal<py::object>(frame_object(depth));
      return frame ? rows.attr("classify")(frame).cast<int64_t>() : -1;
    });
    cache.renew(epoch_.load(std::memory_order_acquire));  // Python may have released code objects
    return kind;
  }

  // Returns the row of a call site, given by the depth of its frame and of its caller's (-1: none), and a purpose.
  int64_t number(int depth, int caller, uint32_t purpose) const {
    return rows_.look_up(int64_t{-1}, [&](const py::object& rows) -> int64_t {
      const auto frame = py::reinterpret_steal<py::object>(frame_object(depth));
      if (!frame) return -1;
      const py::object outer = caller < 0 ? py::none() : py::reinterpret_steal<py::object>(frame_object(caller));
      return rows.attr("site")(frame, outer, purpose).cast<int64_t>();
    });
  }

  static uint64_t next_epoch() {
    static std::atomic<uint64_t> epochs{0};
    return ++epochs;
  }

  const PythonRows& rows_;
  std::atomic<uint64_t> epoch_{next_epoch()};
};

struct Group {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> pg{c10::intrusive_ptr<c10d::ProcessGroup>()};
  uint32_t number = 0;
  int size = 1, rank = 0;
  std::vector<int> ranks;
  std::atomic<uint32_t> collectives{0};
  std::atomic<uint32_t> batch{0};  // number of the open batch; 0: none

  // A bit for each operator. Futureless: its Works have no usable future. Trusted: their futures complete with them.
  std::atomic<uint64_t> futureless{0}, trusted{0};
  std::atomic<uint32_t> doubts{0};

  std::mutex mutex;  // guards the following members
  std::map<std::tuple<int, int, int>, uint32_t> messages;
  std::vector<Handle> batched;
  bool batch_on_host = false;
  DeviceStart batch_on_device;

  int global_rank(int64_t rank_) const {
    return rank_ >= 0 && rank_ < static_cast<int64_t>(ranks.size()) ? ranks[rank_] : -1;
  }

  uint32_t message(int source, int destination, int tag) {
    std::lock_guard<std::mutex> held(mutex);
    return messages[{source, destination, tag}]++;
  }
};

// Errors and costs of calls, collected by the drain thread.
struct Tally {
  struct Sample {
    int64_t ns : 63;
    bool first : 1;
  };

  std::atomic<uint64_t> errors{0}, samples{0}, first_calls{0};
  std::atomic<uint64_t> unrecorded{0};  // calls without a record because of an error
  std::atomic<int64_t> first_ns{0};
  std::array<std::atomic<Sample>, 1024> costs{};
  std::mutex mutex;
  std::string first_error;

  void sample(int64_t ns, bool first) {
    costs[samples.fetch_add(1) % costs.size()].store({ns, first}, std::memory_order_relaxed);
  }

  void first_call(int64_t ns) {
    first_calls.fetch_add(1, std::memory_order_relaxed);
    first_ns.fetch_add(ns, std::memory_order_relaxed);
  }

  void count_fault(const char* what) {
    errors.fetch_add(1);
    std::lock_guard<std::mutex> held(mutex);
    if (first_error.empty()) first_error = what;
  }
};

class Recording {
 public:
  explicit Recording(uint32_t capacity) : slots(capacity), waits(capacity), devices(slots), callsites(rows) {}

  // Needs the GIL. `ring` points to memory with the layout of commtrace.recording.ring.
  void open(char* ring, size_t alive_at, size_t dropped_at, size_t records_at, bool sites, bool device_times,
            Progress* cells) {
    for (auto& kind : kinds_) kind.store(0, std::memory_order_relaxed);
    sites_wanted = sites;
    devices.open(device_times);
    progress = cells;
    threads = 0;
    batches = 0;
    tally.unrecorded.store(0);
    log.store(next_log());
    alive_ = reinterpret_cast<int64_t*>(ring + alive_at);
    woken_.store(0);  // the last recording may have ended by a wake
    slots.open(ring + records_at, reinterpret_cast<uint64_t*>(ring + dropped_at), log.load());
  }

  // ---- row numbers, looked up in Python once -------------------------------------------------------------------------

  Group* group(c10d::ProcessGroup* pg) {
    {
      std::shared_lock<std::shared_mutex> held(groups_mutex_);
      const auto known = groups_.find(pg);
      if (known != groups_.end()) return known->second;
    }
    return rows.look_up(static_cast<Group*>(nullptr), [&](const py::object& python_rows) -> Group* {
      const auto shared = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(pg);
      const py::object row = python_rows.attr("group")(shared);
      return row.is_none() || !rows.current(python_rows) ? nullptr : add_group(shared, row);
    });
  }

  uint16_t kind(const Plan& plan, int dtype, int reduce_op) {
    std::atomic<uint16_t>& known = kinds_[(plan.number * kTypes + dtype + 1) * kReduceOps + reduce_op + 1];
    if (const uint16_t number = known.load(std::memory_order_relaxed)) return number;
    return rows.look_up(uint16_t{0}, [&](const py::object& python_rows) {
      const py::object type = dtype < 0 ? py::object(py::none()) : py::cast(static_cast<c10::ScalarType>(dtype));
      const auto number = python_rows.attr("kind")(plan.number, type, reduce_op).cast<uint16_t>();
      if (rows.current(python_rows)) known.store(number, std::memory_order_relaxed);
      return number;
    });
  }

  uint32_t site_of_backward(int task, uint32_t purpose);

  // Whether the running forward pass belongs to training. `cache`: the calling thread's call sites.
  bool trains(ThreadSites*& cache) {
    return c10::GradMode::is_enabled() || rows.call(false, [&](const py::object& python_rows) {
      return python_rows.attr("in_training")(callsites.modules(cache)).cast<bool>();
    });
  }

  // ---- records -------------------------------------------------------------------------------------------------------

  Handle begin(const Record& record, uint64_t log_of_thread) {
    int64_t left = 0;
    const uint32_t slot = slots.take(&left);
    if (slot == Slots::kEmpty) {
      slots.drop(1);
      return {};
    }
    if (left == slots.capacity() / 2) wake();
    const uint32_t next = slots.prefetch_next();
    if (next != Slots::kEmpty) waits.prefetch(next);
    return slots.begin(slot, record, log_of_thread);
  }

  void ended(Handle handle, int64_t t_end, Clock clock, State state = kComplete) {
    slots.update(handle, [=](Record& record) -> uint8_t {
      if (record.state != kReturned) return record.state;
      if (state == kComplete) {
        record.t_end = t_end;
        record.clock = clock;
      }
      return state;
    });
  }

  // Records the beginning of a wait for `key` and returns the calls that it waits for.
  Waits::Calls wait_begins(const void* key, int64_t t_wait) {
    auto calls = waits.take(key);
    for (const auto& call : calls)
      slots.update(call.handle, [=](Record& record) { return record.t_wait = t_wait, record.state; });
    return calls;
  }

  void unobservable(Handle handle) { slots.finish(handle, kUnobservable); }

  // ---- called by the drain thread ------------------------------------------------------------------------------------

  // Blocks until wake() is called or the time is over. What must not wait for the interpreter's lock, or as long as until
  // the next write to the log, is done meanwhile: the ring shows that the process is alive, dead Works free their
  // tensors, and times on devices are read.
  void wait(double seconds) {
    const int64_t until = now() + static_cast<int64_t>(seconds * 1e9);
    for (int64_t time = now(); woken_.load() == 0 && time < until; time = now()) {
      __atomic_store_n(alive_, time, __ATOMIC_RELAXED);
      for (uint32_t slot = 0; slot < slots.used(); slot++) drop_if_dead(slot);
      devices.resolve();
      sleep_until(std::min(until, time + kTick));
    }
    woken_.store(0);  // several calls of wake() count as one
  }

  void wake() {
    if (woken_.exchange(1) == 0) futex(FUTEX_WAKE_PRIVATE, 1, nullptr, 0);
  }

  // Returns the slots with final records. If free slots run short, gives up the ends of the oldest returned calls, as
  // Slots.finished does in Python.
  std::vector<uint32_t> finished() {
    std::vector<uint32_t> final_slots;
    std::vector<std::pair<int64_t, uint32_t>> waiting;
    for (uint32_t slot = 0; slot < slots.used(); slot++) {
      drop_if_dead(slot);
      const uint8_t state = slots.state(slot);
      if (state >= kComplete)
        final_slots.push_back(slot);
      else if (state == kReturned)
        waiting.emplace_back(slots.begin_time(slot), slot);
    }
    const size_t quarter = std::max<size_t>(1, slots.capacity() / 4);
    if (static_cast<size_t>(slots.free()) + final_slots.size() >= quarter) return final_slots;
    std::sort(waiting.begin(), waiting.end());
    for (const auto& [begin_time, slot] : waiting) {
      if (final_slots.size() >= 2 * quarter) break;
      if (slots.settle(slot, kReturned, kReturned)) final_slots.push_back(slot);
    }
    return final_slots;
  }

  void release(uint32_t slot) {
    waits.remove(slot);
    slots.release(slot);
  }

  // Returns the slots with records, and the number of slots that calls had taken but not yet written to.
  std::pair<std::vector<uint32_t>, uint32_t> close() {
    std::vector<uint32_t> recorded;
    const uint32_t unwritten = slots.close();
    devices.close();
    for (uint32_t slot = 0; slot < slots.capacity(); slot++) {
      drop_if_dead(slot);
      if (slots.state(slot) != kFree) recorded.push_back(slot);
    }
    return {recorded, unwritten};
  }

  // Releases memory and references after close(). Needs the GIL.
  void forget() {
    rows.close();
    callsites.forget();
    std::unordered_map<c10d::ProcessGroup*, Group*> groups;
    {
      std::unique_lock<std::shared_mutex> held(groups_mutex_);
      groups.swap(groups_);
    }
    for (const auto& [address, group] : groups) group->pg.reset();  // the Group itself stays: running calls may use it
    std::lock_guard<std::mutex> held(tally.mutex);
    tally.first_error.clear();
  }

  Slots slots;
  Waits waits;
  DeviceTimes devices;
  PythonRows rows;
  CallSites callsites;
  Tally tally;
  bool sites_wanted = false;
  Progress* progress = nullptr;
  std::atomic<uint64_t> log{0};  // identifies each opening of a recording
  std::atomic<uint32_t> threads{0};
  std::atomic<uint32_t> batches{0};
  std::atomic<int64_t> wait_cost{0};
  std::atomic<bool> sample_wait{false};

 private:
  static uint64_t next_log() {
    static std::atomic<uint64_t> logs{0};
    return ++logs;
  }

  // `row`: (hooks.groups.Group, sequence number of the next collective).
  Group* add_group(const c10::intrusive_ptr<c10d::ProcessGroup>& pg, const py::object& row) {
    auto group = std::make_unique<Group>();
    const auto [known, first] = row.cast<std::pair<py::object, uint32_t>>();
    // A strong reference would keep the group from being destroyed. A weak one only keeps its address from being reused.
    group->pg = c10::weak_intrusive_ptr<c10d::ProcessGroup>(pg);
    group->number = known.attr("number").cast<uint32_t>();
    group->size = known.attr("size").cast<int>();
    group->rank = known.attr("rank").cast<int>();
    group->ranks = known.attr("ranks").cast<std::vector<int>>();
    group->collectives = first;
    std::unique_lock<std::shared_mutex> held(groups_mutex_);
    const auto [entry, is_new] = groups_.emplace(pg.get(), group.get());
    if (is_new) group.release();  // never freed: threads cache it
    return entry->second;
  }

  static constexpr int kTypes = static_cast<int>(c10::ScalarType::NumOptions) + 1, kReduceOps = 16;

  // Gives up the end of a call if the Work that should show it has died, and drops the reference to it.
  void drop_if_dead(uint32_t slot) {
    if (slots.state(slot) == kReturned && waits.died(slot)) slots.settle(slot, kReturned, kUnobservable);
  }

  // Blocks until wake() is called or until a time. A futex, because the C library's semaphores can wait by the monotonic
  // clock only since glibc 2.30.
  void sleep_until(int64_t time) {
    const timespec until{time / 1000000000, time % 1000000000};
    while (woken_.load() == 0 && futex(FUTEX_WAIT_BITSET_PRIVATE, 0, &until, FUTEX_BITSET_MATCH_ANY) != 0 && errno == EINTR) {
    }
  }

  long futex(int operation, uint32_t value, const timespec* until, uint32_t bits) {
    return syscall(SYS_futex, &woken_, operation, value, until, nullptr, bits);
  }

  static constexpr int64_t kTick = 100000000;  // ns

  std::atomic<uint32_t> woken_{0};  // the word of the futex
  int64_t* alive_ = nullptr;  // in the ring: when the process was last known to be alive
  std::shared_mutex groups_mutex_;
  std::unordered_map<c10d::ProcessGroup*, Group*> groups_;
  std::array<std::atomic<uint16_t>, kMostPlans * kTypes * kReduceOps> kinds_{};
};

// The running recording; null if there is none.
inline std::atomic<Recording*> current{nullptr};

// State of the calling thread.
struct Thread {
  // In the running recording.
  uint64_t log = 0;
  uint16_t number = 0;
  uint32_t calls = 0;
  int64_t looked_up = 0;  // when the running call first looked up something new; 0: it has not
  struct {
    c10d::ProcessGroup* pg = nullptr;
    Group* group = nullptr;
  } groups[16];
  struct {
    int task = -1;
    uint32_t purpose = 0, site = 0;
  } backward;  // the last backward pass, on a thread without Python frames

  // Between recordings, too.
  int functional = 0;  // nesting depth of functional collectives, whose waits name a tensor and not a Work
  uint32_t purpose = kNoPurpose;  // its mark, a number of hooks/purposes.py
  ThreadSites* sites = nullptr;

  static Thread& current(Recording& recording) {
    Thread& thread = current();
    const uint64_t log = recording.log.load(std::memory_order_relaxed);
    if (thread.log != log) {
      Thread begun;
      begun.log = log;
      begun.number = static_cast<uint16_t>(std::min<uint32_t>(++recording.threads, 65535));
      begun.functional = thread.functional, begun.purpose = thread.purpose, begun.sites = thread.sites;
      thread = begun;
    }
    return thread;
  }

  static Thread& current() {
    static thread_local Thread thread;
    Thread* known = &thread;
    asm("" : "+r"(known));  // else GCC calls __tls_get_addr again for each member
    return *known;
  }
};

inline ThreadSites& CallSites::cache_of_thread() {
  static thread_local struct Owner {
    std::unique_ptr<ThreadSites> cache;
    ~Owner() { Thread::current().sites = nullptr; }  // destructors of other variables may still communicate
  } owner;
  if (!owner.cache) owner.cache = std::make_unique<ThreadSites>();
  return *owner.cache;
}

inline uint32_t Recording::site_of_backward(int task, uint32_t purpose) {
  auto& last = Thread::current(*this).backward;
  if (last.task == task && last.purpose == purpose) return last.site;
  return rows.call(uint32_t{0}, [&, since = now()](const py::object& python_rows) {
    const auto [site, is_new] = python_rows.attr("site_of_backward")(purpose).cast<std::pair<uint32_t, bool>>();
    if (is_new) note_lookup(since);
    if (rows.current(python_rows)) last = {task, purpose, site};
    return site;
  });
}

inline void note_lookup(int64_t ns) {
  int64_t& looked_up = Thread::current().looked_up;
  if (looked_up == 0) looked_up = ns;
}

}  // namespace commtrace
