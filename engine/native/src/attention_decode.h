// One token of each of some requests against a part of the context that they share, all heads. Rows of one
// request, whose drafts are verified, share all of it.
//
// A context is read once, at the speed of the memory, if it is asked for early, evenly, and in the
// order in which it lies: all heads of one token after another. So a tile of keys is scored token by
// token, all heads, then its values are added; all the while the next tile is brought near, a few
// lines at a time.
#pragma once

#include <type_traits>

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

// What the next tile reads, brought near a few lines at a time: first the rows of keys, then those of
// values.
struct Ahead {
  const char* rows[2 * TILE];
  int64_t bytes[2];  // of a row of keys, and of one of values
  int keys = 0, count = 0, row = 0;
  int64_t done = 0;  // bytes of `row`
  int lines = 0;     // in a step

  void step() {
    for (int i = 0; i < lines && row < count; ++i) {
      __builtin_prefetch(rows[row] + done, 0, 2);
      done += 64;
      if (done >= bytes[row >= keys]) ++row, done = 0;
    }
  }
};

// out[g][0 .. 4) = q[G][D] . k[4][D], for G query heads and four keys.
template <int G, class T>
void dots(const typename Products<T>::Query* q, const T* const* k, int64_t dim, float* out) {
  using P = Products<T>;
  vf sums[G][4] = {};
  int64_t d = 0;
  for (; d + P::WIDTH <= dim; d += P::WIDTH)
    for (int t = 0; t < 4; ++t) {
      const typename P::Key key = P::load_key(k[t] + d);
      for (int g = 0; g < G; ++g) sums[g][t] = P::multiply(sums[g][t], q + g * dim + d, key);
    }
  for (int g = 0; g < G; ++g) {
    float* row = out + g * TILE;
    store_sums(sums[g][0], sums[g][1], sums[g][2], sums[g][3], row);
    for (int64_t rest = d; rest < dim; ++rest)
      for (int t = 0; t < 4; ++t) row[t] += to_float(q[g * dim + rest]) * to_float(k[t][rest]);
  }
}

// acc[G][from .. Dv) = acc * scale[G] + weights[G][count] . values[count][from .. Dv)
template <int G, class T>
void add_values(float* acc, int64_t stride, const float* scale, const float* weights,
                const T* const* values, int count, int64_t from, int64_t dim, Ahead& ahead) {
  constexpr int WIDE = G > 2 ? 2 : 4;
  int64_t d = from;
  for (; d + WIDE * VL <= dim; d += WIDE * VL) {
    vf sums[G][WIDE];
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < WIDE; ++w) sums[g][w] = load(acc + g * stride + d + w * VL) * scale[g];
    for (int t = 0; t < count; ++t) {
      if (t % 4 == 0) ahead.step();
      vf value[WIDE];
      for (int w = 0; w < WIDE; ++w) value[w] = load(values[t] + d + w * VL);
      for (int g = 0; g < G; ++g)
        for (int w = 0; w < WIDE; ++w) sums[g][w] += value[w] * weights[g * TILE + t];
    }
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < WIDE; ++w) store(acc + g * stride + d + w * VL, sums[g][w]);
  }
  for (; d < dim; ++d)
    for (int g = 0; g < G; ++g) {
      float sum = acc[g * stride + d] * scale[g];
      for (int t = 0; t < count; ++t) sum += to_float(values[t][d]) * weights[g * TILE + t];
      acc[g * stride + d] = sum;
    }
}

// How the values of a tile are added to what a query head has of them so far.
template <class T>
struct Values {
  template <int G>
  static void add(float* acc, int64_t stride, const float* scale, const float* weights,
                  const T* const* values, int count, int64_t dim, Ahead& ahead) {
    add_values<G>(acc, stride, scale, weights, values, count, 0, dim, ahead);
  }

  static void put_in_order(float*, int64_t) {}
};

