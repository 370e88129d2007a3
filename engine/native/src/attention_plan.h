// What decode and prefill share: how a call's work is cut, where a position is cached, scores.
//
// Everything is in an unnamed namespace: see vec.h for why nothing here may have external linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "calls.h"
#include "vec.h"

namespace HEADRACE_ISA {
namespace {

constexpr int TILE = 32;     // keys whose scores exist at a time
constexpr int SPLIT = 256;   // most keys of a decode item
constexpr int64_t ROWS = 8;  // most rows of a decode item
constexpr int LANES = 64;    // rows (token, query head) of a prefill item
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Item {
  int64_t request;     // decode: the one of its rows that ends last
  int64_t begin, end;  // decode: positions of keys. prefill: the request's tokens of the step
  int64_t kv_head;     // prefill
  int64_t row;         // decode: the first one
  int64_t num_rows;
};

// A request's single token in a decode item. Rows of an item have the same keys, up to their ends.
struct Row {
  int64_t request, end;
  int64_t part;  // where the partial result goes; -1: the output itself
  int64_t next;  // row of the item; -1: none
};

// The parts of one request's decode, to be merged.
struct Merge {
  int64_t request;
  int64_t first, count;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Row> rows;
  std::vector<Merge> merges;
  std::vector<int64_t> first_tokens;  // [R], where each request's tokens begin in the flat row
  int64_t num_parts = 0;
  int64_t num_decodes = 0;  // items: the first ones
  int64_t most_rows = 1;    // of a decode item
};

int64_t first_visible(const AttentionCall& call, int64_t position) {
  return call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
}

// Whether a request's first keys of a decode item are those of the item's request, in the same memory.
bool shares_keys(const AttentionCall& call, const Item& item, int64_t request, int64_t end) {
  const int64_t first = item.begin / call.block_size;
  const int64_t last = (std::min(end, item.end) - 1) / call.block_size;
  const int32_t* blocks = call.tables + first;
  return !std::memcmp(blocks + item.request * call.table_width, blocks + request * call.table_width,
                      (last - first + 1) * sizeof(int32_t));
}

// Cuts the decodes. A request joins the items of the one before it where both have the same keys, as rows
// of one request do, as long as all threads have work.
void plan_decodes(const AttentionCall& call, Plan& plan) {
  int64_t total = 0;
  for (int64_t r = 0; r < call.num_requests; ++r)
    if (call.counts[r] == 1)
      total += call.starts[r] / SPLIT - first_visible(call, call.starts[r]) / SPLIT + 1;
  const int64_t most = std::clamp<int64_t>((total + call.threads - 1) / call.threads, 1, ROWS);
  std::vector<int64_t> before, own;  // the items of the request before, and of this one
  for (int64_t r = 0; r < call.num_requests; ++r) {
    if (call.counts[r] != 1) continue;
    const int64_t end = call.starts[r] + 1, begin = first_visible(call, end - 1);
    const int64_t first = plan.num_parts;
    size_t at = 0;
    own.clear();
    for (int64_t from = begin; from < end;) {
      const int64_t to = std::min(end, (from / SPLIT + 1) * SPLIT);
      while (at < before.size() && plan.items[before[at]].begin < from) ++at;
      int64_t found = at < before.size() ? before[at] : -1;
      if (found < 0 || plan.items[found].begin != from || plan.items[found].num_rows == most ||
          !shares_keys(call, plan.items[found], r, to)) {
        found = int64_t(plan.items.size());
        plan.items.push_back({r, from, to, 0, -1, 0});
      }
      Item& item = plan.items[found];
      if (to > item.end) item.request = r, item.end = to;
      plan.rows.push_back({r, to, plan.num_parts++, item.row});
      item.row = int64_t(plan.rows.size()) - 1;
      plan.most_rows = std::max(plan.most_rows, ++item.num_rows);
      own.push_back(found);
      from = to;
    }
    before.swap(own);
    if (plan.num_parts - first == 1) {
      plan.rows.back().part = -1;
      plan.num_parts = first;
    } else {
      plan.merges.push_back({r, first, plan.num_parts - first});
    }
  }
  plan.num_decodes = int64_t(plan.items.size());
}

Plan make_plan(const AttentionCall& call) {
  Plan plan;
  const int64_t groups = call.num_heads / call.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, LANES / groups);
  int64_t token = 0;
  for (int64_t r = 0; r < call.num_requests; ++r) {
    plan.first_tokens.push_back(token);
    token += call.counts[r];
  }
  plan_decodes(call, plan);
  for (int64_t r = 0; r < call.num_requests; ++r) {
    if (call.counts[r] == 1) continue;
    // The last tiles see the longest contexts: they go first.
    for (int64_t end = call.counts[r]; end > 0; end -= std::min(end, tile_tokens))
      for (int64_t h = 0; h < call.num_kv_heads; ++h)
        plan.items.push_back({r, std::max<int64_t>(0, end - tile_tokens), end, h, -1, 0});
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
