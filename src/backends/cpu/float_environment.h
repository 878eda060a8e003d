// The floating-point settings that kernels run under, whatever the caller's thread has set.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fusedmoe::cpu {

// Round to nearest, no traps, and subnormal fp32 numbers taken as zero: on some processors they
// cost a hundred cycles each. f16 subnormals keep their value (they are normal in fp32). Restores
// what was there.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    constexpr unsigned kMaskAll = 0x1f80;
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(kMaskAll | kFlushToZero | kDenormalsAreZero);
#endif
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
  ~FloatEnvironment() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#endif
  }

 private:
  [[maybe_unused]] unsigned saved_ = 0;
};

}  // namespace fusedmoe::cpu
