// Causal convolution of each channel with a few weights, over the rows of many requests.
//
//   state [slots][C][S] ─ the last inputs ─┐
//   x [T][C] ──────────────────────────────┴─ weights ─ + bias ─ SiLU ─▶ y [T][C]
//
// A thread computes some channels of all requests, one row after the other. A row's result depends on
// its own request alone.
#include <algorithm>
#include <type_traits>

#include "calls.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int64_t BLOCK = 256;      // channels that are computed together
constexpr int64_t AHEAD = 4;        // rows that are fetched early: they lie far from each other
constexpr int64_t MOST = 8;         // weights of a channel, and inputs that a state holds
constexpr int64_t LEAST = 1 << 15;  // elements that are worth a second thread

// Between a state's order, [channels][WIDTH], and rows, [WIDTH][BLOCK].
template <int WIDTH, class S>
void to_rows(const S* state, int64_t count, S (*rows)[BLOCK]) {
  for (int64_t c = 0; c < count; ++c)
    for (int s = 0; s < WIDTH; ++s) rows[s][c] = state[c * WIDTH + s];
}
template <int WIDTH, class S>
void from_rows(const S (*rows)[BLOCK], int64_t count, S* state) {
  for (int64_t c = 0; c < count; ++c)
    for (int s = 0; s < WIDTH; ++s) state[c * WIDTH + s] = rows[s][c];
}

// f(width as a constant), for a width of 1 to MOST.
template <int WIDTH = 1, class F>
void with_width(int64_t width, F f) {
  if (width == WIDTH) return f(std::integral_constant<int, WIDTH>{});
  if constexpr (WIDTH < MOST) with_width<WIDTH + 1>(width, f);
}

// An input as the convolution reads it, or as a state keeps it.
template <class To, class From>
To converted(From x) {
  if constexpr (std::is_same_v<To, From>) return x;
  To result;
  from_float(to_float(x), &result);
  return result;
}

// The weights and biases of some channels.
template <class T>
struct Filter {
  float weight[MOST][BLOCK] = {};
  float bias[BLOCK] = {};

  template <int WIDTH>
  Filter(const ConvolutionCall& call, std::integral_constant<int, WIDTH>, int64_t channel,
         int64_t count) {
    const T* from = static_cast<const T*>(call.weight) + channel * WIDTH;
    for (int64_t c = 0; c < count; ++c)
      for (int j = 0; j < WIDTH; ++j) weight[j][c] = to_float(from[c * WIDTH + j]);
    if (!call.bias) return;
    for (int64_t c = 0; c < count; ++c)
      bias[c] = to_float(static_cast<const T*>(call.bias)[channel + c]);
  }
};

// One row of some channels, from the row itself and those before it: taps, the oldest first.
template <class T, int WIDTH>
void convolve_row(const Filter<T>& filter, const T* const* taps, int64_t count, bool has_silu,
                  T* y) {
  over(count, [&](int64_t c, auto size) {
    vf sum = load(filter.bias + c);
    for (int j = 0; j < WIDTH; ++j) sum += load(filter.weight[j] + c) * get(taps[j] + c, size);
    put(y + c, has_silu ? silu(rounded<T>(sum)) : sum, size);
  });
}

// Some channels of one request, whose rows begin at `first`.
template <class T, class S, int WIDTH>
void convolve(const ConvolutionCall& call, const Filter<T>& filter, int64_t request, int64_t first,
              int64_t channel, int64_t count) {
  const int64_t rows = call.rows.counts[request], kept = call.state_width;
  const T* x = static_cast<const T*>(call.x) + first * call.x_stride + channel;
  T* y = static_cast<T*>(call.y) + first * call.channels + channel;
  S* state = static_cast<S*>(call.state) + call.rows.slots[request] * call.slot_stride +
             channel * kept;
  S before[MOST][BLOCK] = {};  // what the state holds, the oldest first
  if (call.rows.starts[request])
    with_width(kept, [&](auto width) { to_rows<width>(state, count, before); });
  T past[MOST][BLOCK];  // the inputs before the first row
  for (int j = 0; j < WIDTH - 1; ++j)
    for (int64_t c = 0; c < count; ++c)
      past[j][c] = converted<T>(before[kept - (WIDTH - 1) + j][c]);
  for (int64_t i = 0; i < rows; ++i) {
    if (i + AHEAD < rows)
      for (int64_t c = 0; c < count; c += 64 / sizeof(T))
        __builtin_prefetch(x + (i + AHEAD) * call.x_stride + c);
    const T* taps[WIDTH];
    for (int j = 0; j < WIDTH; ++j) {
      const int64_t at = i - (WIDTH - 1) + j;
      taps[j] = at < 0 ? past[WIDTH - 1 + at] : x + at * call.x_stride;
    }
    convolve_row<T, WIDTH>(filter, taps, count, call.silu, y + i * call.channels);
  }
  S after[MOST][BLOCK];
  for (int64_t s = 0; s < kept; ++s) {
    const int64_t at = rows - kept + s;
    for (int64_t c = 0; c < count; ++c)
      after[s][c] = at < 0 ? before[kept + at][c] : converted<S>(x[at * call.x_stride + c]);
  }
  with_width(kept, [&](auto width) { from_rows<width>(after, count, state); });
}

template <class T, class S>
void convolve_all(const ConvolutionCall& call) {
  const StateRows& rows = call.rows;
  const int64_t blocks = (call.channels + BLOCK - 1) / BLOCK;
  const int team = rows.num_rows * call.channels < LEAST ? 1 : int(call.threads);
  with_width(call.width, [&](auto width) {
#pragma omp parallel for schedule(static) num_threads(team)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t channel = b * BLOCK, count = std::min(BLOCK, call.channels - channel);
      const Filter<T> filter(call, width, channel, count);
      int64_t first = 0;
      for (int64_t r = 0; r < rows.num_requests; first += rows.counts[r++])
        if (rows.counts[r]) convolve<T, S, width>(call, filter, r, first, channel, count);
      for (int64_t t = first; t < rows.num_rows; ++t)
        std::memset(static_cast<T*>(call.y) + t * call.channels + channel, 0, count * sizeof(T));
    }
  });
}

}  // namespace

// y, and the state after the step's rows. Rows that are no request's are zeros in y.
void convolution(const ConvolutionCall& call) {
  if (call.dtype == FLOAT32) return convolve_all<float, float>(call);
  (call.state_dtype == FLOAT32 ? convolve_all<bf16, float> : convolve_all<bf16, bf16>)(call);
}

}  // namespace HEADRACE_ISA
