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
//   Of int8: the same, and an input of an output is one byte. A number from -127 to 127 is a bfloat16
//   exactly, so that sums are as exact as those of bfloat16 weights, and are scaled at the end. One
//   tile turns them into bfloat16 as it reads them; for several tiles an item's are turned once.
//   Of int4: the same, and a pair is one byte, with its first input in the lower half; 8 is added to
//   each. The sums of a group of inputs are scaled and added to those of the groups before.
//
// An item of work is a few rows against C panels. A tile keeps R rows x C panels of sums in
// registers, and takes the inputs in their order: what a row yields depends neither on the rows
// beside it nor on the threads. Where an item is several tiles, which read the same weights, each of
// them brings a part of the next item's near.
//
// With AMX, tiles of matrices do all of that for bfloat16: see linear_amx.h. Weights of int8 are turned first.
//
// Where no instruction multiplies pairs of bfloat16, x is turned into float32 once for all panels, and
// weights as a tile reads them: first those of a pair's first input, then those of its second.
#include <omp.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "calls.h"
#include "linear_amx.h"
#include "linear_layout.h"
#include "vec.h"

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

// Registers hold a tile's sums only if every loop over them is unrolled, in one function.
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline)) inline
#define INLINE_LAMBDA __attribute__((always_inline))

constexpr int FEW = 2;  // rows whose sums leave registers for the panels of two groups
constexpr int STEP = 4;  // pairs of inputs between two looks ahead
constexpr int64_t CHUNK = 768 << 10;  // bytes of weights that stay in a cache, for AMX
// Of an item: x for them stays in the nearest caches.
template <class X>
constexpr int64_t ITEM_ROWS = AMX && sizeof(X) == 2 ? 256 : 96;

typedef uint32_t unaligned_pair __attribute__((aligned(2), may_alias));

// One input of VL outputs, as float32: the only one, or one of two.
vf load_first(const float* p) { return load(p); }
vf load_first(const uint32_t* p) { return (vf)(*reinterpret_cast<const vu*>(p) << 16); }
vf load_second(const uint32_t* p) { return (vf)(*reinterpret_cast<const vu*>(p) & 0xffff0000u); }
vf load_first(const uint16_t* p) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  return __builtin_convertvector((vi)(pairs << 24) >> 24, vf);
}
vf load_first(const uint8_t* p) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vb*>(p), vu);
  return __builtin_convertvector((vi)(pairs & 15u) - 8, vf);
}
vf load_second(const uint8_t* p) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vb*>(p), vu);
  return __builtin_convertvector((vi)(pairs >> 4) - 8, vf);
}
vf load_second(const uint16_t* p) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  return __builtin_convertvector((vi)(pairs << 16) >> 24, vf);
}
// Two inputs of VL outputs, as bfloat16.
#if defined(__AVX512BF16__)
vu load_pairs(const uint32_t* p) { return *reinterpret_cast<const vu*>(p); }
#endif
vu load_pairs(const uint16_t* p) {
#if defined(__AVX512BF16__)
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
  return (vu)_mm512_cvtne2ps_pbh(second, first);
#else
  // The lower halves are zero: 8 bits are enough for them.
  return (vu)load_first(p) >> 16 | (vu)load_second(p);
#endif
}

vu load_pairs(const uint8_t* p) {
#if defined(__AVX512BF16__)
  // Each number is looked up; of an index, 5 bits count, of which the fifth may be anything.
#define HEADRACE_FROM_8                                                                      \
  0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, \
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0
  alignas(64) static constexpr uint16_t NUMBERS[32] = {HEADRACE_FROM_8, HEADRACE_FROM_8};
#undef HEADRACE_FROM_8
  const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i indices = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
  return (vu)_mm512_permutexvar_epi16(indices, _mm512_load_si512(NUMBERS));
#else
  return (vu)load_first(p) >> 16 | (vu)load_second(p);
#endif
}

// Weights of C panels: pairs are `stride` lanes apart, groups `group`. W: uint32_t, two bfloat16;
// uint16_t, two int8; uint8_t, two int4; float, one float32.
template <class W>
struct Weights {
  using Lane = W;
  static constexpr bool SCALED_BY_GROUP = false;
  const W* from;
  int64_t stride, group;

  const W* panel(int64_t k, int c) const {
    return from + c / NR * group + k * stride + c % NR * VL;
  }
};

// The same, of int4, as it lies or turned into bfloat16.
template <class W>
struct Grouped : Weights<W> {
  static constexpr bool SCALED_BY_GROUP = true;
};