#if defined(__AVX512BF16__)
// In pairs of tokens. Two rows are interleaved within 128 bits, so that the numbers of 2 * VL dimensions
// lie in another order until the last tile is added.
template <>
struct Values<bf16> {
  static constexpr int BOTH = 2 * VL;

  template <int G>
  static void add(float* acc, int64_t stride, const float* scale, const float* weights,
                  const bf16* const* values, int count, int64_t dim, Ahead& ahead) {
    constexpr int WIDE = G > 2 ? 2 : 4;  // of BOTH
    alignas(64) bf16 rounded[G * TILE];
    for (int i = 0; i < G * TILE; i += VL) store(rounded + i, load(weights + i));
    int64_t d = 0;
    for (; d + WIDE * BOTH <= dim; d += WIDE * BOTH)
      add_pairs<G, WIDE>(acc + d, stride, scale, rounded, values, d, count, ahead);
    for (; d + BOTH <= dim; d += BOTH)
      add_pairs<G, 1>(acc + d, stride, scale, rounded, values, d, count, ahead);
    add_values<G>(acc, stride, scale, weights, values, count, d, dim, ahead);
  }

  // acc: of Dv numbers.
  static void put_in_order(float* acc, int64_t dim) {
    for (int64_t d = 0; d + BOTH <= dim; d += BOTH) {
      const __m512i low = (__m512i)load(acc + d), high = (__m512i)load(acc + d + VL);
      const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
      const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
      store(acc + d, (vf)_mm512_permutex2var_epi64(low, first, high));
      store(acc + d + VL, (vf)_mm512_permutex2var_epi64(low, second, high));
    }
  }

 private:
  template <int G, int WIDE>
  static void add_pairs(float* acc, int64_t stride, const float* scale, const bf16* weights,
                        const bf16* const* values, int64_t d, int count, Ahead& ahead) {
    vf sums[G][2 * WIDE];
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < 2 * WIDE; ++w) sums[g][w] = load(acc + g * stride + w * VL) * scale[g];
    for (int t = 0; t < count; t += 2) {
      if (t % 4 == 0) ahead.step();
      // A last one without a second: its weight is zero.
      const bf16* first = values[t] + d;
      const bf16* second = values[t + 1 < count ? t + 1 : t] + d;
      vu pair[G];
      for (int g = 0; g < G; ++g) {
        uint32_t bits;
        std::memcpy(&bits, weights + g * TILE + t, 4);
        pair[g] = bits - vu{};
      }
      for (int w = 0; w < WIDE; ++w) {
        const __m512i a = _mm512_loadu_si512(first + w * BOTH);
        const __m512i b = _mm512_loadu_si512(second + w * BOTH);
        const vu low = (vu)_mm512_unpacklo_epi16(a, b), high = (vu)_mm512_unpackhi_epi16(a, b);
        for (int g = 0; g < G; ++g) {
          sums[g][2 * w] = dot_pairs(sums[g][2 * w], pair[g], low);
          sums[g][2 * w + 1] = dot_pairs(sums[g][2 * w + 1], pair[g], high);
        }
      }
    }
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < 2 * WIDE; ++w) store(acc + g * stride + w * VL, sums[g][w]);
  }
};
#endif

// A decode item's state. H are the query heads of all rows, in the order of [Hkv][rows][Hq / Hkv]: those that
// read the same keys are together.
template <class T>
struct Decoding {
  const AttentionCall& call;
  int64_t num_rows;
  int64_t group;                       // Hq / Hkv
  typename Products<T>::Query* query;  // [H][D]
  float* scores;                       // [H][TILE]
  float* most;                         // [H]
  float* sum;                          // [H]
  float* acc;                          // [H][acc_stride]
  int64_t acc_stride;
  Ahead ahead{};

  // Where a row has its query head.
  int64_t head_of(int64_t row, int64_t head) const {
    return (head / group * num_rows + row) * group + head % group;
  }

