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

// Of a step's elements; CODES: of an integer weight that is packed or read, bytes from 0 on.
enum ElementType : int { FLOAT32 = 0, BFLOAT16 = 1, CODES = 2 };

// A packed linear layer; see linear.cpp.
struct LinearWeight {
  const void* packed;
  const float* bias;    // for whole panels; or null
  const void* scales;   // by which integers are multiplied, by group; see linear_layout.h; or null
  const void* minima;   // what is added to these products; or null: 0 is the code 2^(bits - 1)
  const void* factors;  // float16: by which scales and minima of 8 bits are multiplied; or null
  const int32_t* order; // [inputs], for each number the input that it multiplies; or null
  int64_t outputs, inputs;
  int64_t dtype;  // of what goes in and comes out
  int64_t bits;   // of an integer: 8 or 4; or 0: weights are of that type
  int64_t group;  // how many inputs of an output share a scale: all, or a multiple of 8
  int64_t scale_bits, minimum_bits;  // 16 or 32, of float16 or float32; or 8, with factors
  int64_t shared;  // 2^shared groups have the same factors
  const uint16_t* finished = nullptr;  // what becomes of each bfloat16 result, by its bits; or null
};

// How a norm is computed.
enum NormForm : int {
  FROM_ONE = 1,       // the weight's elements are distances from 1
  ROUNDED_FIRST = 2,  // x is rounded before it is multiplied by the weight
  CENTERED = 4,       // a layer norm: the mean is subtracted first
};

// What is applied to a gate.
enum Activation : int { SILU = 0, GELU_TANH = 1, RELU_SQUARED = 2, SIGMOID = 3, UNCHANGED = 4 };

// A norm; see elementwise.cpp.
struct NormWeight {
  const void* weight;  // [width]; or null: there is no norm
  const void* bias;    // [width]; or null
  int64_t width;
  float eps;
  int form;
};

// Queries and keys of one layer; see ../library.py for what each field means.
struct HeadsCall {
  void* query;
  void* key;
  int64_t query_stride, key_stride, query_head_stride;
  const float* cos;
  const float* sin;
  int64_t tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
  NormWeight query_norm, key_norm;
  int64_t paired, rounds, norms_last;
};

// What mixes a layer's tokens.
enum Mixer : int { ATTENTION = 0, SHORT_CONVOLUTION = 1, DELTA_NET = 2 };

// A recurrence in the place of attention; see recurrent.cpp, and ../library.py for what each field
// means.
struct RecurrentSpec {
  const void* weight;
  const void* bias;
  const void* log_rate;
  const void* rate_bias;
  NormWeight norm;
  int64_t channels, width;
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  int64_t groups;
  float beta_factor;
};

// What an adapter adds to one linear layer; see low_rank.cpp, and ../library.py for each field.
struct LowRank {
  const void* a;
  const void* b;
  int64_t rank, inputs, outputs, column;
  int64_t dtype;
  float scale;
};

// The parts of an adapter in one decoder layer, in the order of its table.
enum AdapterPart : int { TO_PROJECTION = 0, TO_OUTPUT = 3, TO_INNER = 4, TO_DOWN = 6, PARTS = 7 };

// A step's rows with adapters; see ../library.py for what each field means.
struct AdaptedRows {
  const int64_t* rows;
  const int64_t* ends;
  const LowRank* const* adapters;
  int64_t groups;
};

constexpr int64_t PROJECTIONS = 6;  // at most so many first linear layers in a layer

// A whole decoder layer; see layer.cpp, and ../library.py for what each field means.
struct LayerSpec {
  NormWeight before_attention, after_attention, before_mlp, after_mlp;
  LinearWeight projection[PROJECTIONS];
  LinearWeight output;
  LinearWeight inner[2];
  LinearWeight down;
  const float* sinks;
  HeadsCall heads;
  RecurrentSpec recurrent;
  int64_t mixer, attention_gated;
  int64_t rotary, gated, parallel, activation, dtype;
  float residual, scaling, softcap;
};

// A step's requests, and where each one's state is; see ../library.py for what each field means.
struct StateRows {
  const int64_t* starts;
  const int64_t* counts;
  const int64_t* slots;
  int64_t num_requests, num_rows;
};

// The states of one layer, of all slots; see ../library.py for what each field means.
struct LayerStates {
  void* inputs;
  float* matrices;
  int64_t inputs_stride, matrices_stride;
  int64_t inputs_width, inputs_dtype;
};

// A layer's recurrence in a step; see recurrent.cpp, and ../library.py for what each field means.
struct RecurrentCall {
  const StateRows* rows;
  const LayerStates* states;
  void* projected;
  void* output;
  void* scratch;
  int64_t threads;
};

// A step through layers that follow one another; see layer.cpp and ../library.py.
struct LayersCall {
  const LayerSpec* const* layers;
  const AttentionCall* const* attention;
  void* const* keys;
  void* const* values;
  const LayerStates* const* states;
  const StateRows* rows;
  const void* x;
  void* y;
  const float* const* cos;
  const float* const* sin;
  void* scratch;
  float* attention_scratch;
  int64_t attention_floats;
  int64_t tokens, count, next, threads;
  const AdaptedRows* adapted;  // or null: no row has an adapter
};

// A short convolution; see convolution.cpp, and ../library.py for what each field means.
struct ConvolutionCall {
  StateRows rows;
  const void* x;
  void* y;
  const void* weight;
  const void* bias;
  void* state;
  int64_t x_stride, slot_stride;
  int64_t channels, width, state_width;
  int64_t dtype, state_dtype, silu, threads;
};

// A gated delta rule; see delta_rule.cpp, and ../library.py for what each field means.
struct DeltaRuleCall {
  StateRows rows;
  const void* query;
  const void* key;
  const void* value;
  const float* decay;
  const float* beta;
  void* output;
  float* state;
  int64_t query_stride, key_stride, value_stride, slot_stride;
  int64_t num_key_heads, num_heads, key_dim, value_dim;
  int64_t decay_dim, normed, dtype, threads;
};

}  // extern "C"
