// What adapters add to linear layers: y += scale . B . (A . x), for the rows that have an adapter.
//
//   x [K] -- A [r][K] --> u [r] -- B^T [r][N] --> added to y [N], which the layer has stored
//
// Rows are grouped by adapter, so that an adapter is read once for all its rows. Sums are float32, over
// the inputs and then over the ranks, each in its own order: what a row gets depends neither on the rows
// beside it, nor on their adapters, nor on the threads.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "calls.h"
#include "linear_lanes.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int HIGH = 4;  // rows of a tile
constexpr int WIDE = 4;  // ranks of a tile, or vectors of outputs
constexpr int64_t BLOCK = 64;  // rows of an item: what they need of x stays near
constexpr int64_t LEAST = 1 << 14;  // elements of an adapter that are worth a second thread

// Some rows of x or y: where each one begins.
template <class X>
struct Picked {
  X* first;
  int64_t stride;
  const int64_t* rows;

  X* operator[](int64_t i) const { return first + rows[i] * stride; }
  Picked from(int64_t i) const { return {first, stride, rows + i}; }
};

// R rows against C ranks, into u.
template <int R, int C, class W, class X>
void project(const W* a, int64_t inputs, Picked<const X> x, float* u, int64_t u_stride) {
  const X* left[R];
  for (int r = 0; r < R; ++r) left[r] = x[r];
  vf sums[R][C] = {};
  over(inputs, [&](int64_t k, auto size) INLINE_LAMBDA {
    vf right[C];
    UNROLL for (int c = 0; c < C; ++c) right[c] = get(a + c * inputs + k, size);
    UNROLL for (int r = 0; r < R; ++r) {
      const vf one = get(left[r] + k, size);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += one * right[c];
    }
  });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) u[r * u_stride + c] = sum_of(sums[r][c]);
}

