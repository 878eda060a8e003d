// The loops behind the probes of probes.h. Each has the instruction set in its function's target
// attribute and runs only where the CPU and its kernel have it.
#include <array>
#include <cstring>

#include "probes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusedmoe::tool {
namespace {

// Keeps the compiler from dropping a result or moving a loop.
template <class T>
inline void keep(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

#if defined(__x86_64__)

// Independent chains of one instruction: latency 4 to 6 cycles times two units, and a few more; all
// fit the registers next to two operands. Each starts at a value that the compiler cannot see, or
// it would find all chains equal and keep one.
constexpr int kChains = 12;
constexpr int kIterations = 1000;

template <class Vector>
[[gnu::always_inline]] inline void start_chains(Vector (&sums)[kChains]) {
#pragma GCC unroll 16
  for (auto& sum : sums) {
    sum = Vector{};
    asm volatile("" : "+m"(sum));
  }
}

// What kernels without FMA can reach: a multiply and an add, four floats each.
double run_sse(int repeats) {
  __m128 sums[kChains];
  start_chains(sums);
  const __m128 x = _mm_set1_ps(0.5F);
  for (int i = 0; i < repeats * kIterations; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) sum = _mm_add_ps(_mm_mul_ps(sum, x), x);
  }
  keep(sums);
  return 1.0 * repeats * kIterations * kChains * 4 * 2;
}

[[gnu::target("avx2,fma")]] double run_fma_ymm(int repeats) {
  __m256 sums[kChains];
  start_chains(sums);
  const __m256 x = _mm256_set1_ps(0.5F);
  for (int i = 0; i < repeats * kIterations; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) sum = _mm256_fmadd_ps(x, x, sum);
  }
  keep(sums);
  return 1.0 * repeats * kIterations * kChains * 8 * 2;
}

[[gnu::target("avx512f")]] double run_fma_zmm(int repeats) {
  __m512 sums[kChains];
  start_chains(sums);
  const __m512 x = _mm512_set1_ps(0.5F);
  for (int i = 0; i < repeats * kIterations; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) sum = _mm512_fmadd_ps(x, x, sum);
  }
  keep(sums);
  return 1.0 * repeats * kIterations * kChains * 16 * 2;
}

[[gnu::target("avx512f,avx512bf16")]] double run_dpbf16(int repeats) {
  __m512 sums[kChains];
  start_chains(sums);
  const auto x = (__m512bh)_mm512_set1_epi16(0x3f00);
  for (int i = 0; i < repeats * kIterations; ++i) {
#pragma GCC unroll 16
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, x, x);
  }
  keep(sums);
  return 1.0 * repeats * kIterations * kChains * 32 * 2;
}

// One statement on variables: g++ 12 keeps sums of the intrinsic, and those in an array, in memory,
// at a fifth of the rate.
[[gnu::target("avx512f,avx512vnni")]] double run_dpbusd(int repeats) {
  static_assert(kChains == 12);
  __m512i s[kChains];
  start_chains(s);
  const __m512i x = _mm512_set1_epi8(1);
  __m512i a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5];
  __m512i g = s[6], h = s[7], j = s[8], k = s[9], l = s[10], m = s[11];
  for (int i = 0; i < repeats * kIterations; ++i) {
    asm volatile(
        "vpdpbusd %[x], %[x], %0\n\tvpdpbusd %[x], %[x], %1\n\tvpdpbusd %[x], %[x], %2\n\t"
        "vpdpbusd %[x], %[x], %3\n\tvpdpbusd %[x], %[x], %4\n\tvpdpbusd %[x], %[x], %5\n\t"
        "vpdpbusd %[x], %[x], %6\n\tvpdpbusd %[x], %[x], %7\n\tvpdpbusd %[x], %[x], %8\n\t"
        "vpdpbusd %[x], %[x], %9\n\tvpdpbusd %[x], %[x], %10\n\tvpdpbusd %[x], %[x], %11"
        : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(j), "+v"(k),
          "+v"(l), "+v"(m)
        : [x] "v"(x));
  }
  return 1.0 * repeats * kIterations * kChains * 64 * 2;
}

