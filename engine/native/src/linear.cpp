// Linear layers over weights that were packed when the model was loaded: y = x . W^T + bias, of
// bfloat16 or float32, summed in float32. Weights are of the same type, or int8 with a scale for each
// output where x is bfloat16.
//
//   packed: [groups][pairs][NR][VL] pairs of bfloat16. A panel is VL outputs, a group NR panels (the
//   last one may be narrower), a pair two inputs side by side. So one vector of 32-bit numbers is
//   two inputs of VL outputs, and weights are read as they lie, from the first to the last, once for
//   all rows where these are few: processors bring near by themselves what is read in one sequence,
//   and only that at the full speed of the memory. Weights of whole groups that lie one behind the
//   other are those of one layer with all their outputs.
//   Of float32: the same, with one input in place of a pair.
//   Of int8: the same, and an input of an output is one byte, its code minus 128. Such a number is a
//   bfloat16 exactly, so that sums are as exact as those of bfloat16 weights, and are scaled
//   afterwards. One tile turns them into bfloat16 as it reads them; for several tiles an item's are
//   turned once, or those of a group for all items of a thread.
//   Of int4: eight inputs in place of a pair; see linear_layout.h. Codes are 8 more than the numbers.
//   Where integers have a scale for each group of inputs, the sums of a group are scaled and added to
//   those of the groups before. Where they have minima, too, each adds its share of the group's sum of
//   x, which is computed once for all panels.
//
// Weights may have an order of their inputs: then x is put in that order, once for all panels.
//
// An item of work is a few rows against C panels. A tile keeps R rows x C panels of sums in
// registers, and takes the inputs in their order: what a row yields depends neither on the rows
// beside it nor on the threads. Where an item is several tiles, which read the same weights, each of
// them brings a part of the next item's near.
//
// With AMX, tiles of matrices do all of that for bfloat16: see linear_amx.h. Weights of int8 are turned first.
//
// Where no instruction multiplies pairs of bfloat16, x is turned into float32 once for all panels, and
// weights as a tile reads them: first those of a pair's first input, then those of its second. Codes of int4
// are read in their places, as multiples of powers of 16, and x is divided by these.
//
// What adapters add to the product (low_rank.cpp) is computed by the same team.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "kernels.h"
#include "linear_amx.h"
#include "linear_lanes.h"

namespace HEADRACE_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // one instruction multiplies pairs of bfloat16
#else
constexpr bool PAIRS = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif
// Rows of a tile for steps of X. The sums of a tile, and what is multiplied, fill the registers.
template <class X>
constexpr int ROWS = NR == 2 && sizeof(X) == sizeof(float) ? 4 : 6;
// Of the only tile of an item.
template <class X>
constexpr int ALONE = AMX && sizeof(X) == 2 ? TILE : ROWS<X>;
// What a tile reads for steps of X.
template <class X>
using Input = std::conditional_t<PAIRS, X, float>;

constexpr int FEW = 2;  // rows whose sums leave registers for the panels of two groups
constexpr int FEW_TILES = 4;  // that read codes as fast as what these would be turned into
constexpr int STEP = 4;  // pairs of inputs between two looks ahead
constexpr int64_t CHUNK = 768 << 10;  // bytes of weights that stay in a cache, for AMX
// Of an item: x for them stays in the nearest caches.
template <class X>
constexpr int64_t ITEM_ROWS = AMX && sizeof(X) == 2 ? 256 : 96;

typedef uint32_t unaligned_pair __attribute__((aligned(2), may_alias));

// Rows of an item: where those of x and y begin, and the sums of each group of x, where they are needed.
template <class X>
struct Rows {
  const Input<X>* x;
  int64_t x_stride;
  X* y;
  int64_t y_stride;
  const float* sums;
  int64_t groups;

  Rows from(int64_t row) const {
    return {x + row * x_stride, x_stride, y + row * y_stride, y_stride, sums + row * groups, groups};
  }
};

