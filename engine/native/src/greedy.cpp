// The token that greedy sampling chooses, of bfloat16 logits, read once and as they are.
//
// A bfloat16 number's bits, with the sign taken off and negated where it was set, are a whole number
// in the order of the numbers, 0 and -0 the same: so the largest is found sixteen bits at a time.
#include <algorithm>
#include <cstdint>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t BLOCK = 512;      // numbers; the one with the largest of all is read again
constexpr int64_t LEAST = 1 << 18;  // numbers that are worth a second thread
constexpr int INFINITE = 0x7f80;    // beyond it are the NaNs

int16_t in_order(uint16_t bits) {
  const int16_t magnitude = int16_t(bits & 0x7fff);
  return bits & 0x8000 ? int16_t(-magnitude) : magnitude;
}

// The first of a row's largest numbers; -1: there is a NaN, or the largest is infinite.
int64_t first_largest(const uint16_t* row, int64_t width) {
  int largest = INT16_MIN, farthest = 0;
  int64_t block = 0;
  for (int64_t start = 0; start < width; start += BLOCK) {
    const int64_t end = std::min(start + BLOCK, width);
    int16_t best = INT16_MIN, magnitude = 0;
#pragma omp simd reduction(max : best, magnitude)
    for (int64_t i = start; i < end; ++i) {
      best = std::max(best, in_order(row[i]));
      magnitude = std::max(magnitude, int16_t(row[i] & 0x7fff));
    }
    if (best > largest) {
      largest = best;
      block = start;
    }
    farthest = std::max<int>(farthest, magnitude);
  }
  if (farthest > INFINITE || largest == INFINITE || largest <= -INFINITE) return -1;
  for (int64_t i = block;; ++i)
    if (in_order(row[i]) == largest) return i;
}

}  // namespace

// tokens [rows]: of each row of logits [rows][width], which are `stride` numbers apart.
void greedy(const void* logits, int64_t stride, int64_t rows, int64_t width, int64_t* tokens,
            int threads) {
  const uint16_t* from = static_cast<const uint16_t*>(logits);
  const int team = rows * width < LEAST ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team)
  for (int64_t r = 0; r < rows; ++r) tokens[r] = first_largest(from + r * stride, width);
}

}  // namespace HEADRACE_ISA
