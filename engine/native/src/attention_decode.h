// One token of a request against a part of its context, all heads.
#pragma once

#include "attention_plan.h"

namespace HEADRACE_ISA {
namespace {

// The products of VL numbers of a query, or of 2 * VL where pairs can be multiplied.
template <class T>
struct Products {
  using Query = float;
  static constexpr int WIDTH = VL;
  using Key = vf;
  static Key load_key(const T* k) { return load(k); }
  static vf multiply(vf sum, const float* q, Key key) { return sum + load(q) * key; }
};
#if defined(__AVX512BF16__)
template <>
struct Products<bf16> {
  using Query = bf16;
  static constexpr int WIDTH = 2 * VL;
  using Key = vu;
  static Key load_key(const bf16* k) { return *reinterpret_cast<const vu*>(k); }
  static vf multiply(vf sum, const bf16* q, Key key) {
    return dot_pairs(sum, *reinterpret_cast<const vu*>(q), key);
  }
};
#endif

// out[g][0 .. 4) = q[G][D] . k[4][D], for G query heads and four keys.
template <int G, class T>
void dots(const typename Products<T>::Query* q, int64_t q_stride, const T* const* k, int64_t dim,
          float* out) {
  using P = Products<T>;
  vf sums[G][4] = {};
  int64_t d = 0;
  for (; d + P::WIDTH <= dim; d += P::WIDTH)
    for (int t = 0; t < 4; ++t) {
      const typename P::Key key = P::load_key(k[t] + d);
      for (int g = 0; g < G; ++g) sums[g][t] = P::multiply(sums[g][t], q + g * q_stride + d, key);
    }
  for (int g = 0; g < G; ++g) {
    float* row = out + g * TILE;
    store_sums(sums[g][0], sums[g][1], sums[g][2], sums[g][3], row);
    for (int64_t rest = d; rest < dim; ++rest)
      for (int t = 0; t < 4; ++t)
        row[t] += to_float(q[g * q_stride + rest]) * to_float(k[t][rest]);
  }
}

// acc[G][Dv] = acc * scale[G] + weights[G][count] . values[count][Dv]
template <int G, class T>
void add_values(float* acc, int64_t acc_stride, const float* scale, const float* weights,
                const T* const* values, int count, int64_t dim) {
  constexpr int WIDE = G > 2 ? 2 : 4;
  int64_t d = 0;
  for (; d + WIDE * VL <= dim; d += WIDE * VL) {
    vf sums[G][WIDE];
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < WIDE; ++w) sums[g][w] = load(acc + g * acc_stride + d + w * VL) * scale[g];
    for (int t = 0; t < count; ++t) {
      vf value[WIDE];
      for (int w = 0; w < WIDE; ++w) value[w] = load(values[t] + d + w * VL);
      for (int g = 0; g < G; ++g)
        for (int w = 0; w < WIDE; ++w) sums[g][w] += value[w] * weights[g * TILE + t];
    }
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < WIDE; ++w) store(acc + g * acc_stride + d + w * VL, sums[g][w]);
  }
  for (; d < dim; ++d)
    for (int g = 0; g < G; ++g) {
      float sum = acc[g * acc_stride + d] * scale[g];
      for (int t = 0; t < count; ++t) sum += to_float(values[t][d]) * weights[g * TILE + t];
      acc[g * acc_stride + d] = sum;
    }
}

// One tile of keys for G query heads of one key/value head: scores, running softmax, values.
// most, sum: [G]; acc: [G][Dv]. `keys` is filled up to a multiple of four.
template <int G, class T>
void decode_tile(const AttentionCall& call, const typename Products<T>::Query* q,
                 const T* const* keys, const T* const* values, int count, float* most, float* sum,
                 float* acc) {
  alignas(64) float scores[G * TILE];
  const int64_t value_stride = round_up(call.value_dim, VL);
  for (int t = 0; t < count; t += 4)
    dots<G, T>(q, call.key_dim, keys + t, call.key_dim, scores + t);
  float scale[G];
  for (int g = 0; g < G; ++g) {
    float* row = scores + g * TILE;
    for (int t = count; t < TILE; ++t) row[t] = LOWEST;
    vf highest = splat(LOWEST);
    for (int t = 0; t < TILE; t += VL) {
      vf score = finish_scores(call, load(row + t));
      if (t + VL > count)
        for (int i = 0; i < VL; ++i)
          if (t + i >= count) score[i] = LOWEST;
      store(row + t, score);
      highest = max(highest, score);
    }
    const float next = std::max(most[g], max_of(highest));
    vf total = {};
    for (int t = 0; t < TILE; t += VL) {
      const vf weight = exp(load(row + t) - next);
      store(row + t, weight);
      total += weight;
    }
    scale[g] = most[g] == LOWEST ? 0.0f : std::exp(most[g] - next);
    sum[g] = sum[g] * scale[g] + sum_of(total);
    most[g] = next;
  }
  add_values<G>(acc, value_stride, scale, scores, values, count, call.value_dim);
}

