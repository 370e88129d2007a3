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
//
// An item of work is a few rows against C panels. A tile keeps R rows x C panels of sums in
// registers, and takes the inputs in their order: what a row yields depends neither on the rows
// beside it nor on the threads. Where an item is several tiles, which read the same weights, each of
// them brings a part of the next item's near.
//
// Where no instruction multiplies pairs of bfloat16, x is turned into float32 once for all panels, and
// weights as a tile reads them: first those of a pair's first input, then those of its second.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // one instruction multiplies pairs of bfloat16
#else
constexpr bool PAIRS = false;
#endif
// Rows of a tile for steps of X. The sums of a tile, and what is multiplied, fill the registers.
template <class X>
constexpr int ROWS = NR == 2 && sizeof(X) == sizeof(float) ? 4 : 6;
// What a tile reads for steps of X.
template <class X>
using Input = std::conditional_t<PAIRS, X, float>;

// Registers hold a tile's sums only if every loop over them is unrolled, in one function.
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline)) inline

constexpr int FEW = 2;  // rows whose sums leave registers for the panels of two groups
constexpr int STEP = 4;  // pairs of inputs between two looks ahead
constexpr int64_t ITEM_ROWS = 96;  // of an item: x for them stays in the nearest caches

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Lanes of 32 bits are two inputs, or one of float32.
int64_t num_pairs(const LinearWeight& weight) {
  return weight.dtype == FLOAT32 ? weight.inputs : divide_up(weight.inputs, 2);
}
int64_t num_panels(const LinearWeight& weight) { return divide_up(weight.outputs, VL); }

// Where a panel's numbers begin, and how far apart those of two pairs are.
struct Panel {
  int64_t start, stride;

  Panel(const LinearWeight& weight, int64_t panel) {
    const int64_t first = panel / NR * NR;
    start = first * num_pairs(weight) * VL + (panel - first) * VL;
    stride = std::min<int64_t>(NR, num_panels(weight) - first) * VL;
  }
};

typedef uint32_t unaligned_pair __attribute__((aligned(2), may_alias));