// R rows of u, against C vectors of outputs, or a part of one.
template <int R, int C, class W, class X, class Size>
void spread(const LowRank& one, const W* b, const float* u, int64_t u_stride, Picked<X> y, int64_t n,
            Size size) {
  vf sums[R][C] = {};
  for (int64_t j = 0; j < one.rank; ++j) {
    vf right[C];
    UNROLL for (int c = 0; c < C; ++c) right[c] = get(b + j * one.outputs + n + c * VL, size);
    UNROLL for (int r = 0; r < R; ++r) {
      const vf left = splat(u[r * u_stride + j]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      X* to = y[r] + n + c * VL;
      put(to, get(to, size) + alone(sums[r][c] * one.scale), size);
    }
}

// f(first row, how many: a constant), over rows in tiles.
template <class F>
void tiles(int64_t rows, F f) {
  int64_t row = 0;
  for (; row + HIGH <= rows; row += HIGH) f(row, std::integral_constant<int, HIGH>{});
  for (; row < rows; ++row) f(row, std::integral_constant<int, 1>{});
}

// The ranks of item `item` of a block of rows.
template <class W, class X>
void project_item(const LowRank& one, int64_t item, Picked<const X> x, int64_t rows, float* u,
                  int64_t u_stride) {
  const int64_t first = item * WIDE, count = std::min<int64_t>(WIDE, one.rank - first);
  const W* a = static_cast<const W*>(one.a) + first * one.inputs;
  tiles(rows, [&](int64_t row, auto high) {
    float* to = u + row * u_stride + first;
    if (count == WIDE) return project<high(), WIDE>(a, one.inputs, x.from(row), to, u_stride);
    for (int64_t j = 0; j < count; ++j)
      project<high(), 1>(a + j * one.inputs, one.inputs, x.from(row), to + j, u_stride);
  });
}

// The outputs of item `item`, for a block of rows.
template <class W, class X>
void spread_item(const LowRank& one, int64_t item, const float* u, int64_t u_stride, Picked<X> y,
                 int64_t rows) {
  const int64_t first = item * WIDE * VL, end = std::min(one.outputs, first + WIDE * VL);
  const W* b = static_cast<const W*>(one.b);
  tiles(rows, [&](int64_t row, auto high) {
    const float* from = u + row * u_stride;
    const Picked<X> to = y.from(row);
    int64_t n = first;
    if (n + WIDE * VL <= end) return spread<high(), WIDE>(one, b, from, u_stride, to, n, Whole{});
    for (; n + VL <= end; n += VL) spread<high(), 1>(one, b, from, u_stride, to, n, Whole{});
    if (n < end) spread<high(), 1>(one, b, from, u_stride, to, n, Part{end - n});
  });
}

int64_t divided(int64_t count, int64_t by) { return (count + by - 1) / by; }

// f(a group's index, its number of rows, one of its adapter's parts, where in u its ranks begin).
template <class F>
void each_part(const AdaptedRows& adapted, int64_t first, int64_t count, F f) {
  for (int64_t g = 0; g < adapted.groups; ++g) {
    int64_t offset = 0;
    for (int64_t p = first; p < first + count; ++p) {
      const LowRank& one = adapted.adapters[g][p];
      if (one.rank) f(g, one, offset);
      offset += one.rank;
    }
  }
}

template <class X>
void add_low_rank(const AdaptedRows& adapted, int64_t first, int64_t count, const X* x,
                  int64_t x_stride, X* y, int64_t y_stride, int threads) {
  int64_t width = 0, most = 0;
  each_part(adapted, first, count, [&](int64_t, const LowRank& one, int64_t offset) {
    width = std::max(width, offset + one.rank);
    most = std::max(most, one.rank * (one.inputs + one.outputs));
  });
  if (!width) return;
  const auto begin = [&](int64_t g) { return g ? adapted.ends[g - 1] : 0; };
  const int64_t total = adapted.ends[adapted.groups - 1];
  const std::unique_ptr<float[]> u(new float[total * width]);
#pragma omp parallel num_threads(most * total < LEAST ? 1 : threads)
  {
    each_part(adapted, first, count, [&](int64_t g, const LowRank& one, int64_t offset) {
      const int64_t start = begin(g), rows = adapted.ends[g] - start;
      const int64_t items = divided(one.rank, WIDE), blocks = divided(rows, BLOCK);
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < items * blocks; ++i) {
        const int64_t row = i / items * BLOCK, here = std::min(BLOCK, rows - row);
        const Picked<const X> from = {x, x_stride, adapted.rows + start + row};
        float* to = u.get() + (start + row) * width + offset;
        if (one.dtype == FLOAT32)
          project_item<float>(one, i % items, from, here, to, width);
        else
          project_item<bf16>(one, i % items, from, here, to, width);
      }
    });
#pragma omp barrier
    each_part(adapted, first, count, [&](int64_t g, const LowRank& one, int64_t offset) {
      const int64_t start = begin(g), rows = adapted.ends[g] - start;
      const int64_t items = divided(one.outputs, WIDE * VL), blocks = divided(rows, BLOCK);
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < items * blocks; ++i) {
        const int64_t row = i / items * BLOCK, here = std::min(BLOCK, rows - row);
        const float* from = u.get() + (start + row) * width + offset;
        const Picked<X> to = {y + one.column, y_stride, adapted.rows + start + row};
        if (one.dtype == FLOAT32)
          spread_item<float>(one, i % items, from, width, to, here);
        else
          spread_item<bf16>(one, i % items, from, width, to, here);
      }
    });
  }
}

}  // namespace

// Adds to y [T][y_stride] what parts `first` to `first + count` of each row's adapter make of x.
void low_rank(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x,
              int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads) {
  if (dtype == FLOAT32)
    return add_low_rank(adapted, first, count, static_cast<const float*>(x), x_stride,
                        static_cast<float*>(y), y_stride, threads);
  add_low_rank(adapted, first, count, static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(y),
               y_stride, threads);
}

}  // namespace HEADRACE_ISA
