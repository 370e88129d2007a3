// What recurrent layers compute between their first products and their last, over the rows of many
// requests.
//
//   short convolution   b, c, x ─ b x ─ convolution ─ c · ─▶ mixed
//   delta net           q k v, z, b, a ─┬─ q k v ─ convolution ─ SiLU ─ delta rule ─ norm, z ─▶ mixed
//                                       └─ a, b ─ decays, betas ─────────┘
//
// What was projected may come in groups of heads (DeltaColumns). The norm and z are `gated_norm` of
// elementwise.cpp, because it is compared with the model by itself. Elements are rounded where the
// modules round. States are read and written in their slots.
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t LEAST = 1 << 12;         // decays that are worth a second thread
constexpr int64_t LEAST_COPIED = 1 << 16;  // the same of elements that are copied

int64_t bytes_of(const LayerSpec& layer) { return layer.dtype == FLOAT32 ? 4 : 2; }

// y [T][channels] and the layer's last inputs, from rows of x that are x_stride apart.
void convolve(const LayerSpec& layer, const RecurrentCall& call, const void* x, int64_t x_stride,
              bool has_silu, void* y) {
  const RecurrentSpec& one = layer.recurrent;
  const LayerStates& states = *call.states;
  convolution({*call.rows, x, y, one.weight, one.bias, states.inputs, x_stride,
               states.inputs_stride, one.channels, one.width, states.inputs_width, layer.dtype,
               states.inputs_dtype, has_silu, call.threads});
}

void convolve_gated(const LayerSpec& layer, const RecurrentCall& call) {
  const int64_t width = layer.recurrent.channels, stride = 3 * width, rows = call.rows->num_rows;
  const int dtype = int(layer.dtype), threads = int(call.threads);
  char* const before = static_cast<char*>(call.projected);
  const char* const after = before + width * bytes_of(layer);
  char* const x = before + 2 * width * bytes_of(layer);
  gate(UNCHANGED, before, stride, x, stride, x, stride, rows, width, dtype, threads);
  convolve(layer, call, x, stride, false, call.output);
  gate(UNCHANGED, after, stride, call.output, width, call.output, width, rows, width, dtype,
       threads);
}

// -e^rate ln(1 + e^(a + bias)), as torch computes its softplus.
float decay(float rate, float a) {
  return -rate * (a > 20.0f ? a : std::log1p(std::exp(a)));
}

// Queries, keys and values side by side, [T][channels], from projected rows in several groups.
void gather(const DeltaColumns& columns, const RecurrentCall& call, int64_t channels, int64_t bytes,
            char* to) {
  const int64_t rows = call.rows->num_rows, groups = columns.groups;
  const int64_t keys = columns.keys * bytes, values = columns.values * bytes;
  const int team = rows * channels < LEAST_COPIED ? 1 : int(call.threads);
#pragma omp parallel for schedule(static) num_threads(team)
  for (int64_t t = 0; t < rows; ++t) {
    const char* from = static_cast<const char*>(call.projected) + t * columns.stride * bytes;
    char* const row = to + t * channels * bytes;
    for (int64_t g = 0; g < groups; ++g, from += columns.width * bytes) {
      std::memcpy(row + g * keys, from, keys);
      std::memcpy(row + (groups + g) * keys, from + keys, keys);
      std::memcpy(row + 2 * groups * keys + g * values, from + 2 * keys, values);
    }
  }
}

// Decays and betas [T][H], from a and b of the projected rows.
template <class T>
void find_decays(const LayerSpec& layer, const RecurrentCall& call, const DeltaColumns& columns,
                 float* decays, float* betas) {
  const int64_t heads = layer.recurrent.num_heads, rows = call.rows->num_rows;
  const T* const log_rate = static_cast<const T*>(layer.recurrent.log_rate);
  const T* const bias = static_cast<const T*>(layer.recurrent.rate_bias);
  const int team = rows * heads < LEAST ? 1 : int(call.threads);
#pragma omp parallel for schedule(static) num_threads(team)
  for (int64_t t = 0; t < rows; ++t) {
    const T* const row = static_cast<const T*>(call.projected) + t * columns.stride;
    for (int64_t h = 0; h < heads; ++h) {
      const float rate = std::exp(to_float(log_rate[h]));
      decays[t * heads + h] = decay(rate, to_float(row[columns.a(h)]) + to_float(bias[h]));
      T beta;
      from_float(1.0f / (1.0f + std::exp(-to_float(row[columns.b(h)]))), &beta);
      betas[t * heads + h] = layer.recurrent.beta_factor * to_float(beta);
    }
  }
}

void apply_delta_net(const LayerSpec& layer, const RecurrentCall& call) {
  const RecurrentSpec& one = layer.recurrent;
  const LayerStates& states = *call.states;
  const int64_t bytes = bytes_of(layer), rows = call.rows->num_rows, heads = one.num_heads;
  const int64_t keys = one.num_key_heads * one.key_dim;
  const DeltaColumns columns(one);
  float* const decays = static_cast<float*>(call.scratch);
  float* const betas = decays + rows * heads;
  char* const mixed = reinterpret_cast<char*>(betas + rows * heads);  // queries, keys and values
  if (columns.groups == 1) {
    convolve(layer, call, call.projected, columns.stride, true, mixed);
  } else {
    char* const side_by_side = mixed + rows * one.channels * bytes;
    gather(columns, call, one.channels, bytes, side_by_side);
    convolve(layer, call, side_by_side, one.channels, true, mixed);
  }
  (layer.dtype == FLOAT32 ? find_decays<float> : find_decays<bf16>)(layer, call, columns, decays,
                                                                    betas);
  delta_rule({*call.rows, mixed, mixed + keys * bytes, mixed + 2 * keys * bytes, decays, betas,
              call.output, states.matrices, one.channels, one.channels, one.channels,
              states.matrices_stride, one.num_key_heads, heads, one.key_dim, one.value_dim,
              1, true, layer.dtype, call.threads});
}

}  // namespace

// How many bytes a token needs for a layer's scratch.
int64_t recurrent_scratch(const LayerSpec& layer) {
  if (layer.mixer != DELTA_NET) return 0;
  const RecurrentSpec& one = layer.recurrent;
  return (one.groups == 1 ? 1 : 2) * one.channels * bytes_of(layer) + 2 * one.num_heads * 4;
}

// output, and the states after the step's rows; what was projected may be changed. Rows that are no
// request's are zeros.
void recur(const LayerSpec& layer, const RecurrentCall& call) {
  (layer.mixer == DELTA_NET ? apply_delta_net : convolve_gated)(layer, call);
}

}  // namespace HEADRACE_ISA
