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
  const float* bias;  // for whole panels; or null
  int64_t outputs, inputs;
};

}  // extern "C"
