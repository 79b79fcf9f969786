// Threads make, complete and drain calls, and close and reopen the log, on the slots of a ring: for a thread sanitizer, and
// to check the counts.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../../hooks/native/slots.h"

using namespace commtrace;

constexpr uint32_t kCapacity = 64, kThreads = 6, kCalls = 30000;

std::mutex mutex;
std::deque<Handle> late;  // calls still to be completed
std::atomic<uint64_t> began{0}, dropped{0}, refused{0};
std::atomic<uint64_t> log_now{0};
std::atomic<bool> stop{false};

void complete(Slots& slots, Handle handle) {
  slots.update(handle, [](Record& record) -> uint8_t {
    if (record.state != kReturned) return record.state;
    record.t_end = 5;
    return kComplete;
  });
}

void caller(Slots& slots, uint32_t number) {
  std::minstd_rand random(number);
  for (uint32_t i = 0; i < kCalls; i++) {
    const uint64_t log = log_now;
    const uint32_t slot = slots.take();
    if (slot == Slots::kEmpty) {
      (slots.drop(1) ? dropped : refused)++;
      std::this_thread::yield();
      continue;
    }
    Record record{};
    record.seq = i, record.group = number, record.payload = int64_t{i} * 1000 + number, record.t_begin = 1;
    record.state = kBegun;
    const Handle handle = slots.begin(slot, record, log);
    if (!handle) {
      refused++;
      continue;
    }
    began++;
    slots.update(handle, [](Record& begun) { return begun.t_return = 2, uint8_t{kReturned}; });
    if (random() % 4 != 0) {
      complete(slots, handle);
    } else {
      std::lock_guard<std::mutex> held(mutex);
      late.push_back(handle);
    }
  }
}

void completer(Slots& slots) {
  while (!stop) {
    std::vector<Handle> handles;
    {
      std::lock_guard<std::mutex> held(mutex);
      for (int i = 0; i < 50 && !late.empty(); i++) handles.push_back(late.front()), late.pop_front();
    }
    for (Handle handle : handles) complete(slots, handle), complete(slots, handle);
    std::this_thread::yield();
  }
}

void check(const Record& record) {
  if (record.payload != int64_t{record.seq} * 1000 + record.group || record.t_return != 2) std::abort();
}

uint64_t drain(Slots& slots, bool patient) {
  uint64_t written = 0;
  for (uint32_t slot = 0; slot < kCapacity; slot++) {
    const uint8_t state = slots.state(slot);
    const bool finished = state >= kComplete || (!patient && state == kReturned && slots.settle(slot, kReturned, kUnobservable));
    if (!finished) continue;
    Record record;
    slots.copy(slot, record);
    check(record);
    slots.release(slot);
    written++;
  }
  return written;
}

// Keeps a log until `calls` calls have begun or found no slot. Returns the number of records, and frees their memory.
uint64_t keep_log(Slots& slots, uint64_t number, uint64_t calls, uint64_t& counted) {
  auto* records = static_cast<Record*>(std::calloc(kCapacity, sizeof(Record)));
  auto* cell = new uint64_t{0};
  slots.open(records, cell, number);
  log_now = number;
  uint64_t written = 0, left = 0;
  for (int turn = 0; began + dropped + refused < calls; turn++) written += drain(slots, turn % 3 != 0);
  slots.close();
  for (uint32_t slot = 0; slot < kCapacity; slot++) left += slots.state(slot) != kFree;
  counted += *cell;
  delete cell;
  std::free(records);  // the sanitizer detects later writes
  return written + left;
}

// Aborts unless calls that hold one slot at a time use one slot in each log. The drain thread scans all used slots.
void check_reopened() {
  Slots slots(kCapacity);
  std::vector<Record> records(kCapacity);
  uint64_t cell = 0;
  for (uint64_t log = 1; log <= 3; log++) {
    slots.open(records.data(), &cell, log);
    for (int call = 0; call < 3; call++) slots.release(slots.begin(slots.take(), Record{}, log).slot());
    if (slots.used() != 1) {
      std::fprintf(stderr, "%u slots used in log %lu, not 1\n", slots.used(), log);
      std::abort();
    }
    slots.close();
  }
}

int main() {
  check_reopened();
  auto& slots = *new Slots(kCapacity);
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < kThreads; i++) callers.emplace_back(caller, std::ref(slots), i);
  std::thread completions(completer, std::ref(slots));
  uint64_t recorded = 0, counted = 0;
  constexpr uint64_t kLogs = 20;
  for (uint64_t log = 1; log <= kLogs; log++) recorded += keep_log(slots, log, kThreads * kCalls * log / (kLogs + 1), counted);
  for (std::thread& thread : callers) thread.join();
  stop = true;
  completions.join();
  std::printf("%lu began, %lu recorded, %lu dropped, %lu counted, %lu refused\n", began.load(), recorded, dropped.load(),
              counted, refused.load());
  return began == recorded && dropped == counted && recorded > 0 && counted > 0 && refused > 0 ? 0 : 1;
}