template <class T>
void decode_groups(const AttentionCall& call, int64_t groups,
                   const typename Products<T>::Query* q, const T* const* keys,
                   const T* const* values, int count, float* most, float* sum, float* acc) {
  const int64_t key_stride = call.key_dim, value_stride = round_up(call.value_dim, VL);
  int64_t g = 0;
  for (; g + 4 <= groups; g += 4)
    decode_tile<4>(call, q + g * key_stride, keys, values, count, most + g, sum + g,
                   acc + g * value_stride);
  for (; g + 2 <= groups; g += 2)
    decode_tile<2>(call, q + g * key_stride, keys, values, count, most + g, sum + g,
                   acc + g * value_stride);
  for (; g < groups; ++g)
    decode_tile<1>(call, q + g * key_stride, keys, values, count, most + g, sum + g,
                   acc + g * value_stride);
}

template <class T>
void write_row(const AttentionCall& call, int64_t token, int64_t head, float most, float sum,
               const float* acc) {
  float scale;
  const float factor = inverse_sum(call, head, most, sum, &scale) * scale;
  T* out = static_cast<T*>(call.output) + (token * call.num_heads + head) * call.value_dim;
  int64_t d = 0;
  for (; d + VL <= call.value_dim; d += VL) store(out + d, load(acc + d) * factor);
  for (; d < call.value_dim; ++d) from_float(acc[d] * factor, out + d);
}

// Floats of one part: most [Hq], sum [Hq], acc [Hq][Dv].
int64_t part_floats(const AttentionCall& call) {
  return call.num_heads * (2 + round_up(call.value_dim, VL));
}

// Floats that a thread needs for a decode item: the query and a part.
int64_t decode_floats(const AttentionCall& call) {
  return call.num_heads * call.key_dim + part_floats(call);
}

template <class T>
void decode(const AttentionCall& call, const Item& item, int64_t token, float* parts, float* own) {
  using Query = typename Products<T>::Query;
  const int64_t key_stride = call.key_dim, value_stride = round_up(call.value_dim, VL);
  const int64_t groups = call.num_heads / call.num_kv_heads;
  Query* q = reinterpret_cast<Query*>(own);
  float* most = item.part < 0 ? own + call.num_heads * key_stride
                              : parts + item.part * part_floats(call);
  float* sum = most + call.num_heads;
  float* acc = sum + call.num_heads;
  const T* query = static_cast<const T*>(call.query) + token * call.query_token_stride;
  for (int64_t h = 0; h < call.num_heads; ++h) {
    most[h] = LOWEST;
    sum[h] = 0.0f;
    convert(query + h * call.query_head_stride, call.key_dim, q + h * key_stride);
  }
  std::fill(acc, acc + call.num_heads * value_stride, 0.0f);
  const int64_t key_row = call.num_kv_heads * call.key_dim;
  const int64_t value_row = call.num_kv_heads * call.value_dim;
  int64_t slots[TILE], next_slots[TILE];
  int count = int(std::min<int64_t>(TILE, item.end - item.begin));
  slots_of(call, item.request, item.begin, count, slots);
  for (int64_t from = item.begin; from < item.end; from += TILE) {
    // While one tile is computed, the next one is brought near, row by row.
    const int next_count = int(std::clamp<int64_t>(item.end - from - TILE, 0, TILE));
    slots_of(call, item.request, from + TILE, next_count, next_slots);
    for (int64_t h = 0; h < call.num_kv_heads; ++h) {
      const T* keys[TILE];
      const T* values[TILE];
      for (int t = 0; t < count; ++t) {
        keys[t] = static_cast<const T*>(call.keys) + slots[t] * key_row + h * call.key_dim;
        values[t] = static_cast<const T*>(call.values) + slots[t] * value_row + h * call.value_dim;
      }
      for (int t = count; t % 4; ++t) keys[t] = keys[0];  // somewhere; the score is not used
      for (int t = 0; t < next_count; ++t) {
        prefetch(static_cast<const T*>(call.keys) + next_slots[t] * key_row + h * call.key_dim,
                 call.key_dim * int64_t(sizeof(T)));
        prefetch(static_cast<const T*>(call.values) + next_slots[t] * value_row + h * call.value_dim,
                 call.value_dim * int64_t(sizeof(T)));
      }
      decode_groups<T>(call, groups, q + h * groups * key_stride, keys, values, count,
                       most + h * groups, sum + h * groups, acc + h * groups * value_stride);
    }
    std::copy(next_slots, next_slots + next_count, slots);
    count = next_count;
  }
  if (item.part < 0)
    for (int64_t h = 0; h < call.num_heads; ++h)
      write_row<T>(call, token, h, most[h], sum[h], acc + h * value_stride);
}

template <class T>
void merge(const AttentionCall& call, const Merge& merge, int64_t token, float* parts) {
  const int64_t stride = round_up(call.value_dim, VL), size = part_floats(call);
  float* first = parts + merge.first * size;
  for (int64_t h = 0; h < call.num_heads; ++h) {
    float& most = first[h];
    float& sum = first[call.num_heads + h];
    float* acc = first + 2 * call.num_heads + h * stride;
    for (int64_t p = 1; p < merge.count; ++p) {
      const float* other = first + p * size;
      const float* other_acc = other + 2 * call.num_heads + h * stride;
      const float next = std::max(most, other[h]);
      const float mine = std::exp(most - next), theirs = std::exp(other[h] - next);
      for (int64_t d = 0; d < stride; d += VL)
        store(acc + d, load(acc + d) * mine + load(other_acc + d) * theirs);
      sum = sum * mine + other[call.num_heads + h] * theirs;
      most = next;
    }
    write_row<T>(call, token, h, most, sum, acc);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
