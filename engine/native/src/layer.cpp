// Whole decoder layers of the plain shape, of bfloat16: the kernels that their modules call, one after
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

  LayerSpace(const LayerSpec& layer, int64_t tokens, Half* p) {
    const Half* start = p;
    const int64_t width = layer.output.outputs;
    normed = p, p += tokens * width;
    projected = p, p += tokens * layer.projection.outputs;
    attended = p, p += tokens * layer.output.inputs;
    residual = p, p += tokens * width;
    gated = p, p += tokens * layer.gate_up.outputs;
    size = p - start;
  }
};

// Attention over what was projected, in the layer that comes next: 0, or how many floats of scratch
// are needed.
int64_t attend(const LayersCall& call, const LayerSpec& layer, const LayerSpace& space,
               int64_t query, int64_t keys) {
  AttentionCall step = *call.attention[call.next];
  const int64_t stride = layer.projection.outputs, dim = layer.heads.head_dim;
  step.query = space.projected;
  step.key = space.projected + query;
  step.value = space.projected + query + keys;
  step.query_head_stride = step.key_head_stride = step.value_head_stride = dim;
  step.query_token_stride = step.key_token_stride = step.value_token_stride = stride;
  step.keys = call.keys[call.next], step.values = call.values[call.next];
  step.output = space.attended;
  step.sinks = nullptr;
  step.scratch = call.attention_scratch, step.scratch_floats = call.attention_floats;
  step.num_tokens = call.tokens;
  step.num_heads = layer.heads.num_heads, step.num_kv_heads = layer.heads.num_kv_heads;
  step.key_dim = step.value_dim = dim;
  step.scaling = layer.scaling, step.softcap = layer.softcap;
  return attention(step);
}

// The layer that comes next, from x to call.y; they may be the same, since x is read for the last
// time before y is written. 0: done. Otherwise attention needs so many floats of scratch, and y is
// as it was.
int64_t compute(const LayersCall& call, const void* x) {
  const LayerSpec& layer = *call.layers[call.next];
  const int64_t tokens = call.tokens, width = layer.output.outputs;
  const LayerSpace space(layer, tokens, static_cast<Half*>(call.scratch));
  const int64_t stride = layer.projection.outputs;
  const int64_t query = layer.heads.num_heads * layer.heads.head_dim;
  const int64_t keys = layer.heads.num_kv_heads * layer.heads.head_dim;
  const int64_t inner = layer.gate_up.outputs / 2;
  const int threads = int(call.attention[call.next]->threads);
  rms_norm(layer.first_norm, x, space.normed, tokens, threads);
  linear(layer.projection, space.normed, width, space.projected, tokens, threads);
  if (layer.heads.rotary_dim || layer.heads.query_weight) {
    HeadsCall turned = layer.heads;
    turned.query = space.projected, turned.key = space.projected + query;
    turned.query_stride = turned.key_stride = stride;
    turned.cos = call.cos, turned.sin = call.sin;
    turned.tokens = tokens;
    heads(turned, threads);
  }
  if (const int64_t needed = attend(call, layer, space, query, keys)) return needed;
  linear(layer.output, space.attended, query, space.normed, tokens, threads);
  add(x, space.normed, space.residual, tokens, width, threads);
  rms_norm(layer.second_norm, space.residual, space.normed, tokens, threads);
  linear(layer.gate_up, space.normed, width, space.gated, tokens, threads);
  gate(int(layer.activation), space.gated, space.gated + inner, 2 * inner, space.gated, 2 * inner,
       tokens, inner, threads);
  linear(layer.down, space.gated, 2 * inner, space.normed, tokens, threads);
  add(space.residual, space.normed, call.y, tokens, width, threads);
  return 0;
}

}  // namespace

// How many numbers of bfloat16 a layer needs for its scratch.
int64_t layer_scratch(const LayerSpec& layer, int64_t tokens) {
  return LayerSpace(layer, tokens, nullptr).size;
}

// y [T][K] from x, through the layers from `next` on. 0: done. Otherwise attention needs so many
// floats of scratch in layer `next`; those before it are done.
int64_t layers(LayersCall& call) {
  for (; call.next < call.count; ++call.next)
    if (const int64_t needed = compute(call, call.next ? call.y : call.x)) return needed;
  return 0;
}

}  // namespace HEADRACE_ISA
