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
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6;  // of a tile. ROWS * NR sums, and what is multiplied, fill the registers
#else
constexpr int ROWS = 4;
#endif
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

// One input of VL outputs, as float32.
vf load_weights(const float* p) { return load(p); }
// Two inputs of VL outputs, as bfloat16.
vu load_weights(const uint32_t* p) { return *reinterpret_cast<const vu*>(p); }
vu load_weights(const uint16_t* p) {
#if defined(__AVX512BF16__)
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
  const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
  return (vu)_mm512_cvtne2ps_pbh(second, first);
#else
  const vu pairs = __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
  const vf low = __builtin_convertvector((vi)(pairs << 24) >> 24, vf);
  const vf high = __builtin_convertvector((vi)(pairs << 16) >> 24, vf);
  return (vu)low >> 16 | (vu)high;  // the lower halves are zero: 8 bits are enough for them
#endif
}

// One input of a row of float32, or two of bfloat16, in every lane.
vf load_pair(const float* x) { return splat(*x); }
vu load_pair(const bf16* x) { return *reinterpret_cast<const unaligned_pair*>(x) - vu{}; }

// sums += one or two inputs of one row, against VL outputs.
vf multiply_pair(vf sums, vf x, vf weights) { return sums + x * weights; }
vf multiply_pair(vf sums, vu pair, vu weights) {
#if defined(__AVX512BF16__)
  return dot_pairs(sums, pair, weights);
#else
  sums += (vf)(pair << 16) * (vf)(weights << 16);
  return sums + (vf)(pair & 0xffff0000u) * (vf)(weights & 0xffff0000u);
#endif
}

// Weights of C panels: pairs are `stride` lanes apart. W: uint32_t, two bfloat16; uint16_t, two int8;
// float, one float32.
template <class W>
struct Weights {
  const W* from;
  int64_t stride;
};

// R rows from x on against C panels; see the top. `lines` cache lines from `ahead` on are brought near
// for every STEP pairs.
template <int R, int C, class W, class X>
void tile(const LinearWeight& weight, Weights<W> weights, int64_t panel, const X* x,
          int64_t x_stride, X* y, int64_t y_stride, const char* ahead, int lines) {
  constexpr int in_lane = sizeof(float) / sizeof(X);
  const int64_t pairs = num_pairs(weight), whole = weight.inputs / in_lane;
  vf sums[R][C] = {};
  const auto add = [&](int64_t k, const auto& left) {
    decltype(load_weights(weights.from)) right[C];
    for (int c = 0; c < C; ++c)
      right[c] = load_weights(weights.from + k * weights.stride + c * VL);
    for (int r = 0; r < R; ++r) {
      const auto pair = left(r, k);
      for (int c = 0; c < C; ++c) sums[r][c] = multiply_pair(sums[r][c], pair, right[c]);
    }
  };
  const auto left = [=](int r, int64_t k) { return load_pair(x + r * x_stride + in_lane * k); };
  int64_t k = 0;
  for (; k + STEP <= whole; k += STEP) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    for (int i = 0; i < STEP; ++i) add(k + i, left);
  }
  for (; k < whole; ++k) add(k, left);
  if constexpr (in_lane == 2)
    if (k < pairs)
      add(k, [=](int r, int64_t last) { return x[r * x_stride + 2 * last].bits - vu{}; });
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
      if constexpr (in_lane == 2)
        if (weight.finished)
          for (int i = 0; i < count; ++i) out[i].bits = weight.finished[out[i].bits];
    }
  }
}

template <int C, class W, class X, int R = ROWS>
void tile_of_rows(int rows, const LinearWeight& weight, Weights<W> weights, int64_t panel,
                  const X* x, int64_t x_stride, X* y, int64_t y_stride, const char* ahead,
                  int lines) {
  if (rows == R) return tile<R, C>(weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
  if constexpr (R > 1)
    tile_of_rows<C, W, X, R - 1>(rows, weight, weights, panel, x, x_stride, y, y_stride, ahead, lines);
}

// `rows` rows against C panels, in tiles of about the same height. From `ahead` on lie `bytes` that are to
// be brought near meanwhile.
template <int C, class W, class X>
void tiles(const LinearWeight& weight, Weights<W> weights, int64_t panel, const X* x,
           int64_t x_stride, X* y, int64_t y_stride, int64_t rows, const char* ahead,
           int64_t bytes) {
  const int64_t count = divide_up(rows, ROWS), steps = num_pairs(weight) / STEP;
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
void item(const LinearWeight& weight, int64_t panel, const X* x, int64_t x_stride, X* y,
          int64_t y_stride, int64_t rows, uint32_t* space) {
  const int64_t pairs = num_pairs(weight), pair = weight.scales ? 2 : 4;  // bytes
  const Panel place(weight, panel);
  const char* from = static_cast<const char*>(weight.packed) + place.start * pair;
  // What the next item reads. A single tile reads weights once and as fast as they come: nothing is
  // left to be brought near.
  int64_t size = C == NR && rows > ROWS ? C * pairs * VL * pair : 0;
  const char* ahead = from + size;
  size = std::min(size, (num_panels(weight) * pairs * VL - place.start) * pair - size);
  if constexpr (sizeof(X) == sizeof(float)) {
    const Weights<float> weights = {reinterpret_cast<const float*>(from), place.stride};
    return tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, size);
  } else {
    if (!weight.scales) {
      const Weights<uint32_t> weights = {reinterpret_cast<const uint32_t*>(from), place.stride};
      return tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, size);
    }
    const Weights<uint16_t> weights = {reinterpret_cast<const uint16_t*>(from), place.stride};
    if (rows <= ROWS)
      return tiles<C>(weight, weights, panel, x, x_stride, y, y_stride, rows, ahead, size);
    for (int64_t k = 0; k < pairs; ++k)
      for (int c = 0; c < C; ++c)
        *reinterpret_cast<vu*>(space + (k * C + c) * VL) =
            load_weights(weights.from + k * weights.stride + c * VL);
    const Weights<uint32_t> turned = {space, C * VL};
    tiles<C>(weight, turned, panel, x, x_stride, y, y_stride, rows, ahead, size);
  }
}

