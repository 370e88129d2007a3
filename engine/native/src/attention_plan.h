// What decode and prefill share: how a call's work is cut, where a position is cached, scores.
//
// Everything is in an unnamed namespace: see vec.h for why nothing here may have external linkage.
#pragma once

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
  int64_t num_decodes = 0;  // items: the first ones
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
  plan.num_decodes = int64_t(plan.items.size());
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

}  // namespace
}  // namespace HEADRACE_ISA
