// What the kernels of one variant call of each other.
#pragma once

#include "calls.h"

namespace HEADRACE_ISA {

int64_t attention(const AttentionCall& call);
void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t y_stride,
            int64_t rows, int threads);
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