// sums += pair k + i of R rows, from x on, against C panels.
#if defined(__AVX512BF16__)
template <int R, int C, class W>
INLINE void add_pair(vf (&sums)[R][C], Weights<W> weights, int64_t k, int i, const bf16* x,
                     int64_t x_stride) {
  vu right[C];
  weights = weights.read_again();
  UNROLL for (int c = 0; c < C; ++c) right[c] = weights.pairs(k, i, c);
  UNROLL for (int r = 0; r < R; ++r) {
    const vu left = *reinterpret_cast<const unaligned_pair*>(x + r * x_stride) - vu{};
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] = dot_pairs(sums[r][c], left, right[c]);
  }
}
#endif
// The same of inputs in float32: of pairs, the first, then the second.
template <int R, int C, class W>
INLINE void add_pair(vf (&sums)[R][C], Weights<W> weights, int64_t k, int i, const float* x,
                     int64_t x_stride) {
  vf right[C];
  UNROLL for (int c = 0; c < C; ++c) right[c] = weights.first(k, i, c);
  UNROLL for (int r = 0; r < R; ++r) {
    const vf left = splat(x[r * x_stride]);
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
  }
  if constexpr (!Weights<W>::IS_FLOAT) {
    UNROLL for (int c = 0; c < C; ++c) right[c] = weights.second(k, i, c);
    UNROLL for (int r = 0; r < R; ++r) {
      const vf left = splat(x[r * x_stride + 1]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
    }
  }
}

// Whether sums are scaled once, at the end.
bool is_scaled_by_row(const LinearWeight& weight) {
  return weight.bits == 8 && weight.group >= weight.inputs && !weight.minima;
}

// Whether several tiles read bfloat16 that their weights were turned into. To look int4 up again costs a
// tile of pairs less.
bool is_turned(const LinearWeight& weight) { return weight.bits == 8 || (weight.bits && !PAIRS); }

// Whether int4 are multiplied as the codes that lie there, in their places in a lane: they are masked and
// converted, and neither shifted nor lowered by 8. A group's sums begin with -8 times its sum of x, unless
// there are minima, which hold that already.
bool keeps_codes(const LinearWeight& weight) { return !PAIRS && weight.bits == 4; }

bool needs_sums(const LinearWeight& weight) { return weight.minima || keeps_codes(weight); }

// x divided by what its codes are multiplied by in their places: exactly, unless it is below 2^-102. The code
// in the last place is shifted instead.
void divide_by_places(int64_t inputs, float* x) {
  constexpr int INPUTS = 2 * INT4_PAIRS;
  static constexpr float INVERSE[INPUTS] = {1.0f,   0x1p-16f, 0x1p-4f,  0x1p-20f,
                                            0x1p-8f, 0x1p-24f, 0x1p-12f, 1.0f};
  for (; inputs >= INPUTS; inputs -= INPUTS, x += INPUTS)
    for (int i = 0; i < INPUTS; ++i) x[i] *= INVERSE[i];
  for (int i = 0; i < inputs; ++i) x[i] *= INVERSE[i];
}

// The results of some rows and a panel, from their sums, which are `apart` vectors apart: VL outputs of
// each, or fewer at the end.
template <class X>
INLINE void finish(const LinearWeight& weight, int64_t panel, const vf* sums, int apart, int count,
                   Rows<X> rows) {
  const int64_t first = panel * VL, width = std::min<int64_t>(VL, weight.outputs - first);
  const vf scale = is_scaled_by_row(weight) ? load_of_group<SCALE>(weight, first, 0) : splat(1.0f);
  const vf bias = weight.bias ? load(weight.bias + first) : vf{};
  X* y = rows.y + first;
  for (int r = 0; r < count; ++r, y += rows.y_stride) {
    const vf result = sums[r * apart] * scale + bias;
    if (width == VL)
      store(y, result);
    else
      for (int i = 0; i < width; ++i) from_float(result[i], y + i);
    if constexpr (sizeof(X) == 2)
      if (weight.finished)
        for (int i = 0; i < width; ++i) y[i].bits = weight.finished[y[i].bits];
  }
}

// R rows against C panels; see the top. `lines` cache lines from `ahead` on are brought near for every
// STEP pairs.
template <int R, int C, class Of, class X>
void tile(const LinearWeight& weight, Of weights, int64_t panel, Rows<X> rows, const char* ahead,
          int lines) {
  constexpr bool pairs_of_x = sizeof(Input<X>) == 2;
  constexpr int width = Of::IS_FLOAT ? 1 : 2;  // inputs of a pair
  const Input<X>* x = rows.x;
  const int64_t x_stride = rows.x_stride;
  const int64_t pairs = num_pairs(weight), whole = pairs_of_x ? weight.inputs / 2 : pairs;
  vf sums[R][C] = {};
  int64_t k = 0;
  const auto add = [&](int i) INLINE_LAMBDA {
    add_pair(sums, weights, k, i, x + width * (k + i), x_stride);
  };
  const auto add_until = [&](int64_t end) INLINE_LAMBDA {
    for (; k + STEP <= end; k += STEP) {
      for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      if constexpr (Of::IS_INT4)
        add(0), add(1), add(2), add(3);  // by how much lanes are shifted is known
      else
        for (int i = 0; i < STEP; ++i) add(i);
    }
    for (int i = 0; i < end - k; ++i) add(i);
  };
  const auto add_last = [&]() INLINE_LAMBDA {
    if constexpr (pairs_of_x)
      if (whole < pairs) {
        bf16 last[2 * R] = {};
        for (int r = 0; r < R; ++r) last[2 * r] = x[r * x_stride + 2 * whole];
        add_pair(sums, weights, whole / STEP * STEP, int(whole % STEP), last, 2);
      }
  };
  if constexpr (Of::IS_SCALED_BY_GROUP) {
    vf totals[R][C] = {};
    const int64_t groups = num_groups(weight), step = weight.group / 2;
    const float centre = weight.bits == 4 ? 8.0f : 128.0f;
    const bool keeps = keeps_codes(weight), lowers = keeps && !weight.minima;
    for (int64_t g = 0; g < groups; ++g) {
      if (lowers)
        UNROLL for (int r = 0; r < R; ++r) {
          const vf of_centre = splat(-centre * rows.sums[r * groups + g]);
          UNROLL for (int c = 0; c < C; ++c) sums[r][c] = of_centre;
        }
      const bool is_last = g + 1 == groups;
      add_until(is_last ? whole : (g + 1) * step);
      if (is_last) add_last();
      UNROLL for (int c = 0; c < C; ++c) {
        const int64_t output = (panel + c) * VL;
        const vf scale = load_of_group<SCALE>(weight, output, g);
        UNROLL for (int r = 0; r < R; ++r) totals[r][c] += sums[r][c] * scale, sums[r][c] = vf{};
        if (weight.minima) {
          vf least = load_of_group<MINIMUM>(weight, output, g);
          if (!keeps) least += scale * centre;
          UNROLL for (int r = 0; r < R; ++r) totals[r][c] += least * rows.sums[r * groups + g];
        }
      }
    }
    for (int c = 0; c < C; ++c) finish(weight, panel + c, &totals[0][c], C, R, rows);
  } else {
    add_until(whole);
    add_last();
    for (int c = 0; c < C; ++c) finish(weight, panel + c, &sums[0][c], C, R, rows);
  }
}

template <int C, class Of, class X, int R = C <= NR ? ROWS<X> : FEW>
void tile_of_rows(int count, const LinearWeight& weight, Of weights, int64_t panel, Rows<X> rows,
                  const char* ahead, int lines) {
  if (count == R) return tile<R, C>(weight, weights, panel, rows, ahead, lines);
  if constexpr (R > 1)
    tile_of_rows<C, Of, X, R - 1>(count, weight, weights, panel, rows, ahead, lines);
}

// `count` rows against C panels, in tiles of about the same height. From `ahead` on lie `bytes` that are
// to be brought near meanwhile.
template <int C, class Of, class X>
void tiles(const LinearWeight& weight, Of weights, int64_t panel, Rows<X> rows, int64_t count,
           const char* ahead, int64_t bytes) {
  const int64_t tiles = divide_up(count, ROWS<X>), steps = num_pairs(weight) / STEP;
  const int64_t lines = steps ? divide_up(bytes, 64 * steps * tiles) : 0;
  const char* end = ahead + bytes;
  for (int64_t t = 0, row = 0; t < tiles; ++t, ahead += steps * lines * 64) {
    const int64_t next = count * (t + 1) / tiles;
    tile_of_rows<C>(int(next - row), weight, weights, panel, rows.from(row), ahead,
                    ahead < end ? int(lines) : 0);
    row = next;
  }
}

#if defined(__AMX_BF16__)
// `rows` rows against C panels, by AMX.
template <int C, class W>
void amx_tiles(const LinearWeight& weight, Weights<W> weights, int64_t panel, Rows<bf16> all,
               int64_t rows, const char* ahead, int64_t bytes) {
  const int64_t blocks = divide_up(num_pairs(weight), TILE);
  const int64_t steps = blocks * divide_up(rows, 2 * TILE) * (rows <= TILE ? 1 : divide_up(C, 2));
  const int lines = int(divide_up(bytes, 64 * steps));
  const char* end = ahead + bytes;
  const int64_t whole = weight.inputs / (2 * TILE), left = num_pairs(weight) - whole * TILE;
  // Blocks of weights that are not read as they lie: of int8 two in turns, of which one is turned while the
  // other is multiplied; and the last pairs, followed by zeros.
  constexpr bool turns = sizeof(W) == 2;
  alignas(64) uint32_t ready[3][C][TILE][VL];
  const auto make_ready = [&](int64_t slot, int64_t block, int64_t pairs) {
    for (int c = 0; c < C; ++c)
      for (int64_t k = 0; k < pairs; ++k)
        *reinterpret_cast<vu*>(ready[slot][c][k]) = weights.pairs(block * TILE + k, 0, c);
    __asm__ volatile("" : : : "memory");  // a tile may read it now
  };
  if (left) {
    std::memset(ready[2], 0, sizeof(ready[2]));
    make_ready(2, whole, left);
  }
  const auto weights_at = [&](int64_t i, int c) {
    if (turns && !c)
      for (int64_t next = i ? i + 1 : 0; next < std::min(i + 2, whole); ++next)
        make_ready(next % 2, next, TILE);
    if (!turns && i < whole)
      return Block{weights.panel(i * TILE, c), weights.stride * int64_t(sizeof(W))};
    return Block{ready[i < whole ? i % 2 : 2][c], sizeof(ready[0][c][0])};
  };
  alignas(64) bf16 last[2 * TILE][2 * TILE] = {};  // of x, the same
  const int64_t inputs = weight.inputs - whole * 2 * TILE;
  for (int64_t row = 0; row < rows; row += 2 * TILE) {
    const int count = int(std::min<int64_t>(2 * TILE, rows - row));
    for (int r = 0; inputs && r < count; ++r)
      std::memcpy(last[r], all.from(row + r).x + whole * 2 * TILE, inputs * sizeof(bf16));
    const auto x_at = [&](int64_t i, int64_t first) {
      return i < whole ? Block{all.from(row + first).x + i * 2 * TILE,
                               all.x_stride * int64_t(sizeof(bf16))}
                       : Block{last[first], sizeof(last[0])};
    };
    const auto made = [&](int c, const vf* sums, int64_t first, int count) {
      finish(weight, panel + c, sums, 1, count, all.from(row + first));
    };
    ahead = tiles_of_sums<C>(count, blocks, x_at, weights_at, made, ahead, ahead < end ? lines : 0);
  }
}
#endif

// A thread's own memory for an item's weights in bfloat16, and the panel that they are from.
struct Turned {
  std::unique_ptr<uint32_t[]> pairs;
  int64_t panel = -1;
};

// `count` rows against C panels.
template <int C, class X>
void item(const LinearWeight& weight, int64_t panel, Rows<X> rows, int64_t count, Turned& turned) {
  const int64_t lanes = num_lanes(weight), lane = lane_bytes(weight), group = NR * lanes * VL;
  const Panel place(weight, panel);
  const char* from = static_cast<const char*>(weight.packed) + place.start * lane;
  // Several tiles bring near what the next item reads. A single one of vectors of 8, or of integers,
  // brings near what it reads itself a little later; others read as fast as numbers come.
  const int64_t size = C * lanes * VL * lane;
  const int64_t left = (num_panels(weight) * lanes * VL - place.start) * lane;
  const bool is_alone = count <= ALONE<X>, by_tiles = AMX && sizeof(X) == 2;
  const int64_t distance = !is_alone ? size : by_tiles ? 16 << 10 : NR == 2 ? 2048 : 12 << 10;
  const bool looks_ahead = C == NR && (!is_alone || by_tiles || NR == 2 || weight.bits);
  const char* ahead = from + distance;
  const int64_t bytes = looks_ahead ? std::min(size, left - distance) : 0;
  const auto by_groups = [&](auto weights) {  // AMX would add sums of groups before they are scaled
    tiles<C>(weight, weights, panel, rows, count, ahead, bytes);
  };
  const auto multiply_by = [&](auto weights) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(X) == 2)
      return amx_tiles<C>(weight, weights, panel, rows, count, ahead, bytes);
#endif
    by_groups(weights);
  };
  if constexpr (sizeof(X) == sizeof(float)) {
    multiply_by(Weights<float>{reinterpret_cast<const float*>(from), place.stride, group});
  } else {
    const auto of_integers = [&](auto weights) {
      const bool by_row = is_scaled_by_row(weight);
      const bool as_they_lie =
          is_alone || !is_turned(weight) || (keeps_codes(weight) && count <= FEW_TILES * ROWS<X>);
      if (as_they_lie && by_row) return multiply_by(weights);
      if (as_they_lie) return by_groups(Grouped<typename decltype(weights)::Lane>{weights});
      if (turned.panel != panel) {
        const int64_t pairs = num_pairs(weight);
        for (int64_t k = 0; k < pairs; k += INT4_PAIRS)
          for (int i = 0; i < std::min<int64_t>(INT4_PAIRS, pairs - k); ++i)
            for (int c = 0; c < C; ++c)
              *reinterpret_cast<vu*>(turned.pairs.get() + ((k + i) * C + c) * VL) =
                  weights.pairs(k, i, c);
        turned.panel = panel;
      }
      const Weights<uint32_t> pairs = {turned.pairs.get(), C * VL, 0};
      by_row ? multiply_by(pairs) : by_groups(Grouped<uint32_t>{pairs});
    };
    if (weight.bits == 4)
      of_integers(Weights<int4>{reinterpret_cast<const int4*>(from), place.stride, group});
    else if (weight.bits)
      of_integers(Weights<uint16_t>{reinterpret_cast<const uint16_t*>(from), place.stride, group});
    else
      multiply_by(Weights<uint32_t>{reinterpret_cast<const uint32_t*>(from), place.stride, group});
  }
}