// Four accumulators of 16 x 16, as the best kernels keep them.
template <bool kBytes>
[[gnu::target("amx-tile,amx-bf16,amx-int8")]] double run_amx(int repeats) {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) std::uint16_t operand[16 * 32];
  for (auto& bits : operand) bits = kBytes ? 0x0101 : 0x3f00;
  keep(config);  // g++ 12's intrinsics do not say that they read it, nor the operand
  keep(operand);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operand, 64);
  _tile_loadd(5, operand, 64);
  _tile_loadd(6, operand, 64);
  _tile_loadd(7, operand, 64);
  constexpr int kTileIterations = 100;  // 16 cycles each of 4
  for (int i = 0; i < repeats * kTileIterations; ++i) {
    if constexpr (kBytes) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
  return 4.0 * repeats * kTileIterations * 16 * 16 * (kBytes ? 64 : 32) * 2;
}

constexpr unsigned kAmxBf16 = 1U << 22, kAmxInt8 = 1U << 25;

// CPUID says that the CPU has tiles; the kernel wants to be asked for their registers, and the
// permission then holds for the threads that start later, too.
bool has_amx(unsigned operands) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kTile = 1U << 24;
  if ((d & kTile) == 0 || (d & operands) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::uint64_t sum_of(__m128i a) {
  alignas(16) std::uint64_t lanes[2];
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes), a);
  return lanes[0] ^ lanes[1];
}

// One stream a thread is enough: 2, 4 and 8 streams read 64 to 67 GB/s where it reads 62 to 64, and
// software prefetch loses 8 % (2 threads, Zen 5 server).
[[gnu::target("avx2")]] std::uint64_t read_avx2(const std::byte* data, std::size_t bytes) {
  const auto* from = reinterpret_cast<const __m256i*>(data);
  __m256i sums[4] = {};
  for (std::size_t i = 0; i + 4 <= bytes / 32; i += 4) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < 4; ++j) {
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(from + i + j));
    }
  }
  const __m256i all =
      _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
  return sum_of(_mm_xor_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}

bool has_fma() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#else

double run_portable(int repeats) {
  constexpr int kLanes = 64, kIterations = 1000;
  float sums[kLanes] = {};
  float x = 0.5F;
  for (int i = 0; i < repeats * kIterations; ++i) {
    keep(x);
    for (float& sum : sums) sum += x * x;
  }
  keep(sums);
  return 1.0 * repeats * kIterations * kLanes * 2;
}

#endif

std::uint64_t read_plain(const std::byte* data, std::size_t bytes) {
  std::uint64_t sums[4] = {};
  for (std::size_t i = 0; i + 32 <= bytes; i += 32) {
    std::uint64_t words[4];
    std::memcpy(words, data + i, sizeof(words));
    for (int j = 0; j < 4; ++j) sums[j] ^= words[j];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

}  // namespace

// No line has the isa of kernels that do not exist yet but those named as such kernels would be.
std::span<const PeakLoop> peak_loops() {
#if defined(__x86_64__)
  static const std::array loops = {
      PeakLoop{"mulps+addps xmm", "scalar", DType::f32, true, run_sse},
      PeakLoop{"vfmadd231ps ymm", "avx2", DType::f32, has_fma(), run_fma_ymm},
      PeakLoop{"vfmadd231ps zmm", "avx512", DType::f32, __builtin_cpu_supports("avx512f") != 0,
               run_fma_zmm},
      PeakLoop{"vdpbf16ps zmm", "avx512_bf16", DType::bf16,
               __builtin_cpu_supports("avx512bf16") != 0, run_dpbf16},
      PeakLoop{"tdpbf16ps", "amx_bf16", DType::bf16, has_amx(kAmxBf16), run_amx<false>},
      PeakLoop{"vpdpbusd zmm", "avx512_vnni", DType::i8, __builtin_cpu_supports("avx512vnni") != 0,
               run_dpbusd},
      PeakLoop{"tdpbssd", "amx_int8", DType::i8, has_amx(kAmxInt8), run_amx<true>},
  };
#else
  static const std::array loops = {
      PeakLoop{"fp32 multiply, add", "scalar", DType::f32, true, run_portable}};
#endif
  return loops;
}

std::uint64_t read_bytes(const std::byte* data, std::size_t bytes) {
#if defined(__x86_64__)
  std::uint64_t sum =
      __builtin_cpu_supports("avx2") ? read_avx2(data, bytes) : read_plain(data, bytes);
#else
  std::uint64_t sum = read_plain(data, bytes);
#endif
  keep(sum);
  return sum;
}

}  // namespace fusedmoe::tool
