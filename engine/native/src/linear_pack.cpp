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

// The rows of a panel's outputs as int8, by the largest number of each: codes [VL][inputs], and scales.
void quantise_int8(const LinearWeight& weight, int64_t panel, const bf16* rows, int64_t stride,
                   uint8_t* codes, float* scales) {
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
      codes[lane * inputs + k] = uint8_t(int((x + 12582912.0f) - 12582912.0f) + 128);
    }
  }
}

// The scale of a group of inputs for int4, and its numbers from -8 to 7, as floats in `numbers`. Of 24
// scales, of which each takes the number furthest from 0 near -8, the one is taken that leaves the least
// squared error when it is made the best for its numbers. `count`: a multiple of VL, zeros at the end.
float quantise_group(const float* x, int64_t count, float* numbers) {
  float furthest = 0;
  for (int64_t k = 0; k < count; ++k)
    if (std::abs(x[k]) > std::abs(furthest)) furthest = x[k];
  if (furthest == 0 || furthest - furthest != 0) {  // or not finite
    for (int64_t k = 0; k < count; ++k) numbers[k] = 0;
    return furthest;
  }
  // Rounded to nearest, ties to even, by a number whose last bit counts ones.
  const vf magic = splat(12582912.0f), least = splat(-8.0f), most = splat(7.0f);
  const auto rounded = [&](int64_t k, vf inverse) {
    const vf nearest = (load(x + k) * inverse + magic) - magic;
    return max(least, -max(-most, -nearest));
  };
  float best = 0, scale = 0;
  for (int i = 0; i < 24; i += 2) {  // two at a time, whose sums are added up together
    vf sums[4] = {};
    float totals[4];
    for (int j = 0; j < 2; ++j) {
      const vf inverse = splat(-(6.2f + 0.1f * float(i + j)) / furthest);
      for (int64_t k = 0; k < count; k += VL) {
        const vf one = rounded(k, inverse);
        sums[2 * j] += load(x + k) * one;
        sums[2 * j + 1] += one * one;
      }
    }
    store_sums(sums[0], sums[1], sums[2], sums[3], totals);
    for (int j = 0; j < 4; j += 2) {
      const float product = totals[j], square = totals[j + 1];
      if (square > 0 && product * product > best * square)
        best = product * product / square, scale = product / square;
    }
  }
  f16 held;
  from_float(scale, &held);
  scale = to_float(held);
  const vf inverse = splat(scale != 0 ? 1 / scale : 0);
  for (int64_t k = 0; k < count; k += VL) store(numbers + k, rounded(k, inverse));
  return scale;
}

// The rows of a panel's outputs as int4: codes [VL][inputs], and their scales.
void quantise_int4(const LinearWeight& weight, int64_t panel, const bf16* rows, int64_t stride,
                   uint8_t* codes, f16* scales) {
  const int64_t lanes = std::min<int64_t>(VL, weight.outputs - panel * VL), group = weight.group;
  const int64_t padded = divide_up(group, VL) * VL;
  const std::unique_ptr<float[]> x(new float[2 * padded]);
  float* numbers = x.get() + padded;
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t g = 0; g < num_groups(weight); ++g) {
      const int64_t first = g * group, count = std::min(group, weight.inputs - first);
      const bf16* from = rows + lane * stride + first;
      int64_t k = 0;
      for (; k + VL <= count; k += VL) store(x.get() + k, load(from + k));
      for (; k < count; ++k) x[k] = to_float(from[k]);
      for (; k < padded; ++k) x[k] = 0.0f;
      const float scale = quantise_group(x.get(), padded, numbers);
      from_float(scale, scales + scale_at(weight, panel * VL + lane, g));
      uint8_t* to = codes + lane * weight.inputs + first;
      for (k = 0; k < count; ++k) to[k] = uint8_t(int(numbers[k]) + 8);
    }
}

// A panel's lanes of int4 from the codes of its outputs; 8, which is 0, where there are none.
void pack_int4(const LinearWeight& weight, int64_t panel, const uint8_t* codes, int64_t stride) {
  const Panel place(weight, panel);
  const int64_t lanes = std::min<int64_t>(VL, weight.outputs - panel * VL);
  uint32_t* to = static_cast<uint32_t*>(const_cast<void*>(weight.packed)) + place.start;
  for (int64_t lane = 0; lane < VL; ++lane)
    for (int64_t i = 0; i < num_lanes(weight); ++i) {
      const int64_t first = i * 2 * INT4_PAIRS;
      const int64_t count = std::min<int64_t>(2 * INT4_PAIRS, weight.inputs - first);
      uint32_t bits = 0x88888888u;
      for (int64_t k = 0; lane < lanes && k < count; ++k)
        bits ^= uint32_t(codes[lane * stride + first + k] ^ 8) << (k / 2 * 4 + k % 2 * 16);
      to[i * place.stride + lane] = bits;
    }
}