// sums += a pair of inputs of R rows, from x on, against C panels.
#if defined(__AVX512BF16__)
template <int R, int C, class W>
INLINE void add_pair(vf (&sums)[R][C], Weights<W> weights, int64_t k, const bf16* x,
                     int64_t x_stride) {
  vu right[C];
  UNROLL for (int c = 0; c < C; ++c) right[c] = load_pairs(weights.panel(k, c));
  UNROLL for (int r = 0; r < R; ++r) {
    const vu left = *reinterpret_cast<const unaligned_pair*>(x + r * x_stride) - vu{};
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] = dot_pairs(sums[r][c], left, right[c]);
  }
}
#endif
// The same of inputs in float32: of pairs, the first, then the second.
template <int R, int C, class W>
INLINE void add_pair(vf (&sums)[R][C], Weights<W> weights, int64_t k, const float* x,
                     int64_t x_stride) {
  vf right[C];
  UNROLL for (int c = 0; c < C; ++c) right[c] = load_first(weights.panel(k, c));
  UNROLL for (int r = 0; r < R; ++r) {
    const vf left = splat(x[r * x_stride]);
    UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
  }
  if constexpr (!std::is_same_v<W, float>) {
    UNROLL for (int c = 0; c < C; ++c) right[c] = load_second(weights.panel(k, c));
    UNROLL for (int r = 0; r < R; ++r) {
      const vf left = splat(x[r * x_stride + 1]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] += left * right[c];
    }
  }
}

// The results of some rows and a panel, from their sums, which are `apart` vectors apart: VL outputs of
// each, or fewer at the end.
template <class X>
INLINE void finish(const LinearWeight& weight, int64_t panel, const vf* sums, int apart, int rows,
                   X* y, int64_t y_stride) {
  const int64_t first = panel * VL, count = std::min<int64_t>(VL, weight.outputs - first);
  const float* scales = static_cast<const float*>(weight.scales);
  const vf scale = weight.bits == 8 ? load(scales + first) : splat(1.0f);
  const vf bias = weight.bias ? load(weight.bias + first) : vf{};
  y += first;
  for (int r = 0; r < rows; ++r, y += y_stride) {
    const vf result = sums[r * apart] * scale + bias;
    if (count == VL)
      store(y, result);
    else
      for (int i = 0; i < count; ++i) from_float(result[i], y + i);
    if constexpr (sizeof(X) == 2)
      if (weight.finished)
        for (int i = 0; i < count; ++i) y[i].bits = weight.finished[y[i].bits];
  }
}

// R rows from x on against C panels; see the top. `lines` cache lines from `ahead` on are brought near
// for every STEP pairs.
template <int R, int C, class Of, class X>
void tile(const LinearWeight& weight, Of weights, int64_t panel, const Input<X>* x,
          int64_t x_stride, X* y, int64_t y_stride, const char* ahead, int lines) {
  constexpr bool pairs_of_x = sizeof(Input<X>) == 2;
  constexpr int width = std::is_same_v<typename Of::Lane, float> ? 1 : 2;  // inputs of a lane
  const int64_t pairs = num_pairs(weight), whole = pairs_of_x ? weight.inputs / 2 : pairs;
  vf sums[R][C] = {};
  int64_t k = 0;
  const auto add_until = [&](int64_t end) INLINE_LAMBDA {
    for (; k + STEP <= end; k += STEP) {
      for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      for (int i = 0; i < STEP; ++i) add_pair(sums, weights, k + i, x + width * (k + i), x_stride);
    }
    for (; k < end; ++k) add_pair(sums, weights, k, x + width * k, x_stride);
  };
  const auto add_last = [&]() INLINE_LAMBDA {
    if constexpr (pairs_of_x)
      if (k < pairs) {
        bf16 last[2 * R] = {};
        for (int r = 0; r < R; ++r) last[2 * r] = x[r * x_stride + 2 * k];
        add_pair(sums, weights, k, last, 2);
      }
  };
  if constexpr (Of::SCALED_BY_GROUP) {
    vf totals[R][C] = {};
    const int64_t groups = num_groups(weight), step = weight.group / 2;
    const f16* scales = static_cast<const f16*>(weight.scales);
    for (int64_t g = 0; g < groups; ++g) {
      add_until(std::min(whole, (g + 1) * step));
      if (g + 1 == groups) add_last();
      UNROLL for (int c = 0; c < C; ++c) {
        const vf scale = load(scales + scale_at(weight, (panel + c) * VL, g));
        UNROLL for (int r = 0; r < R; ++r) totals[r][c] += sums[r][c] * scale, sums[r][c] = vf{};
      }
    }
    for (int c = 0; c < C; ++c) finish(weight, panel + c, &totals[0][c], C, R, y, y_stride);
  } else {
    add_until(whole);
    add_last();
    for (int c = 0; c < C; ++c) finish(weight, panel + c, &sums[0][c], C, R, y, y_stride);
  }
}

