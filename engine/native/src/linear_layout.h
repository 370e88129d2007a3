// Where the numbers of a linear layer's packed weights lie; see linear.cpp.
#pragma once

#include <algorithm>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// What is multiplied at once is two inputs, or one of float32.
int64_t num_pairs(const LinearWeight& weight) {
  return weight.dtype == FLOAT32 ? weight.inputs : divide_up(weight.inputs, 2);
}
int64_t num_panels(const LinearWeight& weight) { return divide_up(weight.outputs, VL); }

// A lane is a pair, or eight inputs of int4: the j-th pair at bits 4j and 16 + 4j.
constexpr int INT4_PAIRS = 4;
int64_t num_lanes(const LinearWeight& weight) {
  return weight.bits == 4 ? divide_up(weight.inputs, 2 * INT4_PAIRS) : num_pairs(weight);
}
int64_t lane_bytes(const LinearWeight& weight) { return weight.bits == 8 ? 2 : 4; }

// Of integers. Scales and minima: [blocks of SCALED outputs][groups of inputs][SCALED]. Factors, which
// 2^shared groups have in common: [blocks][factors][1, or 2 where there are minima][SCALED].
constexpr int64_t SCALED = 64;
int64_t num_groups(const LinearWeight& weight) { return divide_up(weight.inputs, weight.group); }
int64_t scale_at(const LinearWeight& weight, int64_t output, int64_t group) {
  return (output / SCALED * num_groups(weight) + group) * SCALED + output % SCALED;
}
int64_t factor_at(const LinearWeight& weight, int64_t output, int64_t group) {
  const int64_t all = num_groups(weight) >> weight.shared, kinds = weight.minima ? 2 : 1;
  const int64_t factor = output / SCALED * all + (group >> weight.shared);
  return factor * kinds * SCALED + output % SCALED;
}

// Scales of VL outputs from `output` on and a group, or minima.
enum OfGroup { SCALE, MINIMUM };
template <OfGroup KIND>
__attribute__((always_inline)) inline vf load_of_group(const LinearWeight& weight, int64_t output,
                                                       int64_t group) {
  const void* from = KIND == SCALE ? weight.scales : weight.minima;
  const int64_t bits = KIND == SCALE ? weight.scale_bits : weight.minimum_bits;
  const int64_t at = scale_at(weight, output, group);
  if (bits == 16) return load(static_cast<const f16*>(from) + at);
  if (bits == 32) return load(static_cast<const float*>(from) + at);
  const f16* factors = static_cast<const f16*>(weight.factors) + KIND * SCALED;
  return load(static_cast<const int8_t*>(from) + at) *
         load(factors + factor_at(weight, output, group));
}

// Where a panel's numbers begin, and how far apart those of two lanes of an output are.
struct Panel {
  int64_t start, stride;

  Panel(const LinearWeight& weight, int64_t panel) {
    const int64_t first = panel / NR * NR;
    start = first * num_lanes(weight) * VL + (panel - first) * VL;
    stride = std::min<int64_t>(NR, num_panels(weight) - first) * VL;
  }
};

}  // namespace
}  // namespace HEADRACE_ISA
