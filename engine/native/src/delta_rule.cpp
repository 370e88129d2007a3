// The gated delta rule over the rows of many requests. Each head keeps a matrix S [K][V]. A row with
// query q, key k and value v makes it forget, corrects what it holds under k, and reads it:
//
//   S = e^g S        d = beta (v - k S)        S = S + k^T d        o = q S / sqrt(K)
//
// (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024.) g is one number for the head, or one
// for each row of S ("Kimi Linear", 2025). CHUNK rows are computed together, so that S is read and
// written once for all of them:
//
//   read     [k; q] S, both decayed from the chunk's beginning
//   correct  d of each row: beta (v - k S - what the rows before it in the chunk have written under k)
//   write    S = e^g S + k^T d, decayed to the chunk's end
//
// Chunks lie on one grid of positions, so steps that are cut at multiples of CHUNK have the same bits
// as steps that are not. Decays are products of numbers up to 1, and cannot overflow. A chunk of 8
// rows costs little more than S itself; in larger ones the products of rows with rows cost more.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "rows.h"

namespace HEADRACE_ISA {
namespace {

constexpr int CHUNK = 8;            // rows that are computed together; it divides 64
constexpr int64_t LEAST = 1 << 15;  // elements of states that are worth a second thread
constexpr float EPS = 1e-6f;        // of the norms

constexpr int64_t whole_vectors(int64_t width) { return (width + VL - 1) / VL * VL; }

// What a thread needs for a chunk. Rows are padded with zeros to whole vectors.
struct DeltaSpace {
  int64_t keys, values;          // how wide rows are
  std::vector<float> memory;
  float* left;                   // [2 * CHUNK][keys]: keys, and after them queries
  float* written;                // [CHUNK][keys]: keys, decayed to the end of the chunk
  float* decays;                 // [CHUNK][keys]
  float* whole;                  // [keys]: the decay from the chunk's beginning to its end
  float* read;                   // [2 * CHUNK][values]
  float* deltas;                 // [CHUNK][values]
  float key_scores[CHUNK][CHUNK], query_scores[CHUNK][CHUNK];

  explicit DeltaSpace(const DeltaRuleCall& call)
      : keys(whole_vectors(call.key_dim)),
        values(whole_vectors(call.value_dim)),
        memory((4 * CHUNK + 1) * keys + 3 * CHUNK * values) {
    float* p = memory.data();
    left = p, p += 2 * CHUNK * keys;
    written = p, p += CHUNK * keys;
    decays = p, p += CHUNK * keys;
    whole = p, p += keys;
    read = p, p += 2 * CHUNK * values;
    deltas = p;
  }
};

float dot(const float* a, const float* b, int64_t width) {
  vf sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * VL <= width; i += 2 * VL)
    for (int j = 0; j < 2; ++j) sums[j] += load(a + i + j * VL) * load(b + i + j * VL);
  if (i < width) sums[0] += load(a + i) * load(b + i);
  return sum_of(sums[0] + sums[1]);
}

// A query or key as float32, perhaps of length 1, times a factor.
template <class T>
void take(const T* x, int64_t dim, int64_t width, bool normed, float factor, float* to) {
  over(dim, [&](int64_t i, auto size) { store(to + i, get(x + i, size)); });
  if (normed) factor /= std::sqrt(dot(to, to, width) + EPS);
  for (int64_t i = 0; i < width; i += VL) store(to + i, load(to + i) * factor);
}

// f(column, how many vectors, size), over all columns.
template <class F>
void over_columns(int64_t width, F f) {
  int64_t i = 0;
  for (; i + NR * VL <= width; i += NR * VL) f(i, std::integral_constant<int, NR>{}, Whole{});
  over(width - i, [&](int64_t at, auto size) { f(i + at, std::integral_constant<int, 1>{}, size); });
}

// f(row, how many rows), over all rows.
template <class F>
void over_rows(int64_t count, F f) {
  int64_t row = 0;
  for (; row + MR <= count; row += MR) f(row, std::integral_constant<int, MR>{});
  for (; row + 2 <= count; row += 2) f(row, std::integral_constant<int, 2>{});
  if (row < count) f(row, std::integral_constant<int, 1>{});
}

// One head of one request.
template <class T>
struct DeltaHead {
  const DeltaRuleCall& call;
  DeltaSpace& space;
  const T* query;
  const T* key;
  const T* value;
  const float* decay;
  const float* beta;
  T* output;
  float* state;  // [K][V]

