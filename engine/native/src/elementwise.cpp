// What stands between a model's matrix products, of bfloat16: root-mean-square norms, the products of
// gated layers, rotary embeddings.
//
// Numbers are computed in float32 and rounded to bfloat16 where the models' own operations round:
// what differs from them is the order in which squares are summed, and the last bits of e^x. A row's
// result depends neither on the rows beside it nor on the threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t LEAST = 1 << 15;  // numbers that are worth a second thread

int team(int64_t numbers, int threads) { return numbers < LEAST ? 1 : threads; }

// To the nearest bfloat16, ties to even. What the kernels compute of bfloat16 numbers is never one of
// the NaNs that this would make a number of.
vf rounded(vf x) {
  const vu bits = (vu)x;
  return (vf)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// A vector of a row, or its last numbers where they do not fill one.
struct Whole {};
struct Part {
  int64_t count;
};

vf get(const bf16* p, Whole) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  return load(p);
#endif
}
vf get(const bf16* p, Part part) {
  bf16 numbers[VL] = {};
  std::memcpy(numbers, p, part.count * sizeof(bf16));
  return load(numbers);
}

void put(bf16* p, vf x, Whole) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_srli_epi32((__m512i)rounded(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
#else
  store(p, x);
#endif
}
void put(bf16* p, vf x, Part part) {
  bf16 numbers[VL];
  store(numbers, x);
  std::memcpy(p, numbers, part.count * sizeof(bf16));
}

// f(where, Whole or Part), over the numbers of a row.
template <class F>
void over(int64_t width, F f) {
  int64_t i = 0;
  for (; i + VL <= width; i += VL) f(i, Whole{});
  if (i < width) f(i, Part{width - i});
}

float sum_of_squares(const bf16* x, int64_t width) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= width; i += 4 * VL)
    for (int j = 0; j < 4; ++j) {
      const vf part = get(x + i + j * VL, Whole{});
      sums[j] += part * part;
    }
  over(width - i, [&](int64_t at, auto size) {
    const vf part = get(x + i + at, size);
    sums[0] += part * part;
  });
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A norm of one row.
template <int FORM>
struct Norm {
  const bf16* weight;
  vf inverse;

  Norm(const NormWeight& norm, const bf16* x)
      : weight(static_cast<const bf16*>(norm.weight)),
        inverse(splat(1.0f /
                      std::sqrt(sum_of_squares(x, norm.width) / float(norm.width) + norm.eps))) {}

  // Its numbers from `i` on, not yet rounded.
  template <class Size>
  vf operator()(const bf16* x, int64_t i, Size size) const {
    vf normed = get(x + i, size) * inverse;
    if (FORM & ROUNDED_FIRST) normed = rounded(normed);
    const vf factor = get(weight + i, size);
    return normed * (FORM & FROM_ONE ? factor + 1.0f : factor);
  }
};

// Instead of a norm.
struct AsItIs {
  AsItIs(const NormWeight&, const bf16*) {}
  template <class Size>
  vf operator()(const bf16* x, int64_t i, Size size) const {
    return get(x + i, size);
  }
};

template <int FORM>
void norm_rows(const NormWeight& norm, const bf16* x, bf16* y, int64_t rows, int threads) {
  const int64_t width = norm.width;
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* from = x + r * width;
    const Norm<FORM> normed(norm, from);
    over(width, [&](int64_t i, auto size) { put(y + r * width + i, normed(from, i, size), size); });
  }
}

// x / (1 + e^-x); -0 far below, where e^-x is infinite.
vf silu(vf x) {
  const vf infinite = splat(std::numeric_limits<float>::infinity());
  return x / (1.0f + select(x < -88.0f, infinite, exp(-x)));
}

// GELU by tanh: x/2 (1 + tanh z) is x / (1 + e^-2z).
vf gelu_tanh(vf x) {
  const vf z = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  const vf infinite = splat(std::numeric_limits<float>::infinity());
  return x / (1.0f + select(z < -44.0f, infinite, exp(-2.0f * z)));
}

template <vf (*ACTIVATION)(vf)>
void gate_rows(const bf16* gate, const bf16* up, int64_t stride, bf16* y, int64_t y_stride,
               int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r)
    over(width, [=](int64_t i, auto size) {
      const vf active = rounded(ACTIVATION(get(gate + r * stride + i, size)));
      put(y + r * y_stride + i, active * get(up + r * stride + i, size), size);
    });
}

