// Packed weights as tiles read them: some inputs of VL outputs, as float32 or as pairs of bfloat16.
#pragma once

#include <type_traits>

#include "linear_layout.h"

namespace HEADRACE_ISA {
namespace {

// Registers hold a tile's sums only if every loop over them is unrolled, in one function.
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline)) inline
#define INLINE_LAMBDA __attribute__((always_inline))

// Lanes of what is packed are uint32_t, two bfloat16; uint16_t, two int8; int4; or float, one float32.
struct int4 {
  uint32_t bits;
};

// One input of VL outputs, as float32: the only one, or one of two; of int4, of the pair `at`.
INLINE vf load_first(const float* p, int) { return load(p); }
INLINE vf load_first(const uint32_t* p, int) {
  return (vf)(*reinterpret_cast<const vu*>(p) << 16);
}
INLINE vf load_second(const uint32_t* p, int) {
  return (vf)(*reinterpret_cast<const vu*>(p) & 0xffff0000u);
}
INLINE vf load_first(const uint16_t* p, int) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  return __builtin_convertvector((vi)(pairs << 24) >> 24, vf);
}
INLINE vf load_second(const uint16_t* p, int) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  return __builtin_convertvector((vi)(pairs << 16) >> 24, vf);
}
// Of int4 the code, times what keeps it in its place: see divide_by_places in linear.cpp.
INLINE vf load_first(const int4* p, int at) {
  const vu lanes = *reinterpret_cast<const vu*>(p);
  const vu codes = at == 2 * INT4_PAIRS - 1 ? lanes >> 28 : lanes & (15u << (4 * at));
  return __builtin_convertvector((vi)codes, vf);
}
INLINE vf load_second(const int4* p, int at) { return load_first(p, at + INT4_PAIRS); }

// Two inputs of VL outputs, as bfloat16.
INLINE vu load_pairs(const uint32_t* p, int) { return *reinterpret_cast<const vu*>(p); }
#if defined(__AVX512BF16__)
INLINE vu load_pairs(const uint16_t* p, int) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
  return (vu)_mm512_cvtne2ps_pbh(second, first);
}
INLINE vu load_pairs(const int4* p, int at) {
  // Each number is looked up; of an index, 5 bits count, of which the fifth may be anything.
#define HEADRACE_FROM_8                                                                   \
  0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, \
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0
  alignas(64) static constexpr uint16_t NUMBERS[32] = {HEADRACE_FROM_8, HEADRACE_FROM_8};
#undef HEADRACE_FROM_8
  const vu indices = *reinterpret_cast<const vu*>(p) >> (4 * at);
  return (vu)_mm512_permutexvar_epi16((__m512i)indices, _mm512_load_si512(NUMBERS));
}
#else
template <class W>
INLINE vu load_pairs(const W* p, int at) {
  // The lower halves are zero: 8 bits are enough for integers.
  return (vu)load_first(p, at) >> 16 | (vu)load_second(p, at);
}
#endif

// Weights of C panels: lanes of an output are `stride` apart, groups of panels `group`. Pairs are
// counted from `k`, a multiple of INT4_PAIRS, on.
template <class W>
struct Weights {
  using Lane = W;
  static constexpr bool IS_FLOAT = std::is_same_v<W, float>, IS_INT4 = std::is_same_v<W, int4>;
  static constexpr bool IS_SCALED_BY_GROUP = false;
  const W* from;
  int64_t stride, group;

  INLINE const W* panel(int64_t k, int c) const {
    return from + c / NR * group + k * stride + c % NR * VL;
  }
  INLINE const W* lane(int64_t k, int i, int c) const {
    return IS_INT4 ? panel(k / INT4_PAIRS, c) : panel(k + i, c);
  }
  // The same weights, of which the compiler keeps no lanes for the next pair: these would take the
  // registers of sums.
  INLINE Weights read_again() const {
    Weights same = *this;
    if (IS_INT4) asm volatile("" : "+r"(same.from));
    return same;
  }
  INLINE vu pairs(int64_t k, int i, int c) const { return load_pairs(lane(k, i, c), i); }
  INLINE vf first(int64_t k, int i, int c) const { return load_first(lane(k, i, c), i); }
  INLINE vf second(int64_t k, int i, int c) const { return load_second(lane(k, i, c), i); }
};

// The same, of integers with scales by group, as they lie or turned into bfloat16.
template <class W>
struct Grouped : Weights<W> {
  static constexpr bool IS_SCALED_BY_GROUP = true;
};

}  // namespace
}  // namespace HEADRACE_ISA
