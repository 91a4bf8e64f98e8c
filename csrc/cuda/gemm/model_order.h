// What ThreadSanitizer sees of the model (model.h): each thread of a block and each copy is a thread of its own,
// ordered only by what orders it on a GPU. The model's own state is hidden. Without ThreadSanitizer nothing here has an
// effect.
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#endif

namespace moe_comm {
namespace gemm {

#if defined(__SANITIZE_THREAD__)

inline void hide() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
}
inline void show() {
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
// What is before release(p) is ordered before what is after a later acquire(p). No effect while hidden.
inline void release(const void* p) { __tsan_release(const_cast<void*>(p)); }
inline void acquire(const void* p) { __tsan_acquire(const_cast<void*>(p)); }

// A thread, as ThreadSanitizer sees it.
using Agent = void*;
inline Agent new_agent() { return __tsan_create_fiber(0); }
inline Agent this_agent() { return __tsan_get_current_fiber(); }
// Not instrumented: it enters as one thread and returns as another.
__attribute__((noinline, no_sanitize_thread)) inline void become(Agent agent) {
  __tsan_switch_to_fiber(agent, __tsan_switch_to_fiber_no_sync);
}
constexpr bool kOrdersAreChecked = true;

#else

inline void hide() {}
inline void show() {}
inline void release(const void*) {}
inline void acquire(const void*) {}
using Agent = int;
inline Agent new_agent() { return 0; }
inline Agent this_agent() { return 0; }
inline void become(Agent) {}
constexpr bool kOrdersAreChecked = false;

#endif

// Hides the model's own state in a scope.
struct Hidden {
  Hidden() { hide(); }
  ~Hidden() { show(); }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};
// The opposite, in a scope that is hidden once.
struct Shown {
  Shown() { show(); }
  ~Shown() { hide(); }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
};

}  // namespace gemm
}  // namespace moe_comm
