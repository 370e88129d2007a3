// A tile of one request's tokens against its context, one key/value head.
//
// Rows are lanes: scores are computed as S^T [keys][LANES] = K . Q^T, and the output as
// O^T [Dv][LANES] = V^T . P^T, so that keys and values are read as they lie, one number (or pair
// of bfloat16) at a time for 64 rows, and the softmax needs no sums across lanes.
#pragma once

#include "attention_plan.h"

namespace HEADRACE_ISA {
namespace {

// How a register tile multiplies: one 32-bit number of the left side for each row, broadcast.
struct Float32 {
  using Left = float;
  static vf splat_left(float x) { return splat(x); }
  static vf multiply(vf sum, vf left, const float* right) { return sum + left * load(right); }
};
#if defined(__AVX512BF16__)
struct PairsOfBFloat16 {
  using Left = uint32_t;
  static vu splat_left(uint32_t x) { return x - vu{}; }
  static vf multiply(vf sum, vu left, const float* right) {
    return dot_pairs(sum, left, *reinterpret_cast<const vu*>(right));
  }
};
#endif

// out[ROWS][NR * VL] (+)= left[ROWS][depth] . right[depth][LANES]
// left(row, k) is a pointer to one 32-bit number.
template <class Op, int ROWS, class Left>
void multiply_tile(const Left& left, const float* right, int64_t depth, float* out, bool add) {
  vf sums[ROWS][NR];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < NR; ++n) sums[r][n] = add ? load(out + r * LANES + n * VL) : vf{};
  for (int64_t k = 0; k < depth; ++k)
    for (int r = 0; r < ROWS; ++r) {
      const auto factor = Op::splat_left(left(r, k));
      for (int n = 0; n < NR; ++n)
        sums[r][n] = Op::multiply(sums[r][n], factor, right + k * LANES + n * VL);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < NR; ++n) store(out + r * LANES + n * VL, sums[r][n]);
}

// out[rows][LANES] (+)= left[rows][depth] . right[depth][LANES]; make_left(row) gives left's rows.
template <class Op, class MakeLeft>
void multiply_all(const MakeLeft& make_left, int64_t rows, const float* right, int64_t depth,
                  float* out, bool add) {
  int64_t row = 0;
  for (; row + MR <= rows; row += MR)
    for (int lane = 0; lane < LANES; lane += NR * VL)
      multiply_tile<Op, MR>(make_left(row), right + lane, depth, out + row * LANES + lane, add);
  for (; row < rows; ++row)
    for (int lane = 0; lane < LANES; lane += NR * VL)
      multiply_tile<Op, 1>(make_left(row), right + lane, depth, out + row * LANES + lane, add);
}

// What a thread needs for a prefill item, in floats.
struct PrefillSpace {
  float* query;    // [D or D / 2][LANES]; at the end the output as it is rounded
  float* scores;   // [TILE][LANES]
  float* weights;  // [TILE / 2][LANES], pairs; or the scores themselves
  float* keys;     // [TILE][D], where they are converted
  float* values;   // [TILE][Dv], where they are converted or paired
  float* output;   // [Dv][LANES]
  float* most;     // [LANES]
  float* sum;      // [LANES]
  float* scale;    // [LANES]

  static int64_t floats(const AttentionCall& call) {
    return LANES * (std::max(call.key_dim, call.value_dim) + call.value_dim + TILE + TILE / 2 + 3) +
           TILE * (call.key_dim + call.value_dim);
  }

