// Included before every source of a wheel's libraries, so that they need no newer C and C++ libraries than manylinux_2_28
// allows, whatever they are compiled with. auditwheel refuses the wheel if something is missing here.
#pragma once

// glibc 2.34 moved functions of libpthread and libdl into libc, under new versions of their symbols, and a library that
// is linked to it asks for those. The old versions are still there. With an older glibc, every Python has loaded the
// libraries that hold them.
#if defined(__x86_64__)
#define COMMTRACE_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define COMMTRACE_OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#else
#error "no wheels are built for this machine"
#endif

COMMTRACE_OLD(dlclose);
COMMTRACE_OLD(dlopen);
COMMTRACE_OLD(dlsym);
COMMTRACE_OLD(pthread_once);
COMMTRACE_OLD(pthread_rwlock_rdlock);
COMMTRACE_OLD(pthread_rwlock_unlock);
COMMTRACE_OLD(pthread_rwlock_wrlock);

// Code of streams and strings is compiled into the library, not looked up in libstdc++, where parts of it are new.
#include <cstddef>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <exception>
#include <new>

#define COMMTRACE_OWN __attribute__((weak, visibility("hidden")))

// Since glibc 2.32: whether shared_ptr can do without atomic operations. A process with torch has threads.
#if __has_include(<sys/single_threaded.h>)
extern "C" COMMTRACE_OWN char __libc_single_threaded = 0;
#endif

namespace std {

// Since libstdc++ 11.
COMMTRACE_OWN void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// Since libstdc++ 11; before, constructor and destructor were not inline, and libstdc++ still has those.
namespace __exception_ptr {

void old_copy(void* to, const exception_ptr* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void old_destroy(void* it) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

COMMTRACE_OWN void exception_ptr::_M_addref() noexcept {
  void* copy;  // as large as an exception_ptr; it is not destroyed, so the reference remains
  old_copy(&copy, this);
}

COMMTRACE_OWN void exception_ptr::_M_release() noexcept { old_destroy(this); }

}  // namespace __exception_ptr
}  // namespace std
