// The bounds of DeviceClock must always contain the true time of a device whose clock drifts, with early and late events.
#include <cstdio>
#include <random>

#include "../../../hooks/native/device_clock.h"

using commtrace::DeviceClock;

constexpr int64_t kSecond = 1'000'000'000;

int failures = 0;

void check(bool holds, const char* what, int64_t number) {
  if (holds) return;
  std::printf("%s: %lld\n", what, static_cast<long long>(number));
  failures++;
}

// Ten minutes of events. A tenth of them are queued on an idle stream, and a tenth are observed at once.
void drifting(int64_t ppm) {
  std::minstd_rand random(1);
  DeviceClock clock;
  int64_t worst = 0;
  for (int64_t host = 5 * kSecond; host < 605 * kSecond; host += random() % 20'000'000) {
    const int64_t device = host - 3 * kSecond + (host - 5 * kSecond) / 1'000'000 * ppm;
    const int64_t queued = random() % 10 == 0 ? 2'000 : random() % 5'000'000;
    const int64_t unseen = random() % 10 == 0 ? 50'000 : random() % 100'000'000;
    clock.sample(device, host - queued, host + unseen);
    const int64_t early = host - clock.on_host(device, host - queued, host + unseen);
    check(early >= 0, "late", early);
    check(early <= clock.error(), "beyond the error", early);
    if (host > 15 * kSecond) worst = std::max(worst, clock.error());
  }
  check(worst < 500'000, "the error grows", worst);
}

void standing_still() {
  DeviceClock clock;
  clock.sample(1000, 10'000, 12'000);
  clock.sample(2000, 1'011'000'000, 1'013'000'000);  // the host slept, and its clock went on
  check(clock.on_host(2000, 1'011'000'000, 1'013'000'000) == 1'011'000'000, "the old offset stays", clock.error());
  check(clock.error() == 2'000'000 + 2 * DeviceClock::kResolution, "the newest bounds", clock.error());
}

void out_of_order() {
  DeviceClock clock;
  clock.sample(kSecond, 2 * kSecond, 2 * kSecond + 1000);
  clock.sample(kSecond / 2, kSecond + kSecond / 2 - 5000, 3 * kSecond);
  check(clock.error() <= 1000 + 2 * DeviceClock::kResolution, "an older event loosens nothing", clock.error());
  const int64_t early = kSecond + kSecond / 2 - clock.on_host(kSecond / 2, 0, 3 * kSecond);
  check(early >= 0 && early <= clock.error(), "it lies before", early);
}

int main() {
  check(DeviceClock().error() == INT64_MAX, "nothing is known", 0);
  for (int64_t ppm : {0, 20, -20, 90, -90}) drifting(ppm);
  standing_still();
  out_of_order();
  return failures == 0 ? 0 : 1;
}