// A panel's integers, and, unless they are given as codes, its scales. `space`: [VL][inputs].
void pack_integers(const LinearWeight& weight, int64_t panel, const void* from, int64_t stride,
                   uint8_t* space) {
  const int64_t first = panel * VL * stride, inputs = weight.inputs;
  const uint8_t* codes = static_cast<const uint8_t*>(from) + first;
  if (weight.dtype != CODES) {
    const bf16* rows = static_cast<const bf16*>(from) + first;
    void* scales = const_cast<void*>(weight.scales);
    if (weight.bits == 4)
      quantise_int4(weight, panel, rows, stride, space, static_cast<f16*>(scales));
    else
      quantise_int8(weight, panel, rows, stride, space, static_cast<float*>(scales));
    codes = space, stride = inputs;
  }
  if (weight.bits == 4) return pack_int4(weight, panel, codes, stride);
  const int64_t lanes = std::min<int64_t>(VL, weight.outputs - panel * VL);
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t k = 0; k < inputs; ++k) space[lane * inputs + k] = codes[lane * stride + k] ^ 128;
  pack_lanes(weight, panel, space, inputs,
             static_cast<uint16_t*>(const_cast<void*>(weight.packed)));
}

// The code of an input of an output, which lies in lane `lane` of its panel.
int code_at(const LinearWeight& weight, const Panel& place, int64_t lane, int64_t k) {
  if (weight.bits == 8) {
    const int64_t at = k / 2 * place.stride + place.start + lane;
    return static_cast<const uint8_t*>(weight.packed)[2 * at + k % 2] ^ 128;
  }
  const int64_t at = k / (2 * INT4_PAIRS) * place.stride + place.start + lane;
  const int64_t i = k % (2 * INT4_PAIRS);
  return static_cast<const uint32_t*>(weight.packed)[at] >> (i / 2 * 4 + i % 2 * 16) & 15;
}

// The numbers of an output, in the order of the inputs.
void read_row(const LinearWeight& weight, int64_t output, bf16* row) {
  const Panel place(weight, output / VL);
  const int centre = 1 << (weight.bits - 1);
  const int64_t lane = output % VL, first = output - lane;
  for (int64_t k = 0, g = 0; k < weight.inputs; ++g) {
    const float scale = load_of_group<SCALE>(weight, first, g)[lane];
    const float least = weight.minima ? load_of_group<MINIMUM>(weight, first, g)[lane] : 0.0f;
    for (const int64_t end = std::min(k + weight.group, weight.inputs); k < end; ++k) {
      const float code = float(code_at(weight, place, lane, k));
      const float number =
          weight.minima ? std::fma(scale, code, least) : scale * (code - float(centre));
      from_float(number, row + (weight.order ? weight.order[k] : k));
    }
  }
}

}  // namespace

// How many bytes packed weights are.
int64_t linear_size(const LinearWeight& weight) {
  return num_panels(weight) * num_lanes(weight) * VL * lane_bytes(weight);
}

// Packs a weight [outputs][inputs], whose rows are `stride` numbers apart, into what `weight` says; with
// scales, which are for whole panels, unless it is given as codes.
void linear_pack(const LinearWeight& weight, const void* from, int64_t stride, int threads) {
  const int64_t panels = num_panels(weight), inputs = weight.inputs;
  void* packed = const_cast<void*>(weight.packed);
#pragma omp parallel num_threads(threads)
  {
    const std::unique_ptr<uint8_t[]> space(weight.bits ? new uint8_t[VL * inputs] : nullptr);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      const auto rows = [&](auto numbers) { return numbers + p * VL * stride; };
      if (weight.bits)
        pack_integers(weight, p, from, stride, space.get());
      else if (weight.dtype == FLOAT32)
        pack_lanes(weight, p, rows(static_cast<const float*>(from)), stride,
                   static_cast<float*>(packed));
      else
        pack_lanes(weight, p, rows(static_cast<const uint16_t*>(from)), stride,
                   static_cast<uint32_t*>(packed));
    }
  }
}

// The weights of some outputs as they were before, or, of integers, as they are now: [count][inputs].
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
    if (weight.dtype == CODES) {
      uint8_t* to = static_cast<uint8_t*>(rows) + i * weight.inputs;
      for (int64_t k = 0; k < weight.inputs; ++k)
        to[k] = uint8_t(code_at(weight, place, wanted[i] % VL, k));
      continue;
    }
    bf16* row = static_cast<bf16*>(rows) + i * weight.inputs;
    if (weight.bits) {
      read_row(weight, wanted[i], row);
      continue;
    }
    const uint16_t* numbers = static_cast<const uint16_t*>(weight.packed);
    for (int64_t k = 0; k < weight.inputs; ++k) {
      const int64_t pair = place.start + k / 2 * place.stride + wanted[i] % VL;
      row[k].bits = numbers[2 * pair + k % 2];
    }
  }
  return 1;
}

}  // namespace HEADRACE_ISA
