// Vectors of VL floats, and what the kernels do with them.
//
// Every kernel is written once over these and compiled once for each instruction set (see
// ../build.py): HEADRACE_ISA names the namespace, so that the variants live in one library and
// none of them is called on a machine that cannot run it. Everything here is `static` or a
// template in that namespace: an inline function with external linkage would be merged by the
// linker across the variants, and the wrong one might survive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace HEADRACE_ISA {

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats in a vector
constexpr int NR = 4;   // vectors in a row of a register tile
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int NR = 2;
#else
constexpr int VL = 4;
constexpr int NR = 4;
#endif
constexpr int MR = 4;  // rows of a register tile

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vc __attribute__((vector_size(VL), aligned(1), may_alias));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

static inline vf splat(float x) { return x - vf{}; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
static inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  _Float16 half;
  std::memcpy(&half, &x.bits, 2);
  return float(half);
#endif
}

static inline void from_float(float x, float* out) { *out = x; }
static inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // Round to nearest, ties to even; a NaN stays one.
  bits = x != x ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  out->bits = uint16_t(bits >> 16);
}
static inline void from_float(float x, f16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(x, 0);
#else
  _Float16 half = _Float16(x);
  std::memcpy(&out->bits, &half, 2);
#endif
}

static inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline vf load(const bf16* p) {
  vu wide = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu) << 16;
  return (vf)wide;
}
static inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf result;
  for (int i = 0; i < VL; ++i) result[i] = to_float(p[i]);
  return result;
#endif
}

static inline vf load(const int8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const vc*>(p), vi), vf);
}

static inline void store(float* p, vf x) { *reinterpret_cast<vf*>(p) = x; }
static inline vh round_to_bf16(vf x) {
  // Not by the processor's instruction, which makes 0 of what is below 2^-126: a gate's last bits count.
  vu bits = (vu)x;
  vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  vi is_nan = x != x;
  rounded = ((vu)is_nan & (bits | 0x00400000u)) | (~(vu)is_nan & rounded);
  return __builtin_convertvector(rounded >> 16, vh);
}
static inline void store(bf16* p, vf x) { *reinterpret_cast<vh*>(p) = round_to_bf16(x); }
static inline void store(f16* p, vf x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, 0));
#else
  for (int i = 0; i < VL; ++i) from_float(x[i], p + i);
#endif
}

static inline vf select(vi condition, vf yes, vf no) {
  return (vf)((condition & (vi)yes) | (~condition & (vi)no));
}
static inline vf max(vf a, vf b) { return select(a > b, a, b); }

static inline float sum_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < VL; ++i) total += x[i];
  return total;
#endif
}
// The sums of four vectors.
static inline void store_sums(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX512F__)
  const auto fold = [](vf x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                                      _mm512_extractf32x8_ps((__m512)x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  };
#elif defined(__AVX2__)
  const auto fold = [](vf x) {
    return _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  };
#endif
#if defined(__AVX2__)
  _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d))));
#else
  out[0] = sum_of(a);
  out[1] = sum_of(b);
  out[2] = sum_of(c);
  out[3] = sum_of(d);
#endif
}

static inline float max_of(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < VL; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// e^x within 2 units of the last place; 0 below -87. By Cody and Waite's reduction to
// |r| <= ln 2 / 2 and a Taylor polynomial of degree 7 there.
static inline vf exp(vf x) {
  const vi tiny = x < splat(-87.0f);
  x = select(x > splat(88.0f), splat(88.0f), x);
  x = select(tiny, splat(-87.0f), x);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  const vf n = (x * 1.44269504088896341f + magic) - magic;
  const vf r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  vf p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return select(tiny, vf{}, p * (vf)power);
}

static inline vf tanh(vf x) {
  const vf e = exp(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// Products of pairs of bfloat16, summed in float32: one lane of `a` and `b` holds two numbers.
#if defined(__AVX512BF16__)
static inline vf dot_pairs(vf sum, vu a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

}  // namespace HEADRACE_ISA
