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

// To the nearest bfloat16, ties to even; a NaN stays one.
vf rounded(vf x) {
  const vu bits = (vu)x;
  const vu result = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return select(x != x, x, (vf)result);
}

// Up to VL numbers: the last of a row need not fill a vector.
vf load_some(const bf16* p, int64_t count) {
  if (count >= VL) return load(p);
  bf16 part[VL] = {};
  std::memcpy(part, p, count * sizeof(bf16));
  return load(part);
}
void store_some(bf16* p, vf x, int64_t count) {
  if (count >= VL) return store(p, x);
  bf16 part[VL];
  store(part, x);
  std::memcpy(p, part, count * sizeof(bf16));
}

float sum_of_squares(const bf16* x, int64_t width) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= width; i += 4 * VL)
    for (int j = 0; j < 4; ++j) {
      const vf part = load(x + i + j * VL);
      sums[j] += part * part;
    }
  for (; i < width; i += VL) {
    const vf part = load_some(x + i, width - i);
    sums[0] += part * part;
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// One vector of a norm's result, not yet rounded.
template <int FORM>
vf scaled(vf x, vf inverse, vf weight) {
  x = x * inverse;
  if (FORM & ROUNDED_FIRST) x = rounded(x);
  return x * (FORM & FROM_ONE ? weight + 1.0f : weight);
}

// One row; y may be x.
template <int FORM>
void norm_row(const NormWeight& norm, const bf16* x, bf16* y) {
  const bf16* weight = static_cast<const bf16*>(norm.weight);
  const vf inverse =
      splat(1.0f / std::sqrt(sum_of_squares(x, norm.width) / float(norm.width) + norm.eps));
  for (int64_t i = 0; i < norm.width; i += VL) {
    const int64_t left = norm.width - i;
    const vf result = scaled<FORM>(load_some(x + i, left), inverse, load_some(weight + i, left));
    store_some(y + i, result, left);
  }
}

template <int FORM>
void norm_rows(const NormWeight& norm, const bf16* x, bf16* y, int64_t rows, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * norm.width, threads))
  for (int64_t r = 0; r < rows; ++r)
    norm_row<FORM>(norm, x + r * norm.width, y + r * norm.width);
}

// 1 / (1 + e^-x) times x; -0 far below, as where e^-x is infinite.
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
    for (int64_t i = 0; i < width; i += VL) {
      const int64_t at = r * stride + i, left = width - i;
      const vf active = rounded(ACTIVATION(load_some(gate + at, left)));
      store_some(y + r * y_stride + i, active * load_some(up + at, left), left);
    }
}

// One head of one token, in place: normed, then its first `rotary` numbers turned.
template <int FORM>
void turn_head(const NormWeight& norm, bf16* x, const bf16* cos, const bf16* sin, int64_t rotary) {
  if (norm.weight) norm_row<FORM>(norm, x, x);
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; i += VL) {
    const int64_t left = half - i;
    const vf a = load_some(x + i, left), b = load_some(x + half + i, left);
    const vf first =
        rounded(a * load_some(cos + i, left)) - rounded(b * load_some(sin + i, left));
    const vf second = rounded(b * load_some(cos + half + i, left)) +
                      rounded(a * load_some(sin + half + i, left));
    store_some(x + i, first, left);
    store_some(x + half + i, second, left);
  }
}

template <int FORM>
void turn_heads(const HeadsCall& call, int threads) {
  bf16* query = static_cast<bf16*>(call.query);
  bf16* key = static_cast<bf16*>(call.key);
  const int64_t width = call.head_dim, rotary = call.rotary_dim;
  const NormWeight query_norm = {call.query_weight, width, call.query_eps, FORM};
  const NormWeight key_norm = {call.key_weight, width, call.key_eps, FORM};
  const int64_t numbers = call.tokens * (call.num_heads + call.num_kv_heads) * width;
#pragma omp parallel for schedule(static) num_threads(team(numbers, threads))
  for (int64_t t = 0; t < call.tokens; ++t) {
    const bf16* cos = static_cast<const bf16*>(call.cos) + t * rotary;
    const bf16* sin = static_cast<const bf16*>(call.sin) + t * rotary;
    for (int64_t h = 0; h < call.num_heads; ++h)
      turn_head<FORM>(query_norm, query + t * call.query_stride + h * width, cos, sin, rotary);
    for (int64_t h = 0; h < call.num_kv_heads; ++h)
      turn_head<FORM>(key_norm, key + t * call.key_stride + h * width, cos, sin, rotary);
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
  switch (call.form) {
    case 0:
      return turn_heads<0>(call, threads);
    case FROM_ONE:
      return turn_heads<FROM_ONE>(call, threads);
    default:
      return turn_heads<ROUNDED_FIRST>(call, threads);
  }
}

// sum: x + y, of so many numbers.
void add(const void* x, const void* y, void* sum, int64_t numbers, int threads) {
  const bf16* first = static_cast<const bf16*>(x);
  const bf16* second = static_cast<const bf16*>(y);
  bf16* to = static_cast<bf16*>(sum);
#pragma omp parallel for schedule(static) num_threads(team(numbers, threads))
  for (int64_t i = 0; i < numbers; i += VL) {
    const int64_t left = numbers - i;
    store_some(to + i, load_some(first + i, left) + load_some(second + i, left), left);
  }
}

}  // namespace HEADRACE_ISA