  // Scores of four keys, rows of all heads, for G query heads from `head` on.
  template <int G>
  void score(int64_t head, int64_t kv_head, const T* const* keys, int t) {
    const T* four[4];
    for (int i = 0; i < 4; ++i) four[i] = keys[t + i] + kv_head * call.key_dim;
    ahead.step();
    dots<G, T>(query + head * call.key_dim, four, call.key_dim, scores + head * TILE + t);
  }

  // Running softmax over the tile's scores, and its values, for G query heads from `head` on.
  template <int G>
  void add(int64_t head, int64_t kv_head, const T* const* values, int count) {
    float scale[G];
    for (int g = 0; g < G; ++g) scale[g] = soften(head + g, count);
    const T* rows[TILE];
    for (int t = 0; t < count; ++t) rows[t] = values[t] + kv_head * call.value_dim;
    Values<T>::template add<G>(acc + head * acc_stride, acc_stride, scale, scores + head * TILE,
                               rows, count, call.value_dim, ahead);
  }

  // Scores of one head become weights. By how much what it has so far is to be scaled.
  float soften(int64_t head, int count) {
    float* row = scores + head * TILE;
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
    const float before = most[head], next = std::max(before, max_of(highest));
    vf total = {};
    for (int t = 0; t < TILE; t += VL) {
      const vf weight = exp(load(row + t) - next);
      store(row + t, weight);
      total += weight;
    }
    const float scale = before == LOWEST ? 0.0f : std::exp(before - next);
    sum[head] = sum[head] * scale + sum_of(total);
    most[head] = next;
    return scale;
  }

  // work(G, head, kv_head) for all query heads: G of them at a time, which are among the same `each`.
  template <class Work>
  void for_heads(int64_t each, const Work& work) {
    for (int64_t end = each; end <= call.num_heads * num_rows; end += each) {
      int64_t head = end - each;
      const int64_t kv_head = head / (group * num_rows);
      for (; head + 4 <= end; head += 4) work(std::integral_constant<int, 4>(), head, kv_head);
      for (; head + 2 <= end; head += 2) work(std::integral_constant<int, 2>(), head, kv_head);
      for (; head < end; ++head) work(std::integral_constant<int, 1>(), head, kv_head);
    }
  }

  // counts: of each row, how many of the keys it has.
  void tile(const T* const* keys, const T* const* values, int count, const int* counts) {
    for (int t = 0; t < count; t += 4)
      for_heads(group * num_rows, [&](auto many, int64_t head, int64_t kv_head) {
        score<decltype(many)::value>(head, kv_head, keys, t);
      });
    const bool all_alike = std::all_of(counts, counts + num_rows, [&](int of) { return of == count; });
    for_heads(all_alike ? group * num_rows : group, [&](auto many, int64_t head, int64_t kv_head) {
      const int own = counts[head / group % num_rows];
      if (own) add<decltype(many)::value>(head, kv_head, values, own);
    });
  }
};

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

// Floats that a thread needs for a row of a decode item: the query, a tile's scores and a part.
int64_t decode_floats(const AttentionCall& call) {
  return call.num_heads * (call.key_dim + TILE) + part_floats(call);
}

// The rows of some positions, all heads; keys are filled up to a multiple of four.
template <class T>
void rows_of(const AttentionCall& call, int64_t request, int64_t from, int count, const T** keys,
             const T** values) {
  for (int t = 0; t < count; ++t) {
    const int64_t slot = slot_of(call, request, from + t) * call.num_kv_heads;
    keys[t] = static_cast<const T*>(call.keys) + slot * call.key_dim;
    values[t] = static_cast<const T*>(call.values) + slot * call.value_dim;
  }
  for (int t = count; t % 4; ++t) keys[t] = keys[0];  // somewhere; the score is not used
}