// One head of one token, in place: normed, then its first `rotary` numbers turned.
template <class N>
void turn_head(const NormWeight& norm, bf16* x, const bf16* cos, const bf16* sin, int64_t rotary) {
  const N normed(norm, x);
  const int64_t half = rotary / 2;
  over(half, [&](int64_t i, auto size) {
    const vf a = rounded(normed(x, i, size)), b = rounded(normed(x, half + i, size));
    const vf first = rounded(a * get(cos + i, size)) - rounded(b * get(sin + i, size));
    const vf second =
        rounded(b * get(cos + half + i, size)) + rounded(a * get(sin + half + i, size));
    put(x + i, first, size);
    put(x + half + i, second, size);
  });
  over(norm.width - rotary, [&](int64_t i, auto size) {
    put(x + rotary + i, normed(x, rotary + i, size), size);
  });
}

template <class N>
void turn_heads(const HeadsCall& call, int form, int threads) {
  bf16* query = static_cast<bf16*>(call.query);
  bf16* key = static_cast<bf16*>(call.key);
  const int64_t width = call.head_dim, rotary = call.rotary_dim;
  const NormWeight query_norm = {call.query_weight, width, call.query_eps, form};
  const NormWeight key_norm = {call.key_weight, width, call.key_eps, form};
  const int64_t numbers = call.tokens * (call.num_heads + call.num_kv_heads) * width;
#pragma omp parallel for schedule(static) num_threads(team(numbers, threads))
  for (int64_t t = 0; t < call.tokens; ++t) {
    const bf16* cos = static_cast<const bf16*>(call.cos) + t * rotary;
    const bf16* sin = static_cast<const bf16*>(call.sin) + t * rotary;
    for (int64_t h = 0; h < call.num_heads; ++h)
      turn_head<N>(query_norm, query + t * call.query_stride + h * width, cos, sin, rotary);
    for (int64_t h = 0; h < call.num_kv_heads; ++h)
      turn_head<N>(key_norm, key + t * call.key_stride + h * width, cos, sin, rotary);
  }
}

}  // namespace

// y [rows][width]: x over the root of its mean square, times the weight.
void rms_norm(const NormWeight& norm, const void* x, void* y, int64_t rows, int threads) {
  const bf16* from = static_cast<const bf16*>(x);
  bf16* to = static_cast<bf16*>(y);
  switch (norm.form) {
    case 0:
      return norm_rows<0>(norm, from, to, rows, threads);
    case FROM_ONE:
      return norm_rows<FROM_ONE>(norm, from, to, rows, threads);
    default:
      return norm_rows<ROUNDED_FIRST>(norm, from, to, rows, threads);
  }
}

// y: activation(gate) * up. Rows of gate and up are `stride` numbers apart, those of y `y_stride`; y
// may be gate.
void gate(int activation, const void* gate, const void* up, int64_t stride, void* y,
          int64_t y_stride, int64_t rows, int64_t width, int threads) {
  const bf16* left = static_cast<const bf16*>(gate);
  const bf16* right = static_cast<const bf16*>(up);
  bf16* to = static_cast<bf16*>(y);
  if (activation == 0)
    gate_rows<silu>(left, right, stride, to, y_stride, rows, width, threads);
  else
    gate_rows<gelu_tanh>(left, right, stride, to, y_stride, rows, width, threads);
}

// Queries and keys of some tokens, in place: each head normed, then turned; see HeadsCall.
void heads(const HeadsCall& call, int threads) {
  const int form = int(call.form);
  if (!call.query_weight) return turn_heads<AsItIs>(call, form, threads);
  switch (form) {
    case 0:
      return turn_heads<Norm<0>>(call, form, threads);
    case FROM_ONE:
      return turn_heads<Norm<FROM_ONE>>(call, form, threads);
    default:
      return turn_heads<Norm<ROUNDED_FIRST>>(call, form, threads);
  }
}

// sum: x + y, [rows][width].
void add(const void* x, const void* y, void* sum, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* first = static_cast<const bf16*>(x) + r * width;
    const bf16* second = static_cast<const bf16*>(y) + r * width;
    bf16* to = static_cast<bf16*>(sum) + r * width;
    over(width, [&](int64_t i, auto size) {
      put(to + i, get(first + i, size) + get(second + i, size), size);
    });
  }
}

}  // namespace HEADRACE_ISA
