// Threads make calls and wait for their Works, on the slots of a ring that runs out of slots, is closed and is opened again:
// for a sanitizer, and to check the counts. Slots and Waits are used as in recording_kernels.h and waits.h, without torch.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../../../hooks/native/works.h"

using namespace commtrace;

constexpr uint32_t kCapacity = 64, kThreads = 6, kTurns = 15000;

struct Work : c10::intrusive_ptr_target {};
using Works = std::vector<c10::intrusive_ptr<Work>>;

std::atomic<uint64_t> log_now{0}, turns{0}, began{0}, dropped{0}, late{0};

struct Ring {
  Slots slots{kCapacity};
  Waits waits{kCapacity};
};

void end(Ring& ring, Handle handle) {
  ring.slots.update(handle, [](Record& record) -> uint8_t {
    if (record.state != kReturned) return record.state;
    record.t_end = 3;
    return kComplete;
  });
}

Handle begin(Ring& ring, uint32_t number, uint64_t log) {
  const uint32_t slot = ring.slots.take();
  if (slot == Slots::kEmpty) {
    dropped += ring.slots.drop(1);
    std::this_thread::yield();
    return {};
  }
  Record record{};
  record.t_begin = 1, record.group = number, record.state = kBegun;
  const Handle handle = ring.slots.begin(slot, record, log);
  began += static_cast<bool>(handle);
  return handle;
}

void wait(Ring& ring, const void* key) {
  for (const auto& call : ring.waits.take(key)) {
    ring.slots.update(call.handle, [](Record& record) { return record.t_wait = 2, record.state; });
    end(ring, call.handle);
  }
}

// One to eight calls that share one Work; they end by a wait, or by a completion.
void communicate(Ring& ring, uint32_t number, std::minstd_rand& random, Works& kept) {
  const uint64_t log = log_now;
  std::vector<Handle> batch;
  for (uint32_t calls = random() % 4 == 0 ? 8 : 1; calls > 0; calls--) batch.push_back(begin(ring, number, log));
  for (Handle handle : batch) ring.slots.update(handle, [](Record& begun) { return begun.t_return = 2, uint8_t{kReturned}; });
  if (random() % 8 == 0) std::this_thread::yield();  // the log may be closed, or the slots be reused
  auto work = c10::make_intrusive<Work>();
  const bool by_wait = random() % 2;
  const auto weak = by_wait ? std::optional<Weak>(weak_reference(work.get())) : std::nullopt;
  bool first = true;
  for (Handle handle : batch)
    late += handle && !ring.slots.update(handle, [&](Record& record) {
      ring.waits.add(work.get(), handle, weak, std::exchange(first, false));
      return record.state;
    });
  switch (random() % 3) {
    case 0: wait(ring, work.get()); break;
    case 1: kept.push_back(std::move(work)); break;
    default: break;  // dropped
  }
  if (!by_wait)
    for (Handle handle : batch) end(ring, handle);
  if (kept.size() > 10) {
    for (const auto& old : kept) wait(ring, old.get());
    kept.clear();
  }
}

void caller(Ring& ring, uint32_t number) {
  std::minstd_rand random(number + 1);
  Works kept;
  for (uint32_t i = 0; i < kTurns; i++, turns++) communicate(ring, number, random, kept);
}

void release(Ring& ring, uint32_t slot) {
  ring.waits.remove(slot);
  ring.slots.release(slot);
}

// Like Recording::finished; gives up on returned calls, as if slots were always short.
uint64_t drain(Ring& ring, bool patient) {
  uint64_t written = 0;
  for (uint32_t slot = 0; slot < kCapacity; slot++) {
    uint8_t state = ring.slots.state(slot);
    if (state == kReturned && ring.waits.died(slot) && ring.slots.settle(slot, kReturned, kUnobservable)) state = kUnobservable;
    if (state < kComplete && (patient || state != kReturned || !ring.slots.settle(slot, kReturned, kReturned))) continue;
    Record record;
    ring.slots.copy(slot, record);
    if (record.t_begin != 1 || record.t_return != 2) std::abort();
    release(ring, slot);
    written++;
  }
  return written;
}

uint64_t keep_log(Ring& ring, uint64_t number, uint64_t until, uint64_t& counted) {
  auto* records = static_cast<Record*>(std::calloc(kCapacity, sizeof(Record)));
  auto* cell = new uint64_t{0};
  ring.slots.open(records, cell, number);
  log_now = number;
  uint64_t written = 0;
  for (uint64_t round = 0; turns < until; round++) written += drain(ring, round % 3 != 0);
  ring.slots.close();
  for (uint32_t slot = 0; slot < kCapacity; slot++)
    if (ring.slots.state(slot) != kFree) release(ring, slot), written++;
  counted += *cell;
  delete cell;
  std::free(records);  // the sanitizer detects later writes
  return written;
}

int main() {
  auto& ring = *new Ring;
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < kThreads; i++) callers.emplace_back(caller, std::ref(ring), i);
  uint64_t recorded = 0, counted = 0;
  constexpr uint64_t kLogs = 40;
  for (uint64_t log = 1; log <= kLogs; log++) recorded += keep_log(ring, log, kThreads * kTurns * log / (kLogs + 1), counted);
  for (std::thread& thread : callers) thread.join();
  std::printf("%lu began, %lu recorded, %lu dropped, %lu counted, %lu too late to be listed\n", began.load(), recorded,
              dropped.load(), counted, late.load());
  return began == recorded && dropped == counted && recorded > 0 && counted > 0 && late > 0 ? 0 : 1;
}