  PrefillSpace(const AttentionCall& call, float* p) {
    query = p, p += LANES * std::max(call.key_dim, call.value_dim);
    scores = p, p += LANES * TILE;
    weights = p, p += LANES * TILE / 2;
    output = p, p += LANES * call.value_dim;
    most = p, p += LANES;
    sum = p, p += LANES;
    scale = p, p += LANES;
    keys = p, p += TILE * call.key_dim;
    values = p;
  }
};

// The tile's scores become weights: masked, scaled, exponentiated; most, sum and scale follow.
void soften(const AttentionCall& call, PrefillSpace& space, const int32_t* positions, int64_t from,
            int count, bool masked) {
  for (int lane = 0; lane < LANES; lane += VL) {
    const vi last = *reinterpret_cast<const vi*>(positions + lane);
    const vi first = call.window ? last - int32_t(call.window) : vi{} - 1;  // the last hidden one
    vf highest = load(space.most + lane);
    const vf before = highest;
    for (int t = 0; t < count; ++t) {
      vf score = finish_scores(call, load(space.scores + t * LANES + lane));
      if (masked) {
        const vi key = vi{} + int32_t(from + t);
        score = select((key > last) | (key <= first), splat(LOWEST), score);
      }
      store(space.scores + t * LANES + lane, score);
      highest = max(highest, score);
    }
    // A row that has seen nothing yet keeps -inf; its weights must be 0 and not NaN.
    const vi seen = highest > splat(LOWEST);
    const vf base = select(seen, highest, vf{});
    const vf scale = select(before > splat(LOWEST), exp(before - base), vf{});
    vf total = load(space.sum + lane) * scale;
    for (int t = 0; t < count; ++t) {
      const vf weight = exp(load(space.scores + t * LANES + lane) - base);
      store(space.scores + t * LANES + lane, weight);
      total += weight;
    }
    store(space.most + lane, highest);
    store(space.sum + lane, total);
    store(space.scale + lane, scale);
  }
}

void rescale(const AttentionCall& call, PrefillSpace& space) {
  for (int lane = 0; lane < LANES; lane += VL) {
    const vf scale = load(space.scale + lane);
    bool one = true;
    for (int i = 0; i < VL; ++i) one &= scale[i] == 1.0f;
    if (one) continue;
    for (int64_t d = 0; d < call.value_dim; ++d)
      store(space.output + d * LANES + lane, load(space.output + d * LANES + lane) * scale);
  }
}

// One tile of keys, float32: scores by `scores`, then the weighted values by `values`.
template <class T>
struct ConvertedTile {
  static void load_query(const AttentionCall& call, const T* const* rows, int count, float* query) {
    std::fill(query, query + LANES * call.key_dim, 0.0f);
    for (int lane = 0; lane < count; ++lane)
      for (int64_t d = 0; d < call.key_dim; ++d)
        query[d * LANES + lane] = to_float(rows[lane][d]);
  }

  static void scores(const AttentionCall& call, PrefillSpace& space, const T* const* keys,
                     int count) {
    const int64_t dim = call.key_dim;
    for (int t = 0; t < count; ++t) convert(keys[t], dim, space.keys + t * dim);
    const auto left = [&](int64_t row) {
      const float* base = space.keys + row * dim;
      return [=](int r, int64_t k) { return base[r * dim + k]; };
    };
    multiply_all<Float32>(left, count, space.query, dim, space.scores, false);
  }

  static void values(const AttentionCall& call, PrefillSpace& space, const T* const* values,
                     int count) {
    const int64_t dim = call.value_dim;
    for (int t = 0; t < count; ++t) convert(values[t], dim, space.values + t * dim);
    const auto left = [&](int64_t row) {
      const float* base = space.values + row;
      return [=](int r, int64_t k) { return base[k * dim + r]; };
    };
    multiply_all<Float32>(left, dim, space.scores, count, space.output, true);
  }
};

#if defined(__AVX512BF16__)
// The same in pairs of bfloat16. An odd last key is paired with a weight of zero.
struct PairedTile {
  static void load_query(const AttentionCall& call, const bf16* const* rows, int count,
                         float* query) {
    std::fill(query, query + LANES * call.key_dim / 2, 0.0f);
    for (int lane = 0; lane < count; ++lane)
      for (int64_t pair = 0; pair < call.key_dim / 2; ++pair)
        std::memcpy(query + pair * LANES + lane, rows[lane] + 2 * pair, 4);
  }

  static void scores(const AttentionCall& call, PrefillSpace& space, const bf16* const* keys,
                     int count) {
    const auto left = [&](int64_t row) {
      const bf16* const* base = keys + row;
      return [=](int r, int64_t k) {
        uint32_t pair;
        std::memcpy(&pair, base[r] + 2 * k, 4);
        return pair;
      };
    };
    multiply_all<PairsOfBFloat16>(left, count, space.query, call.key_dim / 2, space.scores, false);
  }

