// Attention of one layer through block tables, without a copy of any context.
//
//   key, value of the step --write--> cache <--read through block tables-- items --> output
//
// The work is cut into items that threads take as they get free:
//   decode   one request's single token against at most SPLIT tokens of its context, all heads.
//            Several items of a request each leave (most, sum, weighted values), merged afterwards.
//            Where the cuts are depends on positions alone: a request's result is the same among
//            any neighbours and for any number of threads. Requests whose tokens of the context are
//            the same memory share an item, which reads them once, and keep their own sums.
//   prefill  a tile of one request's tokens against its context, one key/value head.
// Both keep a running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018; Dao et al., "FlashAttention", 2022): scores exist for one tile of keys at a time.
#include <omp.h>

#include "attention_decode.h"
#include "attention_plan.h"
#include "attention_prefill.h"

namespace HEADRACE_ISA {
namespace {

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

int64_t thread_floats(const AttentionCall& call, int64_t rows) {
  return round_up(std::max(rows * decode_floats(call), PrefillSpace::floats(call)), 16);
}

template <class T, class Tile>
int64_t attend(const AttentionCall& call) {
  const Plan plan = make_plan(call);
  const int64_t own = thread_floats(call, plan.most_rows);
  const int64_t needed = own * call.threads + plan.num_parts * part_floats(call);
  if (call.scratch_floats < needed) return needed;
  float* parts = call.scratch + own * call.threads;
  const int64_t num_items = int64_t(plan.items.size());
  const int64_t num_decodes = plan.num_decodes;
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
      if (i < num_decodes)
        decode<T>(call, plan, item, i + call.threads < num_decodes ? &item + call.threads : nullptr,
                  parts, mine);
      else
        prefill<T, Tile>(call, item, plan.first_tokens[item.request], mine);
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
