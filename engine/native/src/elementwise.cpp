// What stands between a model's matrix products: norms, gated layers, rotary embeddings, sums.
//
// Elements are of type T, bfloat16 or float32. They are computed in float32 and rounded to T where the
// models' own operations round: what differs from them is the order in which rows are summed, and the
// last bits of e^x. A row's result depends neither on the rows beside it nor on the threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t LEAST = 1 << 15;  // elements that are worth a second thread

int team(int64_t elements, int threads) { return elements < LEAST ? 1 : threads; }

// The sum of f(element) over a row.
template <class T, class F>
float sum_over(const T* x, int64_t width, F f) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= width; i += 4 * VL)
    for (int j = 0; j < 4; ++j) sums[j] += f(get(x + i + j * VL, Whole{}));
  over(width - i,
       [&](int64_t at, auto size) { sums[0] += first_of(f(get(x + i + at, size)), size); });
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A norm of one row.
template <class T, int FORM>
struct Norm {
  const T* weight;
  const T* bias;
  vf mean = {}, inverse;

  Norm(const NormWeight& norm, const T* x)
      : weight(static_cast<const T*>(norm.weight)), bias(static_cast<const T*>(norm.bias)) {
    const float width = float(norm.width);
    if (FORM & CENTERED) mean = splat(sum_over(x, norm.width, [](vf a) { return a; }) / width);
    const vf middle = mean;
    const auto square = [=](vf a) { return FORM & CENTERED ? (a - middle) * (a - middle) : a * a; };
    inverse = splat(1.0f / std::sqrt(sum_over(x, norm.width, square) / width + norm.eps));
  }

  // Its elements from `i` on, not yet rounded.
  template <class Size>
  vf operator()(const T* x, int64_t i, Size size) const {
    vf normed = get(x + i, size);
    if (FORM & CENTERED) normed = normed - mean;
    normed = normed * inverse;
    if (FORM & ROUNDED_FIRST) normed = rounded<T>(normed);
    const vf factor = get(weight + i, size);
    normed = normed * (FORM & FROM_ONE ? factor + 1.0f : factor);
    return bias ? normed + get(bias + i, size) : normed;
  }
};

// Instead of a norm.
template <class T>
struct AsItIs {
  AsItIs(const NormWeight&, const T*) {}
  template <class Size>
  vf operator()(const T* x, int64_t i, Size size) const {
    return get(x + i, size);
  }
};

template <class T, int FORM>
void norm_rows(const NormWeight& norm, const T* x, T* y, int64_t stride, int64_t rows,
               int threads) {
  const int64_t width = norm.width;
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x + r * stride;
    const Norm<T, FORM> normed(norm, from);
    over(width, [&](int64_t i, auto size) { put(y + r * stride + i, normed(from, i, size), size); });
  }
}

// GELU by tanh: x/2 (1 + tanh z) is x / (1 + e^-2z).
vf gelu_tanh(vf x) {
  const vf z = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  const vf infinite = splat(std::numeric_limits<float>::infinity());
  return x / (1.0f + select(z < -44.0f, infinite, exp(-2.0f * z)));
}

// The square of what is positive; NaN stays.
vf relu_squared(vf x) {
  const vf positive = select(x < 0.0f, vf{}, x);
  return positive * positive;
}

// 1 / (1 + e^-x); 0 far below, where e^-x is infinite.
vf sigmoid(vf x) {
  const vf infinite = splat(std::numeric_limits<float>::infinity());
  return 1.0f / (1.0f + select(x < -88.0f, infinite, exp(-x)));
}

vf unchanged(vf x) { return x; }

template <class T, vf (*ACTIVATION)(vf)>
void gate_rows(const T* gate, int64_t stride, const T* up, int64_t up_stride, T* y,
               int64_t y_stride, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r)
    over(width, [=](int64_t i, auto size) {
      vf active = ACTIVATION(get(gate + r * stride + i, size));
      if (up) active = rounded<T>(active) * get(up + r * up_stride + i, size);
      put(y + r * y_stride + i, active, size);
    });
}

// Heads of rows, in place: each is normed, rounded, and multiplied by what SiLU makes of its gate.
template <class T>
void gated_norm_rows(const NormWeight& norm, T* x, const T* projected, const DeltaColumns& columns,
                     int64_t rows, int64_t heads, int threads) {
  const int64_t width = norm.width;
#pragma omp parallel for schedule(static) num_threads(team(rows * heads * width, threads))
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      T* const head = x + (r * heads + h) * width;
      const T* const gate = projected + r * columns.stride + columns.z(h);
      const Norm<T, ROUNDED_FIRST> normed(norm, head);
      over(width, [&](int64_t i, auto size) {
        put(head + i, rounded<T>(normed(head, i, size)) * silu(get(gate + i, size)), size);
      });
    }
}