template <int C, class Of, class X, int R = C <= NR ? ROWS<X> : FEW>
void tile_of_rows(int rows, const LinearWeight& weight, Of weights, int64_t panel,
                  const Input<X>* x, int64_t x_stride, X* y, int64_t y_stride, const char* ahead,
                  int lines) {
  if (rows == R) return tile<R, C>(weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
  if constexpr (R > 1)
    tile_of_rows<C, Of, X, R - 1>(rows, weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
}

// `rows` rows against C panels, in tiles of about the same height. From `ahead` on lie `bytes` that are to
// be brought near meanwhile.
template <int C, class Of, class X>
void tiles(const LinearWeight& weight, Of weights, int64_t panel, const Input<X>* x,
           int64_t x_stride, X* y, int64_t y_stride, int64_t rows, const char* ahead,
           int64_t bytes) {
  const int64_t count = divide_up(rows, ROWS<X>), steps = num_pairs(weight) / STEP;
  const int64_t lines = steps ? divide_up(bytes, 64 * steps * count) : 0;
  const char* end = ahead + bytes;
  for (int64_t t = 0, row = 0; t < count; ++t, ahead += steps * lines * 64) {
    const int64_t next = rows * (t + 1) / count;
    tile_of_rows<C>(int(next - row), weight, weights, panel, x + row * x_stride, x_stride,
                    y + row * y_stride, y_stride, ahead, ahead < end ? int(lines) : 0);
    row = next;
  }
}

#if defined(__AMX_BF16__)
// `rows` rows against C panels, by AMX.
template <int C, class W>
void amx_tiles(const LinearWeight& weight, Weights<W> weights, int64_t panel, const bf16* x,
               int64_t x_stride, bf16* y, int64_t y_stride, int64_t rows, const char* ahead,
               int64_t bytes) {
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
        *reinterpret_cast<vu*>(ready[slot][c][k]) = load_pairs(weights.panel(block * TILE + k, c));
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
      std::memcpy(last[r], x + (row + r) * x_stride + whole * 2 * TILE, inputs * sizeof(bf16));
    const auto x_at = [&](int64_t i, int64_t first) {
      return i < whole ? Block{x + (row + first) * x_stride + i * 2 * TILE,
                               x_stride * int64_t(sizeof(bf16))}
                       : Block{last[first], sizeof(last[0])};
    };
    const auto made = [&](int c, const vf* sums, int64_t first, int count) {
      finish(weight, panel + c, sums, 1, count, y + (row + first) * y_stride, y_stride);
    };
    ahead = tiles_of_sums<C>(count, blocks, x_at, weights_at, made, ahead, ahead < end ? lines : 0);
  }
}
#endif

// `rows` rows against C panels. `space`: of a thread's own, for C panels of bfloat16.
template <int C, class X>
void item(const LinearWeight& weight, int64_t panel, const Input<X>* x, int64_t x_stride, X* y,
          int64_t y_stride, int64_t rows, uint32_t* space) {
  const int64_t pairs = num_pairs(weight), pair = pair_bytes(weight);
  const int64_t group = NR * pairs * VL;
  const Panel place(weight, panel);
  const char* from = static_cast<const char*>(weight.packed) + place.start * pair;
  // Several tiles bring near what the next item reads. A single one of vectors of 8 brings near what it
  // reads itself a little later; one of more numbers reads as fast as they come.
  const int64_t size = C * pairs * VL * pair;
  const int64_t left = (num_panels(weight) * pairs * VL - place.start) * pair;
  const bool is_alone = rows <= ALONE<X>, by_tiles = AMX && sizeof(X) == 2;
  const int64_t distance = !is_alone ? size : by_tiles ? 16 << 10 : 2048;
  const bool looks_ahead = C == NR && (!is_alone || by_tiles || NR == 2);
  const char* ahead = from + distance;
  const int64_t bytes = looks_ahead ? std::min(size, left - distance) : 0;
  const auto multiply_by = [&](auto weights) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(X) == 2)
      return amx_tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, bytes);