  static void values(const AttentionCall& call, PrefillSpace& space, const bf16* const* values,
                     int count) {
    const int64_t dim = call.value_dim;
    const int pairs = (count + 1) / 2;
    uint32_t* paired = reinterpret_cast<uint32_t*>(space.values);
    uint32_t* weights = reinterpret_cast<uint32_t*>(space.weights);
    for (int p = 0; p < pairs; ++p) {
      const bool both = 2 * p + 1 < count;
      const bf16* low = values[2 * p];
      const bf16* high = values[both ? 2 * p + 1 : 2 * p];
      for (int64_t d = 0; d < dim; ++d)
        paired[p * dim + d] = low[d].bits | uint32_t(both ? high[d].bits : 0) << 16;
      for (int lane = 0; lane < LANES; lane += VL) {
        const vu first = (vu)load(space.scores + 2 * p * LANES + lane);
        const vu second = both ? (vu)load(space.scores + (2 * p + 1) * LANES + lane) : vu{};
        // Weights are between 0 and 1: rounding cannot overflow.
        const vu low_bits = (first + 0x7fffu + ((first >> 16) & 1u)) >> 16;
        const vu high_bits = (second + 0x7fffu + ((second >> 16) & 1u)) & 0xffff0000u;
        *reinterpret_cast<vu*>(weights + p * LANES + lane) = low_bits | high_bits;
      }
    }
    const auto left = [&](int64_t row) {
      const uint32_t* base = paired + row;
      return [=](int r, int64_t k) { return base[k * dim + r]; };
    };
    multiply_all<PairsOfBFloat16>(left, dim, space.weights, pairs, space.output, true);
  }
};
#endif

// `first_token`: of the request in the flat row.
template <class T, class Tile>
void prefill(const AttentionCall& call, const Item& item, int64_t first_token, float* own) {
  PrefillSpace space(call, own);
  const int64_t groups = call.num_heads / call.num_kv_heads;
  const int64_t start = call.starts[item.request];
  const T* rows[LANES];
  alignas(64) int32_t positions[LANES];
  // More than LANES query heads to a key/value head: in several rounds.
  for (int64_t head = 0; head < groups; head += LANES) {
    const int heads = int(std::min<int64_t>(LANES, groups - head));
    const int count = heads * int(item.end - item.begin);
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t token = item.begin + std::min(lane, count - 1) / heads;
      positions[lane] = int32_t(start + token);
      rows[lane] = static_cast<const T*>(call.query) +
                   (item.kv_head * groups + head + std::min(lane, count - 1) % heads) *
                       call.query_head_stride +
                   (first_token + token) * call.query_token_stride;
      space.most[lane] = LOWEST;
      space.sum[lane] = 0.0f;
    }
    std::fill(space.output, space.output + LANES * call.value_dim, 0.0f);
    Tile::load_query(call, rows, count, space.query);
    const int64_t end = start + item.end;  // keys that the last row sees
    const int64_t key_row = call.num_kv_heads * call.key_dim;
    const int64_t value_row = call.num_kv_heads * call.value_dim;
    for (int64_t from = first_visible(call, start + item.begin); from < end; from += TILE) {
      const int tile = int(std::min<int64_t>(TILE, end - from));
      int64_t slots[TILE];
      const T* keys[TILE];
      const T* values[TILE];
      slots_of(call, item.request, from, tile, slots);
      for (int t = 0; t < tile; ++t) {
        keys[t] = static_cast<const T*>(call.keys) + slots[t] * key_row + item.kv_head * call.key_dim;
        values[t] =
            static_cast<const T*>(call.values) + slots[t] * value_row + item.kv_head * call.value_dim;
      }
      Tile::scores(call, space, keys, tile);
      const bool masked = from + tile - 1 > start + item.begin ||
                          (call.window && from <= start + item.end - 1 - call.window);
      soften(call, space, positions, from, tile, masked);
      rescale(call, space);
      Tile::values(call, space, values, tile);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t query_head = item.kv_head * groups + head + lane % heads;
      float factor = 0.0f;
      if (lane < count)
        factor = inverse_sum(call, query_head, space.most[lane], space.sum[lane], &space.scale[lane]);
      space.scale[lane] *= factor;
    }
    // Rounded first, all lanes at once, and then put in rows.
    T* rounded = reinterpret_cast<T*>(space.query);  // [Dv][LANES]; the query is done with
    for (int64_t d = 0; d < call.value_dim; ++d)
      for (int lane = 0; lane < LANES; lane += VL)
        store(rounded + d * LANES + lane,
              load(space.output + d * LANES + lane) * load(space.scale + lane));
    for (int lane = 0; lane < count; ++lane) {
      const int64_t query_head = item.kv_head * groups + head + lane % heads;
      T* out = static_cast<T*>(call.output) +
               ((first_token + item.begin + lane / heads) * call.num_heads + query_head) *
                   call.value_dim;
      for (int64_t d = 0; d < call.value_dim; ++d) out[d] = rounded[d * LANES + lane];
    }
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
