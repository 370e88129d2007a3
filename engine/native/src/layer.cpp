// A whole decoder layer of the plain shape, of bfloat16: the kernels that its modules call, one after
// the other, with nothing in between.
//
//   x ─┬─ norm ─ q, k, v ─ norms, rotary ─ attention ─ output ─ + ─┬─ norm ─ gate, up ─ down ─ + ─ y
//      └────────────────────────────────────────────────────────────┘ └────────────────────────┘
//
// Numbers are rounded where the modules round: the result is theirs, to the last bit.
#include "kernels.h"

namespace HEADRACE_ISA {
namespace {

struct Half {
  uint16_t bits;
};

// The parts of a layer's scratch, bfloat16 each.
struct LayerSpace {
  Half* normed;     // [T][K]
  Half* projected;  // [T][(Hq + 2 Hkv) D]
  Half* attended;   // [T][Hq D]
  Half* residual;   // [T][K]
  Half* gated;      // [T][2 I]
  int64_t size;     // of all together

  LayerSpace(const LayerCall& call, Half* p) {
    const Half* start = p;
    const int64_t width = call.output.outputs;
    normed = p, p += call.tokens * width;
    projected = p, p += call.tokens * call.projection.outputs;
    attended = p, p += call.tokens * call.output.inputs;
    residual = p, p += call.tokens * width;
    gated = p, p += call.tokens * call.gate_up.outputs;
    size = p - start;
  }
};

// Attention over what was projected: 0, or how many floats of scratch are needed.
int64_t attend(const LayerCall& call, const LayerSpace& space, int64_t query, int64_t keys) {
  AttentionCall step = *call.attention;
  const int64_t stride = call.projection.outputs, dim = call.heads.head_dim;
  step.query = space.projected;
  step.key = space.projected + query;
  step.value = space.projected + query + keys;
  step.query_head_stride = step.key_head_stride = step.value_head_stride = dim;
  step.query_token_stride = step.key_token_stride = step.value_token_stride = stride;
  step.keys = call.keys, step.values = call.values;
  step.output = space.attended;
  step.sinks = nullptr;
  step.scratch = call.attention_scratch, step.scratch_floats = call.attention_floats;
  step.num_tokens = call.tokens;
  step.num_heads = call.heads.num_heads, step.num_kv_heads = call.heads.num_kv_heads;
  step.key_dim = step.value_dim = dim;
  step.scaling = call.scaling, step.softcap = call.softcap;
  return attention(step);
}

}  // namespace

// How many numbers of bfloat16 a layer needs for its scratch.
int64_t layer_scratch(const LayerCall& call) { return LayerSpace(call, nullptr).size; }

// y [T][K] from x. 0: done. Otherwise y is not there yet, and attention needs so many floats of scratch.
int64_t layer(const LayerCall& call) {
  const LayerSpace space(call, static_cast<Half*>(call.scratch));
  const int64_t tokens = call.tokens, width = call.output.outputs, stride = call.projection.outputs;
  const int64_t query = call.heads.num_heads * call.heads.head_dim;
  const int64_t keys = call.heads.num_kv_heads * call.heads.head_dim;
  const int64_t inner = call.gate_up.outputs / 2;
  const int threads = int(call.attention->threads);
  rms_norm(call.first_norm, call.x, space.normed, tokens, threads);
  linear(call.projection, space.normed, width, space.projected, tokens, threads);
  if (call.heads.rotary_dim || call.heads.query_weight) {
    HeadsCall turned = call.heads;
    turned.query = space.projected, turned.key = space.projected + query;
    turned.query_stride = turned.key_stride = stride;
    turned.tokens = tokens;
    heads(turned, threads);
  }
  if (const int64_t needed = attend(call, space, query, keys)) return needed;
  linear(call.output, space.attended, query, space.normed, tokens, threads);
  add(call.x, space.normed, space.residual, tokens, width, threads);
  rms_norm(call.second_norm, space.residual, space.normed, tokens, threads);
  linear(call.gate_up, space.normed, width, space.gated, tokens, threads);
  gate(int(call.activation), space.gated, space.gated + inner, 2 * inner, space.gated, 2 * inner,
       tokens, inner, threads);
  linear(call.down, space.gated, 2 * inner, space.normed, tokens, threads);
  add(space.residual, space.normed, call.y, tokens, width, threads);
  return 0;
}

}  // namespace HEADRACE_ISA
