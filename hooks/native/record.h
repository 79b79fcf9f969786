// The record of a call, as commtrace.schema.RECORD defines it: its fields and their values. Independent of torch and Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

namespace commtrace {

// Same layout as commtrace.schema.RECORD.
struct Record {
  int64_t t_begin, t_return, t_wait, t_start, t_end, payload, local;
  uint32_t seq, group, site;
  int32_t step, micro_batch, peer, tag;
  uint32_t batch;
  uint16_t kind, thread;
  uint8_t phase, clock, flags, state;
};
static_assert(sizeof(Record) == 96, "the format of docs/reference/log-format.md");

// Offsets of the fields, returned by `layout()` of both libraries. Python compares them with commtrace.schema.RECORD.
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
enum Phase : int { kUnmarked = -1, kOther = 0, kInit, kForwardPhase, kBackwardPhase, kOptimizerPhase, kEvaluation };
enum Flag : uint8_t { kAsync = 1, kCoalesced = 2, kCaptured = 4, kObjects = 8, kSparse = 16, kUneven = 64 };
enum Clock : uint8_t { kNoClock, kReturn, kWait, kFuture, kDevice, kTest, kDeviceWait };

inline int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

}  // namespace commtrace