// One input of VL outputs, as float32: the only one, or one of two.
vf load_first(const float* p) { return load(p); }
vf load_first(const uint32_t* p) { return (vf)(*reinterpret_cast<const vu*>(p) << 16); }
vf load_second(const uint32_t* p) { return (vf)(*reinterpret_cast<const vu*>(p) & 0xffff0000u); }
vf load_first(const uint16_t* p) {
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  return __builtin_convertvector((vi)(pairs << 24) >> 24, vf);
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

// Weights of C panels: pairs are `stride` lanes apart, groups `group`. W: uint32_t, two bfloat16;
// uint16_t, two int8; float, one float32.
template <class W>
struct Weights {
  const W* from;
  int64_t stride, group;

  const W* panel(int64_t k, int c) const {
    return from + c / NR * group + k * stride + c % NR * VL;
  }
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

// R rows from x on against C panels; see the top. `lines` cache lines from `ahead` on are brought near
// for every STEP pairs.
template <int R, int C, class W, class X>
void tile(const LinearWeight& weight, Weights<W> weights, int64_t panel, const Input<X>* x,
          int64_t x_stride, X* y, int64_t y_stride, const char* ahead, int lines) {
  constexpr bool pairs_of_x = sizeof(Input<X>) == 2;
  constexpr int width = std::is_same_v<W, float> ? 1 : 2;  // inputs of a lane
  const int64_t pairs = num_pairs(weight), whole = pairs_of_x ? weight.inputs / 2 : pairs;
  vf sums[R][C] = {};
  int64_t k = 0;
  for (; k + STEP <= whole; k += STEP) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    for (int i = 0; i < STEP; ++i) add_pair(sums, weights, k + i, x + width * (k + i), x_stride);
  }
  for (; k < whole; ++k) add_pair(sums, weights, k, x + width * k, x_stride);
  if constexpr (pairs_of_x)
    if (k < pairs) {
      bf16 last[2 * R] = {};
      for (int r = 0; r < R; ++r) last[2 * r] = x[r * x_stride + 2 * k];
      add_pair(sums, weights, k, last, 2);
    }
  for (int c = 0; c < C; ++c) {
    const int64_t first = (panel + c) * VL, count = std::min<int64_t>(VL, weight.outputs - first);
    const vf scale = weight.scales ? load(weight.scales + first) : splat(1.0f);
    const vf bias = weight.bias ? load(weight.bias + first) : vf{};
    for (int r = 0; r < R; ++r) {
      const vf result = sums[r][c] * scale + bias;
      X* out = y + r * y_stride + first;
      if (count == VL)
        store(out, result);
      else
        for (int i = 0; i < count; ++i) from_float(result[i], out + i);
      if constexpr (sizeof(X) == 2)
        if (weight.finished)
          for (int i = 0; i < count; ++i) out[i].bits = weight.finished[out[i].bits];
    }
  }
}

template <int C, class W, class X, int R = C <= NR ? ROWS<X> : FEW>
void tile_of_rows(int rows, const LinearWeight& weight, Weights<W> weights, int64_t panel,
                  const Input<X>* x, int64_t x_stride, X* y, int64_t y_stride, const char* ahead,
                  int lines) {
  if (rows == R) return tile<R, C>(weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
  if constexpr (R > 1)
    tile_of_rows<C, W, X, R - 1>(rows, weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
}

// `rows` rows against C panels, in tiles of about the same height. From `ahead` on lie `bytes` that are to
// be brought near meanwhile.
template <int C, class W, class X>
void tiles(const LinearWeight& weight, Weights<W> weights, int64_t panel, const Input<X>* x,
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

// `rows` rows against C panels. `space`: of a thread's own, for C panels of bfloat16.
template <int C, class X>
void item(const LinearWeight& weight, int64_t panel, const Input<X>* x, int64_t x_stride, X* y,
          int64_t y_stride, int64_t rows, uint32_t* space) {
  const int64_t pairs = num_pairs(weight), pair = weight.scales ? 2 : 4;  // bytes
  const int64_t group = NR * pairs * VL;
  const Panel place(weight, panel);
  const char* from = static_cast<const char*>(weight.packed) + place.start * pair;
  // Several tiles bring near what the next item reads. A single one of vectors of 8 brings near what it
  // reads itself a little later; one of more numbers reads as fast as they come.
  const int64_t size = C * pairs * VL * pair;
  const int64_t left = (num_panels(weight) * pairs * VL - place.start) * pair;
  const int64_t distance = rows > ROWS<X> ? size : 2048;
  const bool looks_ahead = C == NR && (rows > ROWS<X> || NR == 2);
  const char* ahead = from + distance;
  const int64_t bytes = looks_ahead ? std::min(size, left - distance) : 0;
  const auto multiply_by = [&](auto weights) {
    tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, bytes);
  };
  if constexpr (sizeof(X) == sizeof(float)) {
    multiply_by(Weights<float>{reinterpret_cast<const float*>(from), place.stride, group});
  } else {
    if (!weight.scales)
      return multiply_by(
          Weights<uint32_t>{reinterpret_cast<const uint32_t*>(from), place.stride, group});
    const Weights<uint16_t> weights = {reinterpret_cast<const uint16_t*>(from), place.stride,
                                       group};
    if (rows <= ROWS<X>) return multiply_by(weights);
    for (int64_t k = 0; k < pairs; ++k)
      for (int c = 0; c < C; ++c)
        *reinterpret_cast<vu*>(space + (k * C + c) * VL) = load_pairs(weights.panel(k, c));
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
  const int64_t blocks = divide_up(rows, ITEM_ROWS), width = 2 * num_pairs(weight);
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
    const bool converts = weight.scales && rows > ROWS<X>;
    const std::unique_ptr<uint32_t[]> space(
        converts ? new uint32_t[C * num_pairs(weight) * VL] : nullptr);
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = rows * b / blocks, count = rows * (b + 1) / blocks - row;
        const int64_t last = std::min(panels, g * C + C);
        const Input<X>* from = left + row * left_stride;
        X* to = y + row * y_stride;
        int64_t panel = g * C;
        if (panel + C <= last) {
          item<C>(weight, panel, from, left_stride, to, y_stride, count, space.get());
          continue;
        }
        for (; panel < last; ++panel)
          item<1>(weight, panel, from, left_stride, to, y_stride, count, space.get());
      }
  }
}

// Numbers of a panel's outputs, as lanes, from [outputs][inputs]: T is one input or two side by side.
// Lines of the cache are read to their end, since the rows' lines at one place share few of its sets.
template <class T, class From>
void pack_lanes(const LinearWeight& weight, int64_t panel, const From* rows, int64_t stride,
                T* packed) {
  constexpr int64_t width = sizeof(T) / sizeof(From), block = 64 / sizeof(T);
  const Panel place(weight, panel);
  const int64_t pairs = num_pairs(weight), whole = weight.inputs / width;
  const int64_t lanes = std::min<int64_t>(VL, weight.outputs - panel * VL);
  T* to = packed + place.start;
  for (int64_t k = 0; k < pairs; ++k)
    for (int64_t lane = lanes; lane < VL; ++lane) to[k * place.stride + lane] = T{};
  for (int64_t first = 0; first < pairs; first += block)
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const From* row = rows + lane * stride;
      const int64_t last = std::min(first + block, whole);
      for (int64_t k = first; k < last; ++k)
        std::memcpy(to + k * place.stride + lane, row + k * width, sizeof(T));
      if (last < pairs && last < first + block) {  // one input without a second
        T pair = {};
        std::memcpy(&pair, row + last * width, sizeof(From));
        to[last * place.stride + lane] = pair;
      }
    }
}

// The rows of a panel's outputs as int8, by the largest number of each: [VL][inputs].
void quantise(const LinearWeight& weight, int64_t panel, const bf16* rows, int64_t stride,
              int8_t* bytes, float* scales) {
  const int64_t lanes = std::min<int64_t>(VL, weight.outputs - panel * VL), inputs = weight.inputs;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const bf16* row = rows + lane * stride;
    vf most_of = {};
    int64_t k = 0;
    for (; k + VL <= inputs; k += VL) {
      const vf x = load(row + k);
      most_of = max(most_of, max(x, -x));
    }
    float most = max_of(most_of);
    for (; k < inputs; ++k) most = std::max(most, std::abs(to_float(row[k])));
    scales[panel * VL + lane] = most / 127;
    const float inverse = most > 0 ? 127 / most : 0;
    for (k = 0; k < inputs; ++k) {
      const float x = std::clamp(to_float(row[k]) * inverse, -127.0f, 127.0f);
      // Rounded to nearest, ties to even, by a number whose last bit counts ones.
      bytes[lane * inputs + k] = int8_t((x + 12582912.0f) - 12582912.0f);
    }
  }
}

}  // namespace

