// A token drawn at random for each row that has a temperature and no filters.
//
// What engine/sampling/ops.py does in tensors, in two passes: the largest logit, then the sum of
// the weights, block by block; only the block that is drawn from is read again. Weights are
// integers, so neither blocks nor threads change a sum. All variants have the same bits of e^x: no
// operation is left for the compiler to fuse.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t BLOCK = 2048;     // logits
constexpr int64_t LEAST = 1 << 14;  // logits that are worth a second thread

// The largest; NaN if there is one.
template <class T>
float largest(const T* x, int64_t count) {
  float most = -INFINITY;
  int nans = 0;
#pragma omp simd reduction(max : most) reduction(| : nans)
  for (int64_t i = 0; i < count; ++i) {
    const float one = to_float(x[i]);
    most = one > most ? one : most;
    nans |= one != one;
  }
  return nans ? NAN : most;
}

// e^((x - most) / temperature) in units of 2^-40, rounded down.
inline uint64_t weight(float x, float most, float temperature) {
  float s = (x - most) / temperature;
  s = s > -40.0f ? s : -40.0f;      // of which the weight is 0
  const float magic = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = std::fma(s, 1.44269504088896341f, magic) - magic;
  const float r = std::fma(n, -1.42860682030941723e-6f, std::fma(n, -0.693145751953125f, s));
  float p = std::fma(std::fma(1.0f / 5040, r, 1.0f / 720), r, 1.0f / 120);
  p = std::fma(std::fma(std::fma(p, r, 1.0f / 24), r, 1.0f / 6), r, 0.5f);
  p = std::fma(p, r * r, r) + 1.0f;  // from 0.7 to 1.5: 24 bits behind the point hold all of it
  return uint64_t(int32_t(p * 16777216.0f)) << 16 >> -int32_t(n);
}

template <class T>
uint64_t sum(const T* x, int64_t count, float most, float temperature) {
  uint64_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += weight(to_float(x[i]), most, temperature);
  return total;
}

template <class T>
void draw(const T* logits, int64_t stride, const int64_t* rows, int64_t count, int64_t width,
          const double* uniforms, const float* temperatures, int64_t* tokens, int threads) {
  const int64_t blocks = (width + BLOCK - 1) / BLOCK;
  std::vector<float> most(count * blocks);
  std::vector<uint64_t> sums(count * blocks);
  const int team = count * width < LEAST ? 1 : threads;
#pragma omp parallel num_threads(team)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * blocks; ++i) {
      const int64_t row = i / blocks, start = i % blocks * BLOCK;
      most[i] = largest(logits + rows[row] * stride + start, std::min(BLOCK, width - start));
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * blocks; ++i) {
      const int64_t row = i / blocks, start = i % blocks * BLOCK;
      const float top = largest(most.data() + row * blocks, blocks);
      if (std::isfinite(top))
        sums[i] = sum(logits + rows[row] * stride + start, std::min(BLOCK, width - start), top,
                      temperatures[row]);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; ++row) {
      const uint64_t* block = sums.data() + row * blocks;
      const uint64_t total = std::accumulate(block, block + blocks, uint64_t(0));
      tokens[row] = -1;
      if (!total) continue;
      // Rounding may give the total itself: the last token must still be chosen.
      uint64_t left = std::min(uint64_t(uniforms[row] * double(total)), total - 1);
      int64_t i = 0;
      for (; left >= *block; i += BLOCK) left -= *block++;
      const float top = largest(most.data() + row * blocks, blocks);
      const T* x = logits + rows[row] * stride;
      for (uint64_t one; left >= (one = weight(to_float(x[i]), top, temperatures[row])); ++i)
        left -= one;
      tokens[row] = i;
    }
  }
}

}  // namespace

// tokens [count]: one for each of `rows` of the logits, which are `stride` elements apart; -1: the
// largest of its `width` logits is not finite, or one is a NaN.
void draw(const void* x, int64_t stride, const int64_t* rows, int64_t count, int64_t width,
          int dtype, const double* uniforms, const float* temperatures, int64_t* tokens,
          int threads) {
  const auto run = [&](auto* logits) {
    draw(logits, stride, rows, count, width, uniforms, temperatures, tokens, threads);
  };
  dtype == BFLOAT16 ? run(static_cast<const bf16*>(x)) : run(static_cast<const float*>(x));
}

}  // namespace HEADRACE_ISA