  DeltaHead(const DeltaRuleCall& call, DeltaSpace& space, int64_t request, int64_t head)
      : call(call), space(space) {
    const int64_t shared = head / (call.num_heads / call.num_key_heads);
    query = static_cast<const T*>(call.query) + shared * call.key_dim;
    key = static_cast<const T*>(call.key) + shared * call.key_dim;
    value = static_cast<const T*>(call.value) + head * call.value_dim;
    decay = call.decay + head * call.decay_dim;
    beta = call.beta + head;
    output = static_cast<T*>(call.output) + head * call.value_dim;
    state = call.state + call.rows.slots[request] * call.slot_stride +
            head * call.key_dim * call.value_dim;
  }

  // `count` rows of a chunk, the first of which is `row` of the step.
  void compute(int64_t row, int count) {
    load_rows(row, count);
    score(count);
    decay_from_beginning(count);
    read(count);
    correct(row, count);
    write(count);
  }

  void load_rows(int64_t row, int count) {
    const int64_t dim = call.key_dim, width = space.keys;
    const float scaling = 1.0f / std::sqrt(float(dim));
    for (int i = 0; i < count; ++i) {
      const int64_t at = row + i;
      float* const keys = space.left + i * width;
      take(key + at * call.key_stride, dim, width, call.normed, 1.0f, keys);
      take(query + at * call.query_stride, dim, width, call.normed, scaling, keys + count * width);
      std::copy(keys, keys + width, space.written + i * width);
      const float* const from = decay + at * call.num_heads * call.decay_dim;
      float* const to = space.decays + i * width;
      if (call.decay_dim == 1) {
        std::fill(to, to + width, std::exp(*from));
      } else {
        over(dim, [&](int64_t r, auto size) { store(to + r, exp(get(from + r, size))); });
      }
    }
  }

  // What each row finds of the rows before it, and its query of itself: products of keys, of which
  // the earlier one is decayed on the way.
  void score(int count) {
    const int64_t width = space.keys;
    for (int j = 0; j < count; ++j) {
      float* const earlier = space.written + j * width;
      const float* const keys = space.left;
      const float* const queries = space.left + count * width;
      space.query_scores[j][j] = dot(queries + j * width, earlier, width);
      for (int i = j + 1; i < count; ++i) {
        const float* const factors = space.decays + i * width;
        vf key_sum = {}, query_sum = {};
        for (int64_t r = 0; r < width; r += VL) {
          const vf decayed = load(earlier + r) * load(factors + r);
          store(earlier + r, decayed);
          key_sum += load(keys + i * width + r) * decayed;
          query_sum += load(queries + i * width + r) * decayed;
        }
        space.key_scores[i][j] = sum_of(key_sum);
        space.query_scores[i][j] = sum_of(query_sum);
      }
    }
  }

  void decay_from_beginning(int count) {
    const int64_t width = space.keys;
    for (int64_t r = 0; r < width; r += VL) {
      vf product = splat(1.0f);
      for (int i = 0; i < count; ++i) {
        product = product * load(space.decays + i * width + r);
        for (float* x : {space.left + i * width + r, space.left + (count + i) * width + r})
          store(x, load(x) * product);
      }
      store(space.whole + r, product);
    }
  }

