// Where the numbers of a linear layer's packed weights lie; see linear.cpp.
#pragma once

#include <algorithm>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Lanes of 32 bits are two inputs, or one of float32.
int64_t num_pairs(const LinearWeight& weight) {
  return weight.dtype == FLOAT32 ? weight.inputs : divide_up(weight.inputs, 2);
}
int64_t num_panels(const LinearWeight& weight) { return divide_up(weight.outputs, VL); }

// Bytes of a lane.
int64_t pair_bytes(const LinearWeight& weight) {
  return weight.bits ? weight.bits / 4 : 4;
}

// The scales of int4: [blocks of SCALED outputs][groups of inputs][SCALED], float16.
constexpr int64_t SCALED = 64;
int64_t num_groups(const LinearWeight& weight) { return divide_up(weight.inputs, weight.group); }
int64_t scale_at(const LinearWeight& weight, int64_t output, int64_t group) {
  return (output / SCALED * num_groups(weight) + group) * SCALED + output % SCALED;
}

// Where a panel's numbers begin, and how far apart those of two pairs are.
struct Panel {
  int64_t start, stride;

  Panel(const LinearWeight& weight, int64_t panel) {
    const int64_t first = panel / NR * NR;
    start = first * num_pairs(weight) * VL + (panel - first) * VL;
    stride = std::min<int64_t>(NR, num_panels(weight) - first) * VL;
  }
};

}  // namespace
}  // namespace HEADRACE_ISA
