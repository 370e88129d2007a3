// What adapters add to linear layers: y += scale . B . (A . x), for the rows that have an adapter.
//
//   x [K] -- A [r][K] --> u [r] -- B^T [r][N] --> added to y [N], which the layer has stored
//
// The team that computes the layer's product computes this, too: to start another one, and to wait for it
// twice, would take longer than one row does. Each thread has a share of the work that lies in one piece.
//
// Rows are grouped by adapter, so that an adapter is read once for all its rows. Sums are float32, over
// the inputs and then over the ranks, each in its own order: what a row gets depends neither on the rows
// beside it, nor on their adapters, nor on the threads.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "kernels.h"
#include "linear_lanes.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int HIGH = 4;  // rows of a tile
constexpr int WIDE = 4;  // its vectors of outputs
// What lies together in A and B: `pack_a` and `pack_b` of engine/models/low_rank.py have the same numbers.
constexpr int RANKS = 4, INPUTS = 32;
constexpr int64_t OUTPUTS = 64;
constexpr int AHEAD = 4096;  // bytes of them that are brought near before they are read
constexpr int64_t BLOCK = 64;  // rows of an item: what they need of x stays near
constexpr int64_t WEIGHT = 6;  // how many rows take as long as what an item takes for none
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

// Brings near what lies AHEAD of `from`.
template <int BYTES>
INLINE void look_ahead(const void* from) {
  const char* line = static_cast<const char*>(from) + AHEAD;
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(line + i);
}

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // one instruction multiplies pairs of bfloat16

// As many pairs as fill a vector, or fewer and then zeros.
vu pairs(const bf16* p, Whole) { return *reinterpret_cast<const vu*>(p); }
vu pairs(const bf16* p, Part part) {
  bf16 elements[INPUTS] = {};
  std::memcpy(elements, p, part.count * sizeof(bf16));
  return pairs(elements, Whole{});
}
#else
constexpr bool PAIRS = false;
#endif

// sums += R rows from input k on, against C ranks that are `apart`; as many inputs as a vector has.
template <int R, int C, class W, class X, class Size>
INLINE void multiply(vf (&sums)[R][C], const X* const (&x)[R], int64_t k, const W* a, int64_t apart,
                     Size size) {
  vf right[C];
  UNROLL for (int c = 0; c < C; ++c) right[c] = get(a + c * apart, size);
  UNROLL for (int r = 0; r < R; ++r) {
    const vf left = get(x[r] + k, size);
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
  }
}
#if defined(__AVX512BF16__)
template <int R, int C, class Size>
INLINE void multiply(vf (&sums)[R][C], const bf16* const (&x)[R], int64_t k, const bf16* a,
                     int64_t apart, Size size) {
  vu right[C];
  UNROLL for (int c = 0; c < C; ++c) right[c] = pairs(a + c * apart, size);
  UNROLL for (int r = 0; r < R; ++r) {
    const vu left = pairs(x[r] + k, size);
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] = dot_pairs(sums[r][c], left, right[c]);
  }
}
#endif

// R rows against the C ranks of a tile, into u.
template <int R, int C, class W, class X>
void project(const W* a, int64_t inputs, Picked<const X> x, float* u, int64_t u_stride) {
  constexpr int STEP = PAIRS && sizeof(W) == 2 && sizeof(X) == 2 ? 2 * VL : VL;
  const X* left[R];
  for (int r = 0; r < R; ++r) left[r] = x[r];
  vf sums[R][C] = {};
  int64_t k = 0;
  for (; k + INPUTS <= inputs; k += INPUTS, a += C * INPUTS) {
    look_ahead<C * INPUTS * sizeof(W)>(a);
    for (int i = 0; i < INPUTS; i += STEP) multiply(sums, left, k + i, a + i, INPUTS, Whole{});
  }
  const int64_t rest = inputs - k;
  for (; k + STEP <= inputs; k += STEP, a += STEP) multiply(sums, left, k, a, rest, Whole{});
  if (k < inputs) multiply(sums, left, k, a, rest, Part{inputs - k});
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c) u[r * u_stride + c] = sum_of(sums[r][c]);
}