template <int C, class X>
void multiply(const LinearWeight& weight, const X* x, int64_t x_stride, X* y,
              int64_t y_stride, int64_t rows, int threads) {
  const int64_t panels = num_panels(weight), groups = divide_up(panels, C);
  const int64_t blocks = divide_up(rows, ITEM_ROWS);
#pragma omp parallel num_threads(threads)
  {
    // Not initialised: an item fills it before it is read.
    const bool converts = weight.scales && rows > ROWS;
    const std::unique_ptr<uint32_t[]> space(
        converts ? new uint32_t[C * num_pairs(weight) * VL] : nullptr);
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = rows * b / blocks, count = rows * (b + 1) / blocks - row;
        const int64_t last = std::min(panels, g * C + C);
        const X* from = x + row * x_stride;
        X* to = y + row * y_stride;
        int64_t panel = g * C;
        if (panel + C <= last) {
          item<C>(weight, panel, from, x_stride, to, y_stride, count, space.get());
          continue;
        }
        for (; panel < last; ++panel)
          item<1>(weight, panel, from, x_stride, to, y_stride, count, space.get());
      }
  }
}

// The weights of a panel of float32, packed.
void pack_floats(const LinearWeight& weight, int64_t panel, const float* rows, int64_t stride,
                 float* packed) {
  const Panel place(weight, panel);
  for (int64_t k = 0; k < weight.inputs; ++k)
    for (int64_t lane = 0; lane < VL; ++lane) {
      const int64_t output = panel * VL + lane;
      packed[place.start + k * place.stride + lane] =
          output < weight.outputs ? rows[output * stride + k] : 0.0f;
    }
}

// The weights of a panel, packed. number(output, input): as it is packed.
template <class T, class Number>
void pack_panel(const LinearWeight& weight, int64_t panel, const Number& number, T* packed) {
  const Panel place(weight, panel);
  for (int64_t k = 0; k < num_pairs(weight); ++k)
    for (int64_t lane = 0; lane < VL; ++lane) {
      const int64_t output = panel * VL + lane;
      T* pair = packed + 2 * (place.start + k * place.stride + lane);
      pair[0] = pair[1] = 0;
      if (output >= weight.outputs) continue;
      pair[0] = number(output, 2 * k);
      if (2 * k + 1 < weight.inputs) pair[1] = number(output, 2 * k + 1);
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
  const uint16_t* rows = static_cast<const uint16_t*>(from);
  const bf16* numbers = static_cast<const bf16*>(from);
  const int64_t panels = num_panels(weight);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    if (weight.dtype == FLOAT32) {
      pack_floats(weight, p, static_cast<const float*>(from), stride, static_cast<float*>(packed));
      continue;
    }
    if (!scales) {
      const auto number = [=](int64_t output, int64_t k) { return rows[output * stride + k]; };
      pack_panel(weight, p, number, static_cast<uint16_t*>(packed));
      continue;
    }
    float inverse[VL] = {};
    for (int64_t lane = 0; lane < VL; ++lane) {
      const int64_t output = p * VL + lane;
      float most = 0;
      for (int64_t k = 0; output < weight.outputs && k < weight.inputs; ++k)
        most = std::max(most, std::abs(to_float(numbers[output * stride + k])));
      scales[output] = most / 127;
      inverse[lane] = most > 0 ? 127 / most : 0;
    }
    const auto number = [=](int64_t output, int64_t k) {
      const float x = to_float(numbers[output * stride + k]) * inverse[output % VL];
      return int8_t(std::lrint(std::clamp(x, -127.0f, 127.0f)));
    };
    pack_panel(weight, p, number, static_cast<int8_t*>(packed));
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