// A row of x as tiles read it, in the order of the weight's inputs; in float32 an odd one is followed by 0.
template <class X, class To>
void arrange(const LinearWeight& weight, const X* x, To* to) {
  const int64_t inputs = weight.inputs;
  int64_t k = 0;
  if constexpr (std::is_same_v<X, To>) {
    for (; k < inputs; ++k) to[k] = x[weight.order[k]];
  } else if (weight.order) {
    for (; k < inputs; ++k) to[k] = to_float(x[weight.order[k]]);
  } else {
    for (; k + VL <= inputs; k += VL) store(to + k, load(x + k));
    for (; k < inputs; ++k) to[k] = to_float(x[k]);
  }
  if (inputs % 2) to[inputs] = To{};
}

// The sums of each group of a row.
template <class T>
void add_groups(const LinearWeight& weight, const T* x, float* sums) {
  for (int64_t k = 0; k < weight.inputs;) {
    const int64_t end = std::min(k + weight.group, weight.inputs);
    vf lanes = {};
    for (; k + VL <= end; k += VL) lanes += load(x + k);
    float sum = sum_of(lanes);
    for (; k < end; ++k) sum += to_float(x[k]);
    *sums++ = sum;
  }
}

template <int C, class X>
void multiply(const LinearWeight& weight, const X* x, int64_t x_stride, X* y,
              int64_t y_stride, int64_t rows, int threads, const Added* added) {
  constexpr bool turns = !std::is_same_v<Input<X>, X>;
  const bool arranges = turns || weight.order;
  const int64_t panels = num_panels(weight), groups = divide_up(panels, C);
  const int64_t blocks = divide_up(rows, ITEM_ROWS<X>), width = 2 * num_pairs(weight);
  // Groups that are multiplied by all blocks of rows together, so that x is read less often.
  const int64_t together =
      AMX && sizeof(X) == 2 ? std::max<int64_t>(1, CHUNK / (C * VL * width * 2)) : 1;
  // Not initialised: what is read has been written before.
  const std::unique_ptr<Input<X>[]> arranged(arranges ? new Input<X>[rows * width] : nullptr);
  const int64_t scaled = needs_sums(weight) ? num_groups(weight) : 0;
  const std::unique_ptr<float[]> sums(scaled ? new float[rows * scaled] : nullptr);
#pragma omp parallel num_threads(threads)
  {
    const Threads own = {omp_get_thread_num(), omp_get_num_threads()};
    if (added) added->project(own);
    if (arranges || scaled) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        const X* from = x + row * x_stride;
        Input<X>* to = arranged.get() + row * width;
        if (arranges) arrange(weight, from, to);
        if (scaled && arranges) add_groups(weight, to, sums.get() + row * scaled);
        if (scaled && !arranges) add_groups(weight, from, sums.get() + row * scaled);
        if constexpr (turns && sizeof(X) == 2)
          if (keeps_codes(weight)) divide_by_places(weight.inputs, to);
      }
    }
    Rows<X> all = {arranged.get(), width, y, y_stride, sums.get(), scaled};
    if constexpr (!turns)
      if (!arranges) all.x = x, all.x_stride = x_stride;
    const bool converts = is_turned(weight) && rows > ALONE<X>;
    Turned turned = {
        std::unique_ptr<uint32_t[]>(converts ? new uint32_t[C * num_pairs(weight) * VL] : nullptr)};
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < groups * blocks; ++i) {
      const int64_t before = i / (together * blocks) * together, at = i - before * blocks;
      const int64_t here = std::min(together, groups - before), b = at / here;
      const int64_t row = rows * b / blocks, count = rows * (b + 1) / blocks - row;
      int64_t panel = (before + at % here) * C;
      const int64_t last = std::min(panels, panel + C);
      if (panel + C <= last) {
        item<C>(weight, panel, all.from(row), count, turned);
        continue;
      }
      for (; panel < last; ++panel) item<1>(weight, panel, all.from(row), count, turned);
    }