// Two halves of what is rotated: a cos - b sin, b cos + a sin.
template <class T>
struct Turn {
  bool rounds;
  vf product(vf x, vf y) const { return rounds ? rounded<T>(x * y) : alone(x * y); }
  vf first(vf a, vf b, vf cos, vf sin) const { return product(a, cos) - product(b, sin); }
  vf second(vf a, vf b, vf cos, vf sin) const { return product(b, cos) + product(a, sin); }
};

// One head of one token, in place: normed, then its first `rotary` elements turned.
template <class T, class N>
void turn_head(const HeadsCall& call, const NormWeight& norm, T* x, const float* cos,
               const float* sin) {
  const N normed(norm, x);
  const int64_t rotary = call.rotary_dim, half = rotary / 2;
  const Turn<T> turn{call.rounds != 0};
  over(half, [&](int64_t i, auto size) {
    const vf a = rounded<T>(normed(x, i, size)), b = rounded<T>(normed(x, half + i, size));
    const vf c = get(cos + i, size), s = get(sin + i, size);
    put(x + i, turn.first(a, b, c, s), size);
    put(x + half + i, turn.second(a, b, c, s), size);
  });
  over(call.head_dim - rotary, [&](int64_t i, auto size) {
    put(x + rotary + i, normed(x, rotary + i, size), size);
  });
}

// The same without a norm, where what is turned together stands side by side.
template <class T>
void turn_pairs(const HeadsCall& call, T* x, const float* cos, const float* sin) {
  const Turn<T> turn{call.rounds != 0};
  for (int64_t i = 0; i < call.rotary_dim / 2; i += VL) {
    const int count = int(std::min<int64_t>(VL, call.rotary_dim / 2 - i));
    vf a = {}, b = {}, c = {}, s = {};
    for (int j = 0; j < count; ++j) {
      a[j] = to_float(x[2 * (i + j)]), b[j] = to_float(x[2 * (i + j) + 1]);
      c[j] = cos[i + j], s[j] = sin[i + j];
    }
    const vf first = turn.first(a, b, c, s), second = turn.second(a, b, c, s);
    for (int j = 0; j < count; ++j) {
      from_float(first[j], x + 2 * (i + j));
      from_float(second[j], x + 2 * (i + j) + 1);
    }
  }
}

// f(a head's elements, the norm of its kind, cosines, sines), for each head of each token.
template <class T, class F>
void each_head(const HeadsCall& call, int threads, F f) {
  const int64_t width = call.head_dim, half = call.rotary_dim / 2;
  const int64_t elements = call.tokens * (call.num_heads + call.num_kv_heads) * width;
#pragma omp parallel for schedule(static) num_threads(team(elements, threads))
  for (int64_t t = 0; t < call.tokens; ++t) {
    const float* cos = call.cos + t * half;
    const float* sin = call.sin + t * half;
    T* query = static_cast<T*>(call.query) + t * call.query_stride;
    T* key = static_cast<T*>(call.key) + t * call.key_stride;
    for (int64_t h = 0; h < call.num_heads; ++h)
      f(query + h * call.query_head_stride, call.query_norm, cos, sin);
    for (int64_t h = 0; h < call.num_kv_heads; ++h) f(key + h * width, call.key_norm, cos, sin);
  }
}

template <class T, class N>
void turn_heads(const HeadsCall& call, int threads) {
  each_head<T>(call, threads,
               [&](T* x, const NormWeight& norm, const float* cos, const float* sin) {
                 turn_head<T, N>(call, norm, x, cos, sin);
               });
}

template <class T>
void norm_of(const NormWeight& norm, const void* x, void* y, int64_t stride, int64_t rows,
             int threads) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  switch (norm.form) {
    case 0:
      return norm_rows<T, 0>(norm, from, to, stride, rows, threads);
    case FROM_ONE:
      return norm_rows<T, FROM_ONE>(norm, from, to, stride, rows, threads);
    case CENTERED:
      return norm_rows<T, CENTERED>(norm, from, to, stride, rows, threads);
    default:
      return norm_rows<T, ROUNDED_FIRST>(norm, from, to, stride, rows, threads);
  }
}

template <class T>
void gate_of(int activation, const void* gate, int64_t stride, const void* up, int64_t up_stride,
             void* y, int64_t y_stride, int64_t rows, int64_t width, int threads) {
  const auto compute = [&](auto run) {
    run(static_cast<const T*>(gate), stride, static_cast<const T*>(up), up_stride,
        static_cast<T*>(y), y_stride, rows, width, threads);
  };
  switch (activation) {
    case SILU:
      return compute(gate_rows<T, silu>);
    case GELU_TANH:
      return compute(gate_rows<T, gelu_tanh>);
    case RELU_SQUARED:
      return compute(gate_rows<T, relu_squared>);
    case SIGMOID:
      return compute(gate_rows<T, sigmoid>);
    default:
      return compute(gate_rows<T, unchanged>);
  }
}