// R rows of u, against C vectors of outputs, or a part of one. Those of a rank are `apart` behind those of
// the one before.
template <int R, int C, class W, class X, class Size>
void spread(const LowRank& one, const W* b, int64_t apart, const float* u, int64_t u_stride,
            Picked<X> y, int64_t n, Size size) {
  vf sums[R][C] = {};
  for (int64_t j = 0; j < one.rank; ++j, b += apart) {
    look_ahead<C * VL * sizeof(W)>(b);
    vf right[C];
    UNROLL for (int c = 0; c < C; ++c) right[c] = get(b + c * VL, size);
    UNROLL for (int r = 0; r < R; ++r) {
      const vf left = splat(u[r * u_stride + j]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    X* to = y[r] + n;
    UNROLL for (int c = 0; c < C; ++c, to += VL)
      put(to, get(to, size) + alone(sums[r][c] * one.scale), size);
  }
}

// f(first row, how many: a constant), over rows in tiles.
template <class F>
void tiles(int64_t rows, F f) {
  int64_t row = 0;
  for (; row + HIGH <= rows; row += HIGH) f(row, std::integral_constant<int, HIGH>{});
  switch (rows - row) {
    case 1: return f(row, std::integral_constant<int, 1>{});
    case 2: return f(row, std::integral_constant<int, 2>{});
    case 3: return f(row, std::integral_constant<int, 3>{});
  }
}

// The ranks of item `item`, C of them, of a block of rows.
template <int C, class W, class X>
void project_ranks(const LowRank& one, int64_t item, Picked<const X> x, int64_t rows, float* u,
                   int64_t u_stride) {
  const int64_t first = item * RANKS;
  const W* a = static_cast<const W*>(one.a) + first * one.inputs;
  tiles(rows, [&](int64_t row, auto high) {
    project<high(), C>(a, one.inputs, x.from(row), u + row * u_stride + first, u_stride);
  });
}

// Items from `item` to `end`, of ranks, for a block of rows.
template <class W, class X>
void project_items(const LowRank& one, int64_t item, int64_t end, Picked<const X> x, int64_t rows,
                   float* u, int64_t u_stride) {
  for (; item < end; ++item) switch (one.rank - item * RANKS) {
      case 1: return project_ranks<1, W>(one, item, x, rows, u, u_stride);
      case 2: return project_ranks<2, W>(one, item, x, rows, u, u_stride);
      case 3: return project_ranks<3, W>(one, item, x, rows, u, u_stride);
      default: project_ranks<RANKS, W>(one, item, x, rows, u, u_stride);
    }
}

// The same of outputs. A row's lie side by side, and are read and written in this order.
template <class W, class X>
void spread_items(const LowRank& one, int64_t item, int64_t end, const float* u, int64_t u_stride,
                  Picked<X> y, int64_t rows) {
  const int64_t last = std::min(one.outputs, end * OUTPUTS);
  tiles(rows, [&](int64_t row, auto high) {
    const float* from = u + row * u_stride;
    const Picked<X> to = y.from(row);
    for (int64_t first = item * OUTPUTS; first < last; first += OUTPUTS) {
      const W* b = static_cast<const W*>(one.b) + first * one.rank;
      const int64_t width = std::min(OUTPUTS, last - first);
      int64_t n = 0;
      const auto add = [&](auto wide, auto size) INLINE_LAMBDA {
        spread<high(), wide()>(one, b + n, width, from, u_stride, to, first + n, size);
        n += wide() * VL;
      };
      while (n + WIDE * VL <= width) add(std::integral_constant<int, WIDE>{}, Whole{});
      while (n + VL <= width) add(std::integral_constant<int, 1>{}, Whole{});
      if (n < width) add(std::integral_constant<int, 1>{}, Part{width - n});
    }
  });
}

int64_t divided(int64_t count, int64_t by) { return (count + by - 1) / by; }

// f(a group's index, one of its adapter's parts, where in u its ranks begin).
template <class F>
void each_part(const Added& call, F f) {
  for (int64_t g = 0; g < call.adapted->groups; ++g) {
    int64_t offset = 0;
    for (int64_t p = call.first; p < call.first + call.count; ++p) {
      const LowRank& one = call.adapted->adapters[g][p];
      if (one.rank) f(g, one, offset);
      offset += one.rank;
    }
  }
}

// f(part, first item, end, first row among all that have adapters, how many, where in u its ranks
// begin), for a thread's share of the items. They follow one another in memory, and take about as long as
// those of others.
template <class Count, class F>
void share(const Added& call, Threads of, Count count, F f) {
  const AdaptedRows& adapted = *call.adapted;
  const auto rows_of = [&](int64_t g) { return adapted.ends[g] - (g ? adapted.ends[g - 1] : 0); };
  const auto weight_of = [&](int64_t g) { return rows_of(g) / divided(rows_of(g), BLOCK) + WEIGHT; };
  int64_t all = 0;
  each_part(call, [&](int64_t g, const LowRank& one, int64_t) {
    all += count(one) * divided(rows_of(g), BLOCK) * weight_of(g);
  });
  int64_t from = all * of.thread / of.threads, to = all * (of.thread + 1) / of.threads;
  each_part(call, [&](int64_t g, const LowRank& one, int64_t offset) {
    const int64_t rows = rows_of(g), start = adapted.ends[g] - rows, blocks = divided(rows, BLOCK);
    const int64_t items = count(one), weight = weight_of(g);
    for (int64_t b = 0; b < blocks; ++b, from -= items * weight, to -= items * weight) {
      const int64_t item = divided(std::max<int64_t>(from, 0), weight);
      const int64_t end = std::min(divided(std::max<int64_t>(to, 0), weight), items);
      const int64_t row = rows * b / blocks;
      if (item < end) f(one, item, end, start + row, rows * (b + 1) / blocks - row, offset);
    }
  });
}

template <class X>
void project_share(const Added& call, Threads of) {
  const auto items = [](const LowRank& one) { return divided(one.rank, RANKS); };
  share(call, of, items, [&](const LowRank& one, int64_t item, int64_t end, int64_t row,
                             int64_t rows, int64_t offset) {
    const Picked<const X> from = {static_cast<const X*>(call.x), call.x_stride,
                                  call.adapted->rows + row};
    float* to = call.u.get() + row * call.width + offset;
    if (one.dtype == FLOAT32)
      project_items<float>(one, item, end, from, rows, to, call.width);
    else
      project_items<bf16>(one, item, end, from, rows, to, call.width);
  });
}

template <class X>
void spread_share(const Added& call, Threads of) {
  const auto items = [](const LowRank& one) { return divided(one.outputs, OUTPUTS); };
  share(call, of, items, [&](const LowRank& one, int64_t item, int64_t end, int64_t row,
                             int64_t rows, int64_t offset) {
    const float* from = call.u.get() + row * call.width + offset;
    const Picked<X> to = {static_cast<X*>(call.y) + one.column, call.y_stride,
                          call.adapted->rows + row};
    if (one.dtype == FLOAT32)
      spread_items<float>(one, item, end, from, call.width, to, rows);
    else
      spread_items<bf16>(one, item, end, from, call.width, to, rows);
  });
}

}  // namespace

Added::Added(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x,
             int64_t x_stride, void* y, int64_t y_stride, int dtype)
    : adapted(&adapted), first(first), count(count), x(x), x_stride(x_stride), y(y),
      y_stride(y_stride), dtype(dtype) {
  each_part(*this, [&](int64_t, const LowRank& one, int64_t offset) {
    width = std::max(width, offset + one.rank);
  });
  const int64_t rows = adapted.groups ? adapted.ends[adapted.groups - 1] : 0;
  if (width) u.reset(new float[rows * width]);
}

void Added::project(Threads of) const {
  dtype == FLOAT32 ? project_share<float>(*this, of) : project_share<bf16>(*this, of);
}

void Added::spread(Threads of) const {
  dtype == FLOAT32 ? spread_share<float>(*this, of) : spread_share<bf16>(*this, of);
}

// Adds to y [T][y_stride] what parts `first` to `first + count` of each row's adapter make of x.
void low_rank(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x,
              int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads) {
  const Added added(adapted, first, count, x, x_stride, y, y_stride, dtype);
  if (!added.width) return;
  int64_t most = 0;
  each_part(added, [&](int64_t, const LowRank& one, int64_t) {
    most = std::max(most, one.rank * (one.inputs + one.outputs));
  });
#pragma omp parallel num_threads(most * adapted.ends[adapted.groups - 1] < LEAST ? 1 : threads)
  {
    const Threads of = {omp_get_thread_num(), omp_get_num_threads()};
    added.project(of);
#pragma omp barrier
    added.spread(of);
  }
}

}  // namespace HEADRACE_ISA
