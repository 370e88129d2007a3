// Rows of elements: vectors of them, read, rounded and written.
//
// Everything is in an unnamed namespace: see vec.h for why nothing here may have external linkage.
#pragma once

#include <limits>

#include "vec.h"

namespace HEADRACE_ISA {
namespace {

// x, which the compiler may not fuse with a later sum: the models' own operations do not.
inline vf alone(vf x) {
#if defined(__AVX2__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// To the nearest T, ties to even. What the kernels compute of bfloat16 elements is never one of the
// NaNs that this would make a number of.
template <class T>
vf rounded(vf x) {
  if constexpr (sizeof(T) == sizeof(float)) return alone(x);
  const vu bits = (vu)x;
  return (vf)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// A vector of a row, or its last elements where they do not fill one.
struct Whole {};
struct Part {
  int64_t count;
};

inline vf get(const float* p, Whole) { return load(p); }
inline vf get(const bf16* p, Whole) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  return load(p);
#endif
}
template <class T>
vf get(const T* p, Part part) {
  T elements[VL] = {};
  std::memcpy(elements, p, part.count * sizeof(T));
  return load(elements);
}

inline void put(float* p, vf x, Whole) { store(p, x); }
inline void put(bf16* p, vf x, Whole) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_srli_epi32((__m512i)rounded<bf16>(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
#else
  store(p, x);
#endif
}
template <class T>
void put(T* p, vf x, Part part) {
  T elements[VL];
  store(elements, x);
  std::memcpy(p, elements, part.count * sizeof(T));
}

// f(where, Whole or Part), over the elements of a row.
template <class F>
void over(int64_t width, F f) {
  int64_t i = 0;
  for (; i + VL <= width; i += VL) f(i, Whole{});
  if (i < width) f(i, Part{width - i});
}

inline vf first_of(vf x, Whole) { return x; }
inline vf first_of(vf x, Part part) {
  for (int64_t i = part.count; i < VL; ++i) x[i] = 0;
  return x;
}

// x / (1 + e^-x); -0 far below, where e^-x is infinite.
inline vf silu(vf x) {
  const vf infinite = splat(std::numeric_limits<float>::infinity());
  return x / (1.0f + select(x < -88.0f, infinite, exp(-x)));
}

}  // namespace
}  // namespace HEADRACE_ISA
