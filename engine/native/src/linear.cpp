// Linear layers over weights that were packed when the model was loaded: y = x . W^T + bias, of
// bfloat16, summed in float32.
//
//   packed: [groups][pairs][NR][VL] pairs of bfloat16. A panel is VL outputs, a group NR panels (the
//   last one may be narrower), a pair two inputs side by side. So one vector of 32-bit numbers is
//   two inputs of VL outputs, and weights are read as they lie, from the first to the last, once for
//   all rows where these are few: processors bring near by themselves what is read in one sequence,
//   and only that at the full speed of the memory. Weights of whole groups that lie one behind the
//   other are those of one layer with all their outputs.
//
// An item of work is a few rows against C panels. A tile keeps R rows x C panels of sums in
// registers, and takes the inputs in their order: what a row yields depends neither on the rows
// beside it nor on the threads. Where an item is several tiles, which read the same weights, each of
// them brings a part of the next item's near.
#include <omp.h>

#include <algorithm>

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

int64_t num_pairs(const LinearWeight& weight) { return divide_up(weight.inputs, 2); }
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

// Two inputs of a row, in every lane.
vu load_pair(const bf16* x) { return *reinterpret_cast<const unaligned_pair*>(x) - vu{}; }

// sums += two inputs of one row, against VL outputs.
vf multiply_pair(vf sums, vu pair, vu weights) {
#if defined(__AVX512BF16__)
  return dot_pairs(sums, pair, weights);
#else
  sums += (vf)(pair << 16) * (vf)(weights << 16);
  return sums + (vf)(pair & 0xffff0000u) * (vf)(weights & 0xffff0000u);
#endif
}

// R rows from x on against C panels; see the top. `lines` cache lines from `ahead` on are brought near
// for every STEP pairs.
template <int R, int C>
void tile(const LinearWeight& weight, int64_t panel, const bf16* x, int64_t x_stride, bf16* y,
          const char* ahead, int lines) {
  const int64_t pairs = num_pairs(weight), whole = weight.inputs / 2;
  const Panel place(weight, panel);
  const uint32_t* from = static_cast<const uint32_t*>(weight.packed) + place.start;
  vf sums[R][C] = {};
  const auto add = [&](int64_t k, const auto& left) {
    vu right[C];
    for (int c = 0; c < C; ++c)
      right[c] = *reinterpret_cast<const vu*>(from + k * place.stride + c * VL);
    for (int r = 0; r < R; ++r) {
      const vu pair = left(r, k);
      for (int c = 0; c < C; ++c) sums[r][c] = multiply_pair(sums[r][c], pair, right[c]);
    }
  };
  const auto left = [=](int r, int64_t k) { return load_pair(x + r * x_stride + 2 * k); };
  int64_t k = 0;
  for (; k + STEP <= whole; k += STEP) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    for (int i = 0; i < STEP; ++i) add(k + i, left);
  }
  for (; k < whole; ++k) add(k, left);
  if (k < pairs)
    add(k, [=](int r, int64_t last) { return x[r * x_stride + 2 * last].bits - vu{}; });
  for (int c = 0; c < C; ++c) {
    const int64_t first = (panel + c) * VL, count = std::min<int64_t>(VL, weight.outputs - first);
    vf bias = {};
    if (weight.bias) bias = load(weight.bias + first);
    for (int r = 0; r < R; ++r) {
      const vf result = sums[r][c] + bias;
      bf16* out = y + r * weight.outputs + first;
      if (count == VL)
        store(out, result);
      else
        for (int i = 0; i < count; ++i) from_float(result[i], out + i);
    }
  }
}

template <int C, int R = ROWS>
void tile_of_rows(int rows, const LinearWeight& weight, int64_t panel, const bf16* x,
                  int64_t x_stride, bf16* y, const char* ahead, int lines) {
  if (rows == R) return tile<R, C>(weight, panel, x, x_stride, y, ahead, lines);
  if constexpr (R > 1)
    tile_of_rows<C, R - 1>(rows, weight, panel, x, x_stride, y, ahead, lines);
}

