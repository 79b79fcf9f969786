// One recording: from the first call on, until the log is closed. Never freed, as completions may come at any time; what
// costs memory is let go of when it closes, but for twelve bytes per slot.
#pragma once

#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>

#include "callsites.h"
#include "device.h"
#include "plan.h"
#include "slots.h"
#include "works.h"

namespace commtrace {

namespace py = pybind11;

enum Phase : int { kUnmarked = -1, kOther = 0, kInit, kForwardPhase, kBackwardPhase, kOptimizerPhase };
enum Flag : uint8_t { kAsync = 1, kCoalesced = 2, kCaptured = 4, kObjects = 8, kSparse = 16, kUneven = 64 };

// The numbers of commtrace.progress, shared with Python: each side reads what the other writes.
struct Progress {
  int32_t step, micro_batch, mark, finished, by_program;

  int32_t get(const int32_t& cell) const { return __atomic_load_n(&cell, __ATOMIC_RELAXED); }

  bool between_steps() const { return get(finished) && !get(by_program); }

  // As Progress.activity of the twin.
  void activity() {
    if (between_steps() && __atomic_exchange_n(&finished, 0, __ATOMIC_RELAXED))
      __atomic_fetch_add(&step, 1, __ATOMIC_RELAXED);
  }
};

struct Group {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> pg{c10::intrusive_ptr<c10d::ProcessGroup>()};
  uint32_t number = 0;
  int size = 1, rank = 0;
  std::vector<int> ranks;
  std::atomic<uint32_t> collectives{0};
  std::atomic<uint64_t> futureless{0};  // a bit per operator that has no future on this group
  std::atomic<uint32_t> batch{0};       // number of the batch that is open

  std::mutex mutex;  // of what follows
  std::map<std::tuple<int, int, int>, uint32_t> messages;
  std::vector<Handle> batched;
  bool batch_on_host = false;
  Begun batch_on_device;

  int global_rank(int64_t rank_) const {
    return rank_ >= 0 && rank_ < static_cast<int64_t>(ranks.size()) ? ranks[rank_] : -1;
  }

  uint32_t message(int source, int destination, int tag) {
    std::lock_guard<std::mutex> held(mutex);
    return messages[{source, destination, tag}]++;
  }
};

// Counters and samples that the drain thread takes over.
struct Tally {
  std::atomic<uint64_t> dropped{0}, errors{0}, samples{0};
  std::array<std::atomic<int64_t>, 1024> costs{};
  std::mutex mutex;
  std::string first_error;

  void sample(int64_t ns) { costs[samples.fetch_add(1) % costs.size()].store(ns, std::memory_order_relaxed); }

  void fault(const char* what) {
    errors.fetch_add(1);
    std::lock_guard<std::mutex> held(mutex);
    if (first_error.empty()) first_error = what;
  }
};

class Recording {
 public:
  Recording(char* records, uint32_t capacity, bool sites, bool device_times, Progress* progress)
      : slots(records, capacity),
        waits(capacity),
        devices(slots, device_times),
        sites_wanted(sites),
        progress(progress),
        id(next_id()) {}

  // ---- numbers of rows: asked of Python once, then remembered -------------------------------------------------------

  Group* group(c10d::ProcessGroup* pg, const c10::intrusive_ptr<c10d::ProcessGroup>& shared) {
    {
      std::shared_lock<std::shared_mutex> held(groups_mutex_);
      const auto known = groups_.find(pg);
      if (known != groups_.end()) return known->second;
    }
    py::gil_scoped_acquire gil;
    const py::object asked = rows;
    if (!asked) return nullptr;
    const py::object row = asked.attr("group")(shared);
    if (row.is_none()) return nullptr;
    return enter(pg, shared, row);
  }

  uint16_t kind(const Plan& plan, int dtype, int reduce_op) {
    std::atomic<uint16_t>& known = kinds_[(plan.number * kTypes + dtype + 1) * kReduceOps + reduce_op + 1];
    if (const uint16_t number = known.load(std::memory_order_relaxed)) return number;
    py::gil_scoped_acquire gil;
    const py::object asked = rows;
    if (!asked) return 0;
    const py::object type = dtype < 0 ? py::object(py::none()) : py::cast(static_cast<c10::ScalarType>(dtype));
    const auto number = asked.attr("kind")(plan.number, type, reduce_op).cast<uint16_t>();
    known.store(number, std::memory_order_relaxed);
    return number;
  }

  uint32_t site_of_backward(int task) {
    const uint64_t known = backward_.load(std::memory_order_relaxed);
    if (static_cast<int>(known >> 32) == task) return known & 0xffffffff;
    py::gil_scoped_acquire gil;
    const py::object asked = rows;
    if (!asked) return 0;
    const auto site = asked.attr("site_of_backward")().cast<uint32_t>();
    backward_.store(static_cast<uint64_t>(task) << 32 | site, std::memory_order_relaxed);
    return site;
  }