template <class T>
void heads_of(const HeadsCall& call, int threads) {
  if (call.paired)
    return each_head<T>(call, threads,
                        [&](T* x, const NormWeight&, const float* cos, const float* sin) {
                          turn_pairs(call, x, cos, sin);
                        });
  // A norm over all heads together has been computed before.
  if (!call.query_norm.weight || call.query_norm.width != call.head_dim)
    return turn_heads<T, AsItIs<T>>(call, threads);
  switch (call.query_norm.form) {
    case 0:
      return turn_heads<T, Norm<T, 0>>(call, threads);
    case FROM_ONE:
      return turn_heads<T, Norm<T, FROM_ONE>>(call, threads);
    case CENTERED:
      return turn_heads<T, Norm<T, CENTERED>>(call, threads);
    default:
      return turn_heads<T, Norm<T, ROUNDED_FIRST>>(call, threads);
  }
}

template <class T>
void add_of(const void* x, const void* y, float factor, void* sum, int64_t rows, int64_t width,
            int threads) {
#pragma omp parallel for schedule(static) num_threads(team(rows * width, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const T* first = static_cast<const T*>(x) + r * width;
    const T* second = static_cast<const T*>(y) + r * width;
    T* to = static_cast<T*>(sum) + r * width;
    over(width, [&](int64_t i, auto size) {
      put(to + i, get(first + i, size) + rounded<T>(get(second + i, size) * factor), size);
    });
  }
}

}  // namespace

// y [rows][width]: x, normed; rows of both are `stride` elements apart; y may be x.
void norm(const NormWeight& norm, const void* x, void* y, int64_t stride, int64_t rows, int dtype,
          int threads) {
  (dtype == FLOAT32 ? norm_of<float> : norm_of<bf16>)(norm, x, y, stride, rows, threads);
}

// y: activation(gate) * up, or without up. Rows are a stride apart, in elements; y may be gate or up.
void gate(int activation, const void* gate, int64_t stride, const void* up, int64_t up_stride,
          void* y, int64_t y_stride, int64_t rows, int64_t width, int dtype, int threads) {
  (dtype == FLOAT32 ? gate_of<float> : gate_of<bf16>)(activation, gate, stride, up, up_stride, y,
                                                      y_stride, rows, width, threads);
}

// The norm of a delta net, in place: x [rows][heads * V], gated by the part of the projected rows
// that follows the convolution's channels.
void gated_norm(const LayerSpec& layer, void* x, const void* projected, int64_t rows, int threads) {
  const RecurrentSpec& one = layer.recurrent;
  const auto run = [&](auto* rows_of_x, auto* rows_of_projected) {
    gated_norm_rows(one.norm, rows_of_x, rows_of_projected, DeltaColumns(one), rows, one.num_heads,
                    threads);
  };
  if (layer.dtype == FLOAT32)
    run(static_cast<float*>(x), static_cast<const float*>(projected));
  else
    run(static_cast<bf16*>(x), static_cast<const bf16*>(projected));
}

// Queries and keys of some tokens, in place: normed and turned; see HeadsCall.
void heads(const HeadsCall& call, int dtype, int threads) {
  if (call.norms_last) {
    HeadsCall turned = call;
    turned.query_norm = turned.key_norm = NormWeight{}, turned.norms_last = 0;
    heads(turned, dtype, threads);
    const int64_t bytes = dtype == FLOAT32 ? 4 : 2;
    for (int64_t h = 0; h < call.num_heads; ++h) {
      char* const head = static_cast<char*>(call.query) + h * call.query_head_stride * bytes;
      norm(call.query_norm, head, head, call.query_stride, call.tokens, dtype, threads);
    }
    for (int64_t h = 0; h < call.num_kv_heads; ++h) {
      char* const head = static_cast<char*>(call.key) + h * call.head_dim * bytes;
      norm(call.key_norm, head, head, call.key_stride, call.tokens, dtype, threads);
    }
    return;
  }
  // The queries' norm tells for both: all keys together are as wide as a head if there is one.
  const bool of_heads = call.query_norm.weight && call.query_norm.width == call.head_dim;
  const auto whole = [&](const NormWeight& one, void* x, int64_t stride) {
    if (one.weight && !of_heads) norm(one, x, x, stride, call.tokens, dtype, threads);
  };
  whole(call.query_norm, call.query, call.query_stride);
  whole(call.key_norm, call.key, call.key_stride);
  if (call.rotary_dim || of_heads)
    (dtype == FLOAT32 ? heads_of<float> : heads_of<bf16>)(call, threads);
}

// sum: x + factor * y, [rows][width].
void add(const void* x, const void* y, float factor, void* sum, int64_t rows, int64_t width,
         int dtype, int threads) {
  (dtype == FLOAT32 ? add_of<float> : add_of<bf16>)(x, y, factor, sum, rows, width, threads);
}

}  // namespace HEADRACE_ISA