// `rows` rows against C panels, in tiles of about the same height.
template <int C>
void item(const LinearWeight& weight, int64_t panel, const bf16* x, int64_t x_stride, bf16* y,
          int64_t rows) {
  const int64_t tiles = divide_up(rows, ROWS), pairs = num_pairs(weight), steps = pairs / STEP;
  const int64_t size = C * pairs * VL * 4, end = num_panels(weight) * pairs * VL * 4;
  const char* all = static_cast<const char*>(weight.packed);
  // A single tile reads weights once and as fast as they come: nothing is left to be brought near.
  const bool looks_ahead = C == NR && tiles > 1 && steps;
  const int64_t lines = looks_ahead ? divide_up(size, 64 * steps * tiles) : 0;
  int64_t ahead = panel * pairs * VL * 4 + size;
  const int64_t stop = std::min(ahead + size, end) - steps * lines * 64;
  for (int64_t t = 0, row = 0; t < tiles; ++t, ahead += steps * lines * 64) {
    const int64_t next = rows * (t + 1) / tiles;
    tile_of_rows<C>(int(next - row), weight, panel, x + row * x_stride, x_stride,
                    y + row * weight.outputs, all + ahead, ahead <= stop ? int(lines) : 0);
    row = next;
  }
}

template <int C>
void multiply(const LinearWeight& weight, const bf16* x, int64_t x_stride, bf16* y, int64_t rows,
              int threads) {
  const int64_t panels = num_panels(weight), groups = divide_up(panels, C);
  const int64_t blocks = divide_up(rows, ITEM_ROWS);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = rows * b / blocks, end = rows * (b + 1) / blocks;
        const int64_t last = std::min(panels, g * C + C);
        int64_t panel = g * C;
        if (panel + C <= last) {
          item<C>(weight, panel, x + row * x_stride, x_stride, y + row * weight.outputs, end - row);
          continue;
        }
        for (; panel < last; ++panel)
          item<1>(weight, panel, x + row * x_stride, x_stride, y + row * weight.outputs, end - row);
      }
  }
}

}  // namespace

// How many 32-bit numbers the packed weights are.
int64_t linear_size(const LinearWeight& weight) {
  return num_panels(weight) * num_pairs(weight) * VL;
}

// packed from [outputs][inputs], whose rows are `stride` numbers apart.
void linear_pack(const LinearWeight& weight, const uint16_t* rows, int64_t stride,
                 uint32_t* packed, int threads) {
  const int64_t pairs = num_pairs(weight), panels = num_panels(weight);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    const Panel place(weight, p);
    for (int64_t k = 0; k < pairs; ++k)
      for (int64_t lane = 0; lane < VL; ++lane) {
        const int64_t output = p * VL + lane;
        uint32_t pair = 0;
        if (output < weight.outputs) {
          pair = rows[output * stride + 2 * k];
          if (2 * k + 1 < weight.inputs) pair |= uint32_t(rows[output * stride + 2 * k + 1]) << 16;
        }
        packed[place.start + k * place.stride + lane] = pair;
      }
  }
}

// The weights of some outputs as they were before: [count][inputs]. False: one of these outputs does
// not exist; then nothing was read.
int linear_rows(const LinearWeight& weight, const int64_t* wanted, int64_t count, uint16_t* rows,
                int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (wanted[i] < 0 || wanted[i] >= weight.outputs) return 0;
  const int64_t pairs = num_pairs(weight);
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
  for (int64_t i = 0; i < count; ++i) {
    const Panel place(weight, wanted[i] / VL);
    const uint32_t* from =
        static_cast<const uint32_t*>(weight.packed) + place.start + wanted[i] % VL;
    uint16_t* row = rows + i * weight.inputs;
    for (int64_t k = 0; k < weight.inputs / 2; ++k)
      std::memcpy(row + 2 * k, from + k * place.stride, 4);
    if (weight.inputs % 2) row[weight.inputs - 1] = uint16_t(from[(pairs - 1) * place.stride]);
  }
  return 1;
}

// y [rows][outputs] from x, whose rows are `x_stride` numbers apart.
void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t rows,
            int threads) {
  const bf16* left = static_cast<const bf16*>(x);
  bf16* out = static_cast<bf16*>(y);
  // Few panels to a thread: narrower items, so that no thread is idle.
  const int64_t items = num_panels(weight) * divide_up(rows, ITEM_ROWS);
  if (items >= 2 * NR * threads) return multiply<NR>(weight, left, x_stride, out, rows, threads);
  if (items >= 2 * threads) return multiply<2>(weight, left, x_stride, out, rows, threads);
  multiply<1>(weight, left, x_stride, out, rows, threads);
}

}  // namespace HEADRACE_ISA
