// Threads that call, complete, drain and close, on the slots of one ring: for a thread sanitizer, and for accounts.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../hooks/native/slots.h"

using namespace commtrace;

constexpr uint32_t kCapacity = 64, kThreads = 6, kCalls = 30000;

std::mutex mutex;
std::deque<Handle> late;  // completions that are still to come
std::atomic<uint64_t> began{0}, dropped{0}, refused{0};
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
    const uint32_t slot = slots.take();
    if (slot == Slots::kEmpty) {
      dropped++;
      std::this_thread::yield();
      continue;
    }
    Record record{};
    record.seq = i, record.group = number, record.payload = int64_t{i} * 1000 + number, record.t_begin = 1;
    record.state = kBegun;
    const Handle handle = slots.begin(slot, record);
    if (!handle) {
      refused++;
      continue;
    }
    began++;
    slots.update(handle, [](Record& mine) { return mine.t_return = 2, uint8_t{kReturned}; });
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
    std::vector<Handle> some;
    {
      std::lock_guard<std::mutex> held(mutex);
      for (int i = 0; i < 50 && !late.empty(); i++) some.push_back(late.front()), late.pop_front();
    }
    for (Handle handle : some) complete(slots, handle), complete(slots, handle);
    std::this_thread::yield();
  }
}

uint64_t drain(Slots& slots, const Record* records, bool patient) {
  uint64_t written = 0;
  for (uint32_t slot = 0; slot < kCapacity; slot++) {
    const uint8_t state = slots.state(slot);
    const bool mine = state >= kComplete || (!patient && state == kReturned && slots.detach(slot, kReturned));
    if (!mine) continue;
    const Record& record = records[slot];
    if (record.payload != int64_t{record.seq} * 1000 + record.group || record.t_return != 2) std::abort();
    slots.release(slot);
    written++;
  }
  return written;
}

int main() {
  auto* records = static_cast<Record*>(std::calloc(kCapacity, sizeof(Record)));
  auto& slots = *new Slots(records, kCapacity);
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < kThreads; i++) callers.emplace_back(caller, std::ref(slots), i);
  std::thread completions(completer, std::ref(slots));
  uint64_t written = 0;
  for (int turn = 0; began + dropped < kThreads * kCalls / 2; turn++) written += drain(slots, records, turn % 3 != 0);
  const uint32_t unwritten = slots.close();
  uint64_t left = 0;
  for (uint32_t slot = 0; slot < kCapacity; slot++) left += slots.state(slot) != kFree;
  const uint64_t accounted = written + left;
  std::free(records);  // whoever writes now is found out
  for (std::thread& thread : callers) thread.join();
  stop = true;
  completions.join();
  std::printf("%lu began, %lu written, %lu left, %u unwritten, %lu refused, %lu dropped\n", began.load(), written, left,
              unwritten, refused.load(), dropped.load());
  return began == accounted && written > 0 && left > 0 ? 0 : 1;
}