  void read(int count) {
    over_columns(call.value_dim, [&](int64_t column, auto vectors, auto size) {
      constexpr int N = decltype(vectors)::value;
      over_rows(2 * count, [&](int64_t row, auto rows) {
        constexpr int M = decltype(rows)::value;
        const float* const left = space.left + row * space.keys;
        vf sums[M][N] = {};
        for (int64_t r = 0; r < call.key_dim; ++r) {
          vf line[N];
          for (int n = 0; n < N; ++n)
            line[n] = get(state + r * call.value_dim + column + n * VL, size);
          for (int m = 0; m < M; ++m) {
            const vf factor = splat(left[m * space.keys + r]);
            for (int n = 0; n < N; ++n) sums[m][n] += factor * line[n];
          }
        }
        for (int m = 0; m < M; ++m)
          for (int n = 0; n < N; ++n)
            store(space.read + (row + m) * space.values + column + n * VL, sums[m][n]);
      });
    });
  }

  void correct(int64_t row, int count) {
    const int64_t width = space.values;
    over(call.value_dim, [&](int64_t column, auto size) {
      for (int i = 0; i < count; ++i) {
        const int64_t at = row + i;
        vf known = load(space.read + i * width + column);
        vf result = load(space.read + (count + i) * width + column);
        for (int j = 0; j < i; ++j) {
          const vf earlier = load(space.deltas + j * width + column);
          known += space.key_scores[i][j] * earlier;
          result += space.query_scores[i][j] * earlier;
        }
        const vf delta = beta[at * call.num_heads] *
                         (get(value + at * call.value_stride + column, size) - known);
        store(space.deltas + i * width + column, delta);
        put(output + at * call.num_heads * call.value_dim + column,
            result + space.query_scores[i][i] * delta, size);
      }
    });
  }

  void write(int count) {
    over_columns(call.value_dim, [&](int64_t column, auto vectors, auto size) {
      constexpr int N = decltype(vectors)::value;
      over_rows(call.key_dim, [&](int64_t row, auto rows) {
        constexpr int M = decltype(rows)::value;
        float* const lines = state + row * call.value_dim + column;
        vf sums[M][N];
        for (int m = 0; m < M; ++m)
          for (int n = 0; n < N; ++n)
            sums[m][n] = get(lines + m * call.value_dim + n * VL, size) * space.whole[row + m];
        for (int j = 0; j < count; ++j)
          for (int m = 0; m < M; ++m) {
            const vf factor = splat(space.written[j * space.keys + row + m]);
            for (int n = 0; n < N; ++n)
              sums[m][n] += factor * load(space.deltas + j * space.values + column + n * VL);
          }
        for (int m = 0; m < M; ++m)
          for (int n = 0; n < N; ++n)
            put(lines + m * call.value_dim + n * VL, sums[m][n], size);
      });
    });
  }
};

template <class T>
void apply(const DeltaRuleCall& call) {
  const StateRows& rows = call.rows;
  const int64_t per_head = call.key_dim * call.value_dim;
  std::vector<int64_t> firsts(1);
  for (int64_t r = 0; r < rows.num_requests; ++r) firsts.push_back(firsts.back() + rows.counts[r]);
  const int team = firsts.back() * call.num_heads * per_head < LEAST ? 1 : int(call.threads);
#pragma omp parallel num_threads(team)
  {
    DeltaSpace space(call);
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (int64_t r = 0; r < rows.num_requests; ++r)
      for (int64_t h = 0; h < call.num_heads; ++h) {
        DeltaHead<T> head(call, space, r, h);
        const int64_t start = rows.starts[r], end = start + rows.counts[r];
        if (!start && end) std::fill(head.state, head.state + per_head, 0.0f);
        for (int64_t at = start; at < end;) {
          const int64_t next = std::min(end, (at / CHUNK + 1) * CHUNK);
          head.compute(firsts[r] + at - start, int(next - at));
          at = next;
        }
      }
  }
  const int64_t width = call.num_heads * call.value_dim;
  std::memset(static_cast<T*>(call.output) + firsts.back() * width, 0,
              (rows.num_rows - firsts.back()) * width * sizeof(T));
}

}  // namespace

// output, and the state after the step's rows. Rows that are no request's are zeros in output.
void delta_rule(const DeltaRuleCall& call) {
  (call.dtype == FLOAT32 ? apply<float> : apply<bf16>)(call);
}

}  // namespace HEADRACE_ISA
