// Products by AMX, whose registers are tiles of 16 rows of 64 bytes: of x, 32 inputs of 16 rows; of
// packed weights, 16 pairs of a panel's 16 outputs, as they lie; of sums, 16 rows and 16 outputs.
//
// One tile of sums takes the inputs in blocks of 32, in their order, whatever the number of rows: so
// a row's result does not depend on the rows beside it here, either. Up to 16 rows are multiplied by
// four panels at a time; more by two, in two tiles of rows, so that each tile is used twice.
#pragma once

#include <algorithm>

#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int TILE = 16;  // rows of a tile, and pairs of inputs

#if defined(__AMX_BF16__)

// The shapes of the registers: sums 0 to 3, x 4 and 5, weights 6 and 7.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // `first` and `second`: the rows of x in tiles 4 and 5; second 0: 4 panels, in place of 2.
  Shapes(int first, int second) {
    const int sums[] = {first, first, second ? second : first, second ? second : first};
    for (int i = 0; i < 8; ++i) {
      rows[i] = uint8_t(i < 4 ? sums[i] : i == 4 ? first : i == 5 ? second : TILE);
      row_bytes[i] = rows[i] ? 64 : 0;
    }
  }
};

// Where a block of 32 inputs of some rows, or of 16 pairs of a panel, is read.
struct Block {
  const void* from;
  int64_t stride;  // bytes
};

// Sums of up to 2 * TILE rows against C panels, 1, 2 or 4. x(i, row): block i of TILE rows from `row` on;
// weights(i, c): that of panel c. `made(c, sums, row, count)` takes those of `count` rows. `lines` cache
// lines from `ahead` on are brought near for each block; returns what follows the last one.
template <int C, class X, class Weights, class Made>
const char* tiles_of_sums(int rows, int64_t blocks, X x, Weights weights, Made made,
                          const char* ahead, int lines) {
  const int first = std::min(rows, TILE), second = rows - first;
  const Shapes shapes(first, second);
  // The compiler does not know what tiles read: all of it is written now.
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  alignas(64) vf sums[4][TILE];
  const auto stored = [&] {
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  };
  const auto zero = [] {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  };
#define HEADRACE_READ(tile, block)           \
  {                                          \
    const Block one = block;                 \
    _tile_loadd(tile, one.from, one.stride); \
  }
  const auto look_ahead = [&] {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
  };
  if (!second) {
    zero();
    for (int64_t i = 0; i < blocks; ++i) {
      look_ahead();
      HEADRACE_READ(4, x(i, 0))
      HEADRACE_READ(6, weights(i, 0))
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C >= 2) {
        HEADRACE_READ(7, weights(i, 1))
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (C == 4) {
        HEADRACE_READ(6, weights(i, 2))
        _tile_dpbf16ps(2, 4, 6);
        HEADRACE_READ(7, weights(i, 3))
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    stored();
    for (int c = 0; c < C; ++c) made(c, sums[c], 0, first);
    return ahead;
  }
  for (int c = 0; c < C; c += 2) {
    zero();
    for (int64_t i = 0; i < blocks; ++i) {
      look_ahead();
      HEADRACE_READ(6, weights(i, c))
      HEADRACE_READ(4, x(i, 0))
      _tile_dpbf16ps(0, 4, 6);
      HEADRACE_READ(5, x(i, TILE))
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C >= 2) {
        HEADRACE_READ(7, weights(i, c + 1))
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    stored();
    for (int p = 0; p < std::min(C, 2); ++p) {
      made(c + p, sums[p], 0, first);
      made(c + p, sums[2 + p], TILE, second);
    }
  }
  return ahead;
#undef HEADRACE_READ
}

#endif

}  // namespace
}  // namespace HEADRACE_ISA