// Lines that are to be brought near at each of a tile's steps, so that they come evenly.
template <class T>
void spread(const Decoding<T>& state, Ahead& ahead, const T* const* keys, const T* const* values,
            int count) {
  const AttentionCall& call = state.call;
  ahead = {};
  ahead.bytes[0] = call.num_kv_heads * call.key_dim * int64_t(sizeof(T));
  ahead.bytes[1] = call.num_kv_heads * call.value_dim * int64_t(sizeof(T));
  ahead.keys = count, ahead.count = 2 * count;
  for (int t = 0; t < count; ++t) {
    ahead.rows[t] = reinterpret_cast<const char*>(keys[t]);
    ahead.rows[count + t] = reinterpret_cast<const char*>(values[t]);
  }
  // One step for four keys, and one for four tokens of each piece of a value.
  const int64_t pieces = 1 + std::max<int64_t>(1, call.value_dim / (8 * VL));
  const int64_t times = (state.group * state.num_rows + 3) / 4 * call.num_kv_heads;
  const int64_t lines = TILE * (ahead.bytes[0] + ahead.bytes[1]) / 64;
  ahead.lines = int(lines / (TILE / 4 * times * pieces) + 1);
}

// following: what the thread probably takes next, whose first tile is brought near, too; or null.
template <class T>
void decode(const AttentionCall& call, const Plan& plan, const Item& item, const Item* following,
            float* parts, float* own) {
  const int64_t heads = call.num_heads * item.num_rows, stride = round_up(call.value_dim, VL);
  float* scores = own + heads * call.key_dim;
  float* most = scores + heads * TILE;
  float* sum = most + heads;
  float* acc = sum + heads;
  Decoding<T> state{call, item.num_rows, call.num_heads / call.num_kv_heads,
                    reinterpret_cast<typename Products<T>::Query*>(own), scores, most, sum, acc, stride};
  Row rows[ROWS];
  for (int64_t i = 0, row = item.row; i < item.num_rows; row = rows[i++].next) {
    rows[i] = plan.rows[row];
    const T* from_query = static_cast<const T*>(call.query) +
                          plan.first_tokens[rows[i].request] * call.query_token_stride;
    for (int64_t h = 0; h < call.num_heads; ++h)
      convert(from_query + h * call.query_head_stride, call.key_dim,
              state.query + state.head_of(i, h) * call.key_dim);
  }
  std::fill(most, most + heads, LOWEST);
  std::fill(sum, acc + heads * stride, 0.0f);
  const T* keys[2][TILE];
  const T* values[2][TILE];
  int count = int(std::min<int64_t>(TILE, item.end - item.begin)), now = 0;
  rows_of(call, item.request, item.begin, count, keys[now], values[now]);
  for (int64_t from = item.begin; from < item.end; from += TILE) {
    const int next = int(std::clamp<int64_t>(item.end - from - TILE, 0, TILE));
    int near = next;
    if (next) {
      rows_of(call, item.request, from + TILE, next, keys[1 - now], values[1 - now]);
    } else if (following) {
      near = int(std::min<int64_t>(TILE, following->end - following->begin));
      rows_of(call, following->request, following->begin, near, keys[1 - now], values[1 - now]);
    }
    spread(state, state.ahead, keys[1 - now], values[1 - now], near);
    int counts[ROWS];
    for (int64_t i = 0; i < item.num_rows; ++i)
      counts[i] = int(std::clamp<int64_t>(rows[i].end - from, 0, count));
    state.tile(keys[now], values[now], count, counts);
    now = 1 - now, count = next;
  }
  for (int64_t i = 0; i < item.num_rows; ++i) {
    float* part = parts + std::max<int64_t>(0, rows[i].part) * part_floats(call);
    for (int64_t h = 0; h < call.num_heads; ++h) {
      const int64_t at = state.head_of(i, h);
      float* own_acc = acc + at * stride;
      Values<T>::put_in_order(own_acc, call.value_dim);
      if (rows[i].part < 0) {
        write_row<T>(call, plan.first_tokens[rows[i].request], h, most[at], sum[at], own_acc);
        continue;
      }
      part[h] = most[at], part[call.num_heads + h] = sum[at];
      std::copy(own_acc, own_acc + stride, part + 2 * call.num_heads + h * stride);
    }
  }
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