  // Whether a forward that communicates is one of training.
  bool trains() {
    if (c10::GradMode::is_enabled()) return true;
    py::gil_scoped_acquire gil;
    const py::object asked = rows;
    return asked && asked.attr("in_training")().cast<bool>();
  }

  // ---- records -------------------------------------------------------------------------------------------------------

  Handle begin(const Record& record) {
    const uint32_t slot = slots.take();
    if (slot != Slots::kEmpty) return slots.begin(slot, record);
    tally.dropped.fetch_add(1);
    return {};
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

  void wait_begins(Handle handle, int64_t t_wait) {
    slots.update(handle, [=](Record& record) {
      __atomic_store_n(&record.t_wait, t_wait, __ATOMIC_RELAXED);  // the drain thread may be reading it
      return record.state;
    });
  }

  void unobservable(Handle handle) { ended(handle, 0, kNobody, kUnobservable); }

  // ---- by the drain thread -------------------------------------------------------------------------------------------

  // Slots whose records nobody will add to, with those of the oldest returned calls where places run short. As the twin.
  std::vector<int64_t> finished() {
    std::vector<int64_t> found;
    std::vector<std::pair<int64_t, uint32_t>> waiting;
    for (uint32_t slot = 0; slot < slots.capacity(); slot++) {
      const uint8_t state = slots.state(slot);
      if (state >= kComplete || (state == kReturned && waits.died(slot) && slots.detach(slot, kReturned)))
        found.push_back(slot);
      else if (state == kReturned)
        waiting.emplace_back(slots.begun(slot), slot);
    }
    const int64_t quarter = std::max<int64_t>(1, slots.capacity() / 4);
    if (slots.free() + static_cast<int64_t>(found.size()) >= quarter) return found;
    std::sort(waiting.begin(), waiting.end());
    for (const auto& [begun, slot] : waiting) {
      if (static_cast<int64_t>(found.size()) >= 2 * quarter) break;
      if (slots.detach(slot, kReturned)) found.push_back(slot);
    }
    return found;
  }

  void release(uint32_t slot) {
    waits.remove(slot);
    slots.release(slot);
  }

  void close() {  // with the GIL
    const py::object asked = std::move(rows);
    callsites.forget();
    devices.close();
    std::shared_lock<std::shared_mutex> held(groups_mutex_);
    for (const auto& [address, group] : groups_) group->pg.reset();
  }

  Slots slots;
  Waits waits;
  DeviceTimes devices;
  CallSites callsites;
  Tally tally;
  const bool sites_wanted;
  Progress* const progress;
  const uint64_t id;
  py::object rows;  // hooks/native/rows.py; touched with the GIL only
  std::atomic<uint32_t> threads{0};
  std::atomic<uint32_t> batches{0};
  std::atomic<int64_t> wait_cost{0};
  std::atomic<bool> sample_wait{false};

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> ids{0};
    return ++ids;
  }

  Group* enter(c10d::ProcessGroup* pg, const c10::intrusive_ptr<c10d::ProcessGroup>& shared, const py::object& row) {
    std::unique_lock<std::shared_mutex> held(groups_mutex_);
    Group*& entry = groups_[pg];
    if (entry == nullptr) {
      entry = new Group;
      // Weakly: a group that is kept alive cannot be destroyed. (It gives its backends up all the same; what stays is its
      // address, so that no other group can have it.)
      entry->pg = c10::weak_intrusive_ptr<c10d::ProcessGroup>(shared);
      entry->number = row.attr("number").cast<uint32_t>();
      entry->size = row.attr("size").cast<int>();
      entry->rank = row.attr("rank").cast<int>();
      entry->ranks = row.attr("ranks").cast<std::vector<int>>();
      entry->collectives = row.attr("first").cast<uint32_t>();
    }
    return entry;
  }

  static constexpr int kTypes = static_cast<int>(c10::ScalarType::NumOptions) + 1, kReduceOps = 16;

  std::shared_mutex groups_mutex_;
  std::unordered_map<c10d::ProcessGroup*, Group*> groups_;
  std::array<std::atomic<uint16_t>, kMostPlans * kTypes * kReduceOps> kinds_{};
  std::atomic<uint64_t> backward_{~0ULL};
};

// The recording that goes on; null while there is none.
inline std::atomic<Recording*> current{nullptr};

// What a thread knows of itself.
struct Thread {
  uint64_t recording = 0;
  uint16_t number = 0;
  int functional = 0;  // calls within are waited for by tensor, and not by Work
  uint32_t calls = 0;
  struct {
    c10d::ProcessGroup* pg = nullptr;
    Group* group = nullptr;
  } groups[16];

  static Thread& of(Recording& recording) {
    Thread& thread = mine();
    if (thread.recording != recording.id) {
      const int functional = thread.functional;
      thread = Thread{};
      thread.recording = recording.id;
      thread.functional = functional;
      thread.number = static_cast<uint16_t>(std::min<uint32_t>(++recording.threads, 65535));
    }
    return thread;
  }

  static Thread& mine() {
    static thread_local Thread thread;
    return thread;
  }
};

}  // namespace commtrace