#endif
    tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, bytes);
  };
  if constexpr (sizeof(X) == sizeof(float)) {
    multiply_by(Weights<float>{reinterpret_cast<const float*>(from), place.stride, group});
  } else {
    if (!weight.bits)
      return multiply_by(
          Weights<uint32_t>{reinterpret_cast<const uint32_t*>(from), place.stride, group});
    const auto turn_all = [&](auto weights) {
      for (int64_t k = 0; k < pairs; ++k)
        for (int c = 0; c < C; ++c)
          *reinterpret_cast<vu*>(space + (k * C + c) * VL) = load_pairs(weights.panel(k, c));
    };
    if (weight.bits == 4) {  // AMX would add the sums of groups before they are scaled
      const auto by_groups = [&](auto weights) {
        tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, bytes);
      };
      const Grouped<uint8_t> weights = {
          {reinterpret_cast<const uint8_t*>(from), place.stride, group}};
      if (is_alone) return by_groups(weights);
      turn_all(weights);
      return by_groups(Grouped<uint32_t>{{space, C * VL, 0}});
    }
    const Weights<uint16_t> weights = {reinterpret_cast<const uint16_t*>(from), place.stride,
                                       group};
    if (is_alone) return multiply_by(weights);
    turn_all(weights);
    multiply_by(Weights<uint32_t>{space, C * VL, 0});
  }
}

// A row of bfloat16 in float32; an odd one is followed by 0.
void turn(const bf16* x, int64_t inputs, float* floats) {
  int64_t k = 0;
  for (; k + VL <= inputs; k += VL) store(floats + k, load(x + k));
  for (; k < inputs; ++k) floats[k] = to_float(x[k]);
  if (inputs % 2) floats[inputs] = 0.0f;
}

template <int C, class X>
void multiply(const LinearWeight& weight, const X* x, int64_t x_stride, X* y,
              int64_t y_stride, int64_t rows, int threads) {
  constexpr bool turns = !std::is_same_v<Input<X>, X>;
  const int64_t panels = num_panels(weight), groups = divide_up(panels, C);
  const int64_t blocks = divide_up(rows, ITEM_ROWS<X>), width = 2 * num_pairs(weight);
  // Groups that are multiplied by all blocks of rows together, so that x is read less often.
  const int64_t together =
      AMX && sizeof(X) == 2 ? std::max<int64_t>(1, CHUNK / (C * VL * width * 2)) : 1;
  // Not initialised: what is read has been written before. So is `space`.
  const std::unique_ptr<float[]> floats(turns ? new float[rows * width] : nullptr);
#pragma omp parallel num_threads(threads)
  {
    const Input<X>* left;
    int64_t left_stride = x_stride;
    if constexpr (turns) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row)
        turn(x + row * x_stride, weight.inputs, floats.get() + row * width);
      left = floats.get(), left_stride = width;
    } else {
      left = x;
    }
    const bool converts = weight.bits && rows > ALONE<X>;
    const std::unique_ptr<uint32_t[]> space(
        converts ? new uint32_t[C * num_pairs(weight) * VL] : nullptr);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < groups * blocks; ++i) {
      const int64_t before = i / (together * blocks) * together, at = i - before * blocks;
      const int64_t here = std::min(together, groups - before), b = at / here;
      const int64_t row = rows * b / blocks, count = rows * (b + 1) / blocks - row;
      const Input<X>* from = left + row * left_stride;
      X* to = y + row * y_stride;
      int64_t panel = (before + at % here) * C;
      const int64_t last = std::min(panels, panel + C);
      if (panel + C <= last) {
        item<C>(weight, panel, from, left_stride, to, y_stride, count, space.get());
        continue;
      }
      for (; panel < last; ++panel)
        item<1>(weight, panel, from, left_stride, to, y_stride, count, space.get());
    }
#if defined(__AMX_BF16__)
    _tile_release();  // what is in use is saved whenever the thread waits
#endif
  }
}

template <class X>
void linear_of(const LinearWeight& weight, const X* x, int64_t x_stride, X* y, int64_t y_stride,
               int64_t rows, int threads) {
  // Few panels to a thread: narrower items, so that no thread is idle.
  const int64_t items = num_panels(weight) * divide_up(rows, ITEM_ROWS<X>);
  if constexpr (NR == 2)  // sums of more panels do not wait for each other
    if (rows <= FEW && items >= 4 * NR * threads)
      return multiply<2 * NR>(weight, x, x_stride, y, y_stride, rows, threads);
  if (items >= 2 * NR * threads)
    return multiply<NR>(weight, x, x_stride, y, y_stride, rows, threads);
  if (items >= 2 * threads) return multiply<2>(weight, x, x_stride, y, y_stride, rows, threads);
  multiply<1>(weight, x, x_stride, y, y_stride, rows, threads);
}

}  // namespace

// y from x: [rows][outputs] and [rows][inputs], whose rows are `y_stride` and `x_stride` elements apart.
void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t y_stride,
            int64_t rows, int threads) {
  if (weight.dtype == FLOAT32)
    return linear_of(weight, static_cast<const float*>(x), x_stride, static_cast<float*>(y),
                     y_stride, rows, threads);
  linear_of(weight, static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(y), y_stride, rows,
            threads);
}

}  // namespace HEADRACE_ISA
