// What Python hands over: one structure a call, laid out as ../library.py declares it.
#pragma once

#include <cstdint>

extern "C" {

// See ../library.py for what each field means.
struct AttentionCall {
  const void* query;
  const void* key;
  const void* value;
  void* keys;
  void* values;
  void* output;
  const float* sinks;
  const int64_t* starts;
  const int64_t* counts;
  const int32_t* tables;
  float* scratch;
  int64_t scratch_floats;
  int64_t query_head_stride, query_token_stride;
  int64_t key_head_stride, key_token_stride;
  int64_t value_head_stride, value_token_stride;
  int64_t num_requests, num_tokens, table_width, block_size;
  int64_t num_heads, num_kv_heads, key_dim, value_dim;
  int64_t window;
  int64_t dtype;
  int64_t threads;
  float scaling, softcap;
};

// A packed linear layer; see linear.cpp.
struct LinearWeight {
  const void* packed;
  const float* bias;    // for whole panels; or null
  const float* scales;  // for whole panels: weights are int8, times these; or null: bfloat16
  int64_t outputs, inputs;
};

// How a norm's weight is applied.
enum NormForm : int {
  FROM_ONE = 1,       // its numbers are distances from 1
  ROUNDED_FIRST = 2,  // x is rounded to bfloat16 before it is multiplied
};

// A root-mean-square norm; see elementwise.cpp.
struct NormWeight {
  const void* weight;  // bfloat16 [width]
  int64_t width;
  float eps;
  int form;
};

// Queries and keys of one layer; see ../library.py for what each field means.
struct HeadsCall {
  void* query;
  void* key;
  int64_t query_stride, key_stride;
  const void* cos;
  const void* sin;
  int64_t tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
  const void* query_weight;
  const void* key_weight;
  float query_eps, key_eps;
  int64_t form;
};

// A whole decoder layer; see layer.cpp, and ../library.py for what each field means.
struct LayerSpec {
  NormWeight first_norm, second_norm;
  LinearWeight projection, output, gate_up, down;
  HeadsCall heads;
  int64_t activation;
  float scaling, softcap;
};

// A step through layers that follow one another; see layer.cpp and ../library.py.
struct LayersCall {
  const LayerSpec* const* layers;
  const AttentionCall* const* attention;
  void* const* keys;
  void* const* values;
  const void* x;
  void* y;
  const void* cos;
  const void* sin;
  void* scratch;
  float* attention_scratch;
  int64_t attention_floats;
  int64_t tokens, count, next;
};

}  // extern "C"
