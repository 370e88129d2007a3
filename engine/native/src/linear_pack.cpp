// Packs the weights of linear layers, as linear.cpp reads them, and reads them back.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "linear_layout.h"

namespace HEADRACE_ISA {
namespace {

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

}  // namespace HEADRACE_ISA
