// Attention of one layer through block tables, without a copy of any context.
//
//   key, value of the step --write--> cache <--read through block tables-- items --> output
//
// The work is cut into items that threads take as they get free:
//   decode   one request's single token against at most SPLIT tokens of its context, all heads.
//            Several items of a request each leave (most, sum, weighted values), merged afterwards.
//            Where the cuts are depends on positions alone: a request's result is the same among
//            any neighbours and for any number of threads.
//   prefill  a tile of one request's tokens against its context, one key/value head.
// Both keep a running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018; Dao et al., "FlashAttention", 2022): scores exist for one tile of keys at a time.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int TILE = 32;     // keys whose scores exist at a time
constexpr int SPLIT = 256;   // most keys of a decode item
constexpr int LANES = 64;    // rows (token, query head) of a prefill item
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Item {
  int64_t request;
  int64_t begin, end;  // decode: positions of keys. prefill: the request's tokens of the step
  int64_t kv_head;     // prefill
  int64_t part;        // decode: where the partial result goes; -1: the output itself
};

// The parts of one request's decode, to be merged.
struct Merge {
  int64_t request;
  int64_t first, count;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<int64_t> first_tokens;  // [R], where each request's tokens begin in the flat row
  int64_t num_parts = 0;
};

int64_t first_visible(const AttentionCall& call, int64_t position) {
  return call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
}

Plan make_plan(const AttentionCall& call) {
  Plan plan;
  const int64_t groups = call.num_heads / call.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, LANES / groups);
  int64_t token = 0;
  for (int64_t r = 0; r < call.num_requests; ++r) {
    plan.first_tokens.push_back(token);
    token += call.counts[r];
    if (call.counts[r] != 1) continue;
    const int64_t end = call.starts[r] + 1;
    const int64_t begin = first_visible(call, end - 1);
    const int64_t first = plan.num_parts;
    for (int64_t from = begin; from < end;) {
      const int64_t to = std::min(end, (from / SPLIT + 1) * SPLIT);
      plan.items.push_back({r, from, to, 0, plan.num_parts++});
      from = to;
    }
    if (plan.num_parts - first == 1) {
      plan.items.back().part = -1;
      plan.num_parts = first;
    } else {
      plan.merges.push_back({r, first, plan.num_parts - first});
    }
  }
  for (int64_t r = 0; r < call.num_requests; ++r) {
    if (call.counts[r] == 1) continue;
    // The last tiles see the longest contexts: they go first.
    for (int64_t end = call.counts[r]; end > 0; end -= std::min(end, tile_tokens))
      for (int64_t h = 0; h < call.num_kv_heads; ++h)
        plan.items.push_back({r, std::max<int64_t>(0, end - tile_tokens), end, h, -1});
  }
  return plan;
}

int64_t slot_of(const AttentionCall& call, int64_t request, int64_t position) {
  const int32_t* table = call.tables + request * call.table_width;
  return int64_t(table[position / call.block_size]) * call.block_size + position % call.block_size;
}

// The slots of `count` positions from `from` on.
void slots_of(const AttentionCall& call, int64_t request, int64_t from, int count, int64_t* slots) {
  for (int i = 0; i < count; ++i) slots[i] = slot_of(call, request, from + i);
}

// Scores after scaling and softcap.
vf finish_scores(const AttentionCall& call, vf raw) {
  raw = raw * call.scaling;
  return call.softcap > 0 ? tanh(raw / call.softcap) * call.softcap : raw;
}

void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// A row of numbers as float32.
template <class T>
void convert(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + VL <= count; i += VL) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

void convert(const bf16* from, int64_t count, bf16* to) {
  std::memcpy(to, from, count * sizeof(bf16));
}

// ---- decode ---------------------------------------------------------------------------------

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

// The result of a row from its sums: a sink takes part in the softmax and yields nothing.
float inverse_sum(const AttentionCall& call, int64_t head, float most, float sum, float* scale) {
  *scale = 1.0f;
  if (call.sinks) {
    const float next = std::max(most, call.sinks[head]);
    *scale = std::exp(most - next);
    sum = sum * *scale + std::exp(call.sinks[head] - next);
  }
  return 1.0f / sum;
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

// ---- prefill --------------------------------------------------------------------------------
//
// Rows are lanes: scores are computed as S^T [keys][LANES] = K . Q^T, and the output as
// O^T [Dv][LANES] = V^T . P^T, so that keys and values are read as they lie, one number (or pair
// of bfloat16) at a time for 64 rows, and the softmax needs no sums across lanes.

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

// ---- the call -------------------------------------------------------------------------------

template <class T>
void write_cache(const AttentionCall& call, int64_t request, int64_t first_token) {
  for (int64_t i = 0; i < call.counts[request]; ++i) {
    const int64_t slot = slot_of(call, request, call.starts[request] + i), token = first_token + i;
    for (int64_t h = 0; h < call.num_kv_heads; ++h) {
      std::memcpy(static_cast<T*>(call.keys) + (slot * call.num_kv_heads + h) * call.key_dim,
                  static_cast<const T*>(call.key) + h * call.key_head_stride +
                      token * call.key_token_stride,
                  call.key_dim * sizeof(T));
      std::memcpy(static_cast<T*>(call.values) + (slot * call.num_kv_heads + h) * call.value_dim,
                  static_cast<const T*>(call.value) + h * call.value_head_stride +
                      token * call.value_token_stride,
                  call.value_dim * sizeof(T));
    }
  }
}

int64_t thread_floats(const AttentionCall& call) {
  return round_up(std::max(decode_floats(call), PrefillSpace::floats(call)), 16);
}

template <class T, class Tile>
int64_t attend(const AttentionCall& call) {
  const Plan plan = make_plan(call);
  const int64_t own = thread_floats(call);
  const int64_t needed = own * call.threads + plan.num_parts * part_floats(call);
  if (call.scratch_floats < needed) return needed;
  float* parts = call.scratch + own * call.threads;
  const int64_t num_items = int64_t(plan.items.size());
  const int64_t num_merges = int64_t(plan.merges.size());
  const int64_t computed = plan.first_tokens.back() + call.counts[call.num_requests - 1];
#pragma omp parallel num_threads(int(call.threads))
  {
    float* mine = call.scratch + own * omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t r = 0; r < call.num_requests; ++r) write_cache<T>(call, r, plan.first_tokens[r]);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item& item = plan.items[i];
      const int64_t token = plan.first_tokens[item.request];
      if (call.counts[item.request] == 1)
        decode<T>(call, item, token, parts, mine);
      else
        prefill<T, Tile>(call, item, token, mine);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_merges; ++i)
      merge<T>(call, plan.merges[i], plan.first_tokens[plan.merges[i].request], parts);
  }
  std::memset(static_cast<T*>(call.output) + computed * call.num_heads * call.value_dim, 0,
              (call.num_tokens - computed) * call.num_heads * call.value_dim * sizeof(T));
  return 0;
}

}  // namespace

// 0: done. Otherwise nothing was done, and so many floats of scratch are needed.
int64_t attention(const AttentionCall& call) {
  switch (call.dtype) {
    case 0:
      return attend<float, ConvertedTile<float>>(call);
    case 1:
#if defined(__AVX512BF16__)
      if (call.key_dim % 2 == 0) return attend<bf16, PairedTile>(call);
#endif
      return attend<bf16, ConvertedTile<bf16>>(call);
    default:
      return attend<f16, ConvertedTile<f16>>(call);
  }
}

}  // namespace HEADRACE_ISA
