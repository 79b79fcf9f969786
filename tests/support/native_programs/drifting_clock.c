/* A library to preload. Once it is loaded, CLOCK_MONOTONIC runs CLOCK_PPM parts per million faster, and jumps forward by
   CLOCK_STEP_MS when the program calls clock_jump. Its rate is by CLOCK_SLEW_PPB parts per billion faster in every other
   period of CLOCK_SLEW_MS, and as much slower in those between them. (libfaketime sets CLOCK_MONOTONIC to the time of day.) */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const long long SECOND = 1000000000;
static long long begin_ns, step_ns, period_ns;
static double rate, slew;

static long long from_environment(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

static long long monotonic_ns(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

__attribute__((constructor)) static void load(void) {
    rate = (double)from_environment("CLOCK_PPM") / 1e6;
    slew = (double)from_environment("CLOCK_SLEW_PPB") / 1e9;
    period_ns = from_environment("CLOCK_SLEW_MS") * 1000000;
    begin_ns = monotonic_ns();
}

void clock_jump(void) {
    step_ns = from_environment("CLOCK_STEP_MS") * 1000000;
}

static long long slewed_ns(long long now) {
    long long phase = period_ns ? now % (2 * period_ns) : 0;
    return (long long)(slew * (double)(phase < period_ns ? phase : 2 * period_ns - phase));
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = (int)syscall(SYS_clock_gettime, clock, time);
    if (status == 0 && clock == CLOCK_MONOTONIC) {
        long long now = time->tv_sec * SECOND + time->tv_nsec, since = now - begin_ns;
        now += (long long)((double)since * rate) + step_ns + slewed_ns(now);
        time->tv_sec = now / SECOND;
        time->tv_nsec = now % SECOND;
    }
    return status;
}
