// What the kernels of one variant call of each other.
#pragma once

#include <memory>

#include "calls.h"

namespace HEADRACE_ISA {

// The columns of a delta net's projected rows, in groups of heads: first each group's queries, keys,
// values and z, and then each group's b and a.
struct DeltaColumns {
  int64_t groups, heads, value_dim;
  int64_t keys, values;  // how many columns a group has for its keys, and for its values
  int64_t width;         // of a group before b and a
  int64_t stride;        // of a row

  explicit DeltaColumns(const RecurrentSpec& one)
      : groups(one.groups),
        heads(one.num_heads / one.groups),
        value_dim(one.value_dim),
        keys(one.num_key_heads * one.key_dim / one.groups),
        values(heads * one.value_dim),
        width(2 * (keys + values)),
        stride(groups * (width + 2 * heads)) {}

  int64_t z(int64_t head) const {
    return head / heads * width + 2 * keys + values + head % heads * value_dim;
  }
  int64_t b(int64_t head) const { return groups * width + head / heads * 2 * heads + head % heads; }
  int64_t a(int64_t head) const { return b(head) + heads; }
};

// A thread of a team.
struct Threads {
  int thread, threads;
};

// What parts `first` to `first + count` of each row's adapter add to y [T][y_stride]; see low_rank.cpp.
// A team computes it: `project` by all threads, and when these have done that and stored y, `spread`.
struct Added {
  const AdaptedRows* adapted;
  int64_t first, count;
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  int dtype;
  int64_t width = 0;  // of u; 0: nothing is added
  std::unique_ptr<float[]> u;

  Added(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x, int64_t x_stride,
        void* y, int64_t y_stride, int dtype);
  void project(Threads of) const;
  void spread(Threads of) const;
};

int64_t attention(const AttentionCall& call);
// `added` has the y of this call, or one of which this call's is the last part; or null.
void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t y_stride,
            int64_t rows, int threads, const Added* added);
void norm(const NormWeight& norm, const void* x, void* y, int64_t stride, int64_t rows, int dtype,
          int threads);
void gate(int activation, const void* gate, int64_t stride, const void* up, int64_t up_stride,
          void* y, int64_t y_stride, int64_t rows, int64_t width, int dtype, int threads);
void gated_norm(const LayerSpec& layer, void* x, const void* projected, int64_t rows, int threads);
void heads(const HeadsCall& call, int dtype, int threads);
void low_rank(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x,
              int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads);
void add(const void* x, const void* y, float factor, void* sum, int64_t rows, int64_t width,
         int dtype, int threads);
void convolution(const ConvolutionCall& call);
void delta_rule(const DeltaRuleCall& call);
void recur(const LayerSpec& layer, const RecurrentCall& call);
int64_t recurrent_scratch(const LayerSpec& layer);

}  // namespace HEADRACE_ISA