#if defined(__AMX_BF16__)
    _tile_release();  // what is in use is saved whenever the thread waits
#endif
    if (added) {
#pragma omp barrier
      added->spread(own);
    }
  }
}

template <class X>
void linear_of(const LinearWeight& weight, const X* x, int64_t x_stride, X* y, int64_t y_stride,
               int64_t rows, int threads, const Added* added) {
  // Few panels to a thread: narrower items, so that no thread is idle.
  const int64_t items = num_panels(weight) * divide_up(rows, ITEM_ROWS<X>);
  if constexpr (NR == 2 && sizeof(X) == 2)
    if (rows == 1 && keeps_codes(weight) && items >= 8 * NR * threads)
      return multiply<4 * NR>(weight, x, x_stride, y, y_stride, rows, threads, added);
  if constexpr (NR == 2)  // sums of more panels do not wait for each other
    if (rows <= FEW && items >= 4 * NR * threads)
      return multiply<2 * NR>(weight, x, x_stride, y, y_stride, rows, threads, added);
  if (items >= 2 * NR * threads)
    return multiply<NR>(weight, x, x_stride, y, y_stride, rows, threads, added);
  if (items >= 2 * threads)
    return multiply<2>(weight, x, x_stride, y, y_stride, rows, threads, added);
  multiply<1>(weight, x, x_stride, y, y_stride, rows, threads, added);
}

}  // namespace

// y from x: [rows][outputs] and [rows][inputs], whose rows are `y_stride` and `x_stride` elements apart.
void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t y_stride,
            int64_t rows, int threads, const Added* added) {
  if (weight.dtype == FLOAT32)
    return linear_of(weight, static_cast<const float*>(x), x_stride, static_cast<float*>(y),
                     y_stride, rows, threads, added);
  linear_of(weight, static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(y), y_stride, rows,
            threads, added);
}

void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t y_stride,
            int64_t rows, int threads) {
  linear(weight, x, x_stride, y, y_stride, rows, threads, nullptr);
}

}  // namespace HEADRACE_ISA