// How many halves of lanes the packed weights are: bfloat16 or int8 elements, or two for one float32.
int64_t linear_size(const LinearWeight& weight) {
  return num_panels(weight) * num_pairs(weight) * VL * 2;
}

// packed from [outputs][inputs], whose rows are `stride` numbers apart. With scales, of whole panels:
// as int8, by the largest number of each output.
void linear_pack(const LinearWeight& weight, const void* from, int64_t stride, void* packed,
                 float* scales, int threads) {
  const int64_t panels = num_panels(weight), panel_inputs = weight.inputs * VL;
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<int8_t[]> space(scales ? new int8_t[panel_inputs] : nullptr);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      const auto rows = [&](auto numbers) { return numbers + p * VL * stride; };
      if (weight.dtype == FLOAT32) {
        pack_lanes(weight, p, rows(static_cast<const float*>(from)), stride,
                   static_cast<float*>(packed));
      } else if (!scales) {
        pack_lanes(weight, p, rows(static_cast<const uint16_t*>(from)), stride,
                   static_cast<uint32_t*>(packed));
      } else {
        for (int64_t i = p * VL; i < p * VL + VL; ++i) scales[i] = 0;
        quantise(weight, p, rows(static_cast<const bf16*>(from)), stride, space.get(), scales);
        pack_lanes(weight, p, space.get(), weight.inputs, static_cast<uint16_t*>(packed));
      }
    }
  }
}

// The weights of some outputs as they were before, or, of int8, as they are now: [count][inputs].
// False: one of these outputs does not exist; then nothing was read.
int linear_rows(const LinearWeight& weight, const int64_t* wanted, int64_t count, void* rows,
                int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (wanted[i] < 0 || wanted[i] >= weight.outputs) return 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
  for (int64_t i = 0; i < count; ++i) {
    const Panel place(weight, wanted[i] / VL);
    if (weight.dtype == FLOAT32) {
      const float* lanes = static_cast<const float*>(weight.packed) + place.start + wanted[i] % VL;
      float* to = static_cast<float*>(rows) + i * weight.inputs;
      for (int64_t k = 0; k < weight.inputs; ++k) to[k] = lanes[k * place.stride];
      continue;
    }
    const int64_t start = 2 * (place.start + wanted[i] % VL);
    const uint16_t* numbers = static_cast<const uint16_t*>(weight.packed) + start;
    const int8_t* bytes = static_cast<const int8_t*>(weight.packed) + start;
    bf16* row = static_cast<bf16*>(rows) + i * weight.inputs;
    for (int64_t k = 0; k < weight.inputs; ++k) {
      const int64_t at = k / 2 * 2 * place.stride + k % 2;
      if (weight.scales)
        from_float(bytes[at] * weight.scales[wanted[i]], row + k);
      else
        row[k].bits = numbers[at];
    }
  }
  return 1;
}

namespace {

template <class X>
void linear_of(const LinearWeight& weight, const X* x, int64_t x_stride, X* y, int64_t y_stride,
               int64_t rows, int threads) {
  // Few panels to a thread: narrower items, so that no thread is idle.
  const int64_t items = num_panels(weight) * divide_up(rows, ITEM_ROWS);
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
