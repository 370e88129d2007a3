// Whole decoder layers: the kernels that their modules would call, one after the other, with nothing
// in between.
//
//   x ─┬─ norm ─ q, k, v ─ norms, rotary ─ attention ─ output ─ norm ─ + ─┬─ norm ─ MLP ─ norm ─ + ─ y
//      └──────────────────────────────────────────────────────────────────┘ └────────────────────┘
//
// Each norm may be missing. In parallel layers, the MLP reads what attention reads. In others, there is
// a recurrence in the place of attention and what is before it (recurrent.cpp). A layer without `down`
// ends before the MLP, which others compute. Elements are rounded where the modules round.
// What adapters add to a product is added where it is stored, before the next kernel reads it.
#include <optional>

#include "kernels.h"

namespace HEADRACE_ISA {
namespace {

int64_t outputs_of(const LinearWeight* parts, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += parts[i].outputs;
  return sum;
}

// The parts of a layer's scratch, and how wide they are.
struct LayerSpace {
  int64_t bytes;  // of an element
  int64_t width, query, keys, projected_width, mixed_width, inner_width;
  char* recurrent;  // the recurrence's own scratch
  char* normed;     // [T][K]
  char* projected;  // [T][(Hq + 2 Hkv) D], or what the recurrence needs
  char* mixed;      // [T][Hq D]: what attention or the recurrence makes
  char* made;       // [T][K]
  char* residual;   // [T][K]
  char* inner;      // [T][I], or [T][2 I] with a gate
  int64_t size;     // of all together, in bytes

  LayerSpace(const LayerSpec& layer, int64_t tokens, void* scratch)
      : bytes(layer.dtype == FLOAT32 ? 4 : 2),
        width(layer.output.outputs),
        query(layer.heads.num_heads * layer.heads.query_head_stride),
        keys(layer.heads.num_kv_heads * layer.heads.head_dim),
        projected_width(outputs_of(layer.projection, PROJECTIONS)),
        mixed_width(layer.output.inputs),
        inner_width(outputs_of(layer.inner, 2)) {
    char* const start = static_cast<char*>(scratch);
    char* p = start;
    const auto take = [&](int64_t elements) {
      char* const part = p;
      p += tokens * elements * bytes;
      return part;
    };
    recurrent = take(recurrent_scratch(layer) / bytes);  // first, because it has floats
    normed = take(width), projected = take(projected_width), mixed = take(mixed_width);
    made = take(width), residual = take(width), inner = take(inner_width);
    size = p - start;
  }
};

// Attention over queries, keys and values, in the layer that comes next: 0, or how many floats of
// scratch are needed.
int64_t attend_turned(const LayersCall& call, const LayerSpec& layer, const LayerSpace& space) {
  AttentionCall step = *call.attention[call.next];
  const int64_t dim = layer.heads.head_dim;
  step.query = space.projected;
  step.key = space.projected + space.query * space.bytes;
  step.value = space.projected + (space.query + space.keys) * space.bytes;
  step.query_head_stride = layer.heads.query_head_stride;
  step.key_head_stride = step.value_head_stride = dim;
  step.query_token_stride = step.key_token_stride = step.value_token_stride = space.projected_width;
  step.keys = call.keys[call.next], step.values = call.values[call.next];
  step.output = space.mixed;
  step.sinks = layer.sinks;
  step.scratch = call.attention_scratch, step.scratch_floats = call.attention_floats;
  step.num_tokens = call.tokens;
  step.num_heads = layer.heads.num_heads, step.num_kv_heads = layer.heads.num_kv_heads;
  step.key_dim = step.value_dim = dim;
  step.scaling = layer.scaling, step.softcap = layer.softcap;
  return attention(step);
}

// The same over what was projected. Where attention is gated, a head's gate follows its query.
int64_t attend(const LayersCall& call, const LayerSpec& layer, const LayerSpace& space) {
  const int dtype = int(layer.dtype), threads = int(call.threads);
  HeadsCall turned = layer.heads;
  turned.query = space.projected, turned.key = space.projected + space.query * space.bytes;
  turned.query_stride = turned.key_stride = space.projected_width;
  if (turned.rotary_dim) turned.cos = call.cos[layer.rotary], turned.sin = call.sin[layer.rotary];
  turned.tokens = call.tokens;
  heads(turned, dtype, threads);
  if (const int64_t needed = attend_turned(call, layer, space)) return needed;
  if (!layer.attention_gated) return 0;
  const int64_t dim = turned.head_dim;
  for (int64_t h = 0; h < turned.num_heads; ++h) {
    const char* const gates = space.projected + (h * turned.query_head_stride + dim) * space.bytes;
    char* const made = space.mixed + h * dim * space.bytes;
    gate(SIGMOID, gates, space.projected_width, made, space.mixed_width, made, space.mixed_width,
         call.tokens, dim, dtype, threads);
  }
  return 0;
}

// What mixes the tokens of the layer that comes next, from what was projected: 0, or how many floats
// of scratch are needed.
int64_t mix(const LayersCall& call, const LayerSpec& layer, const LayerSpace& space) {
  if (layer.mixer == ATTENTION) return attend(call, layer, space);
  recur(layer, {call.rows, call.states[call.next], space.projected, space.mixed, space.recurrent,
                call.threads});
  if (layer.mixer == DELTA_NET)
    gated_norm(layer, space.mixed, space.projected, call.tokens, int(call.threads));
  return 0;
}

// The layer that comes next, from x to call.y; they may be the same, since x is read for the last
// time before y is written. 0: done. Otherwise attention needs so many floats of scratch, and y is
// as it was.
int64_t compute(const LayersCall& call, const void* x) {
  const LayerSpec& layer = *call.layers[call.next];
  const int64_t tokens = call.tokens;
  const LayerSpace space(layer, tokens, call.scratch);
  const int64_t width = space.width;
  const int dtype = int(layer.dtype), threads = int(call.threads);
  // The parts of a product side by side in y, of rows of y_width elements, and what adapters add to the
  // `adapted` of them from `part` on.
  const auto products = [&](const LinearWeight* parts, int64_t count, int part, int adapted,
                            const void* from, int64_t from_width, char* y, int64_t y_width) {
    std::optional<Added> added;
    if (call.adapted)
      added.emplace(*call.adapted, call.next * PARTS + part, adapted, from, from_width, y, y_width,
                    dtype);
    while (count && !parts[count - 1].outputs) --count;
    for (int64_t i = 0; i < count; y += parts[i++].outputs * space.bytes)
      linear(parts[i], from, from_width, y, y_width, tokens, threads,
             i + 1 == count && added && added->width ? &*added : nullptr);
  };
  // What a norm makes of `from`, in `to`; `from` itself without a norm.
  const auto normed = [&](const NormWeight& one, const void* from, char* to) -> const void* {
    if (!one.weight) return from;
    norm(one, from, to, width, tokens, dtype, threads);
    return to;
  };
  const void* input = normed(layer.before_attention, x, space.normed);
  products(layer.projection, PROJECTIONS, TO_PROJECTION, 3, input, width, space.projected,
           space.projected_width);
  if (const int64_t needed = mix(call, layer, space)) return needed;
  products(&layer.output, 1, TO_OUTPUT, 1, space.mixed, space.mixed_width, space.made, width);
  normed(layer.after_attention, space.made, space.made);
  const bool is_whole = layer.down.packed;
  void* const sum = is_whole ? space.residual : call.y;
  add(x, space.made, layer.residual, sum, tokens, width, dtype, threads);
  if (!is_whole) return 0;
  if (!layer.parallel) input = normed(layer.before_mlp, space.residual, space.normed);
  products(layer.inner, 2, TO_INNER, 2, input, width, space.inner, space.inner_width);
  const int64_t inner = layer.down.inputs;
  const char* const up = layer.gated ? space.inner + inner * space.bytes : nullptr;
  gate(int(layer.activation), space.inner, space.inner_width, up, space.inner_width, space.inner,
       space.inner_width, tokens, inner, dtype, threads);
  products(&layer.down, 1, TO_DOWN, 1, space.inner, space.inner_width, space.made, width);
  normed(layer.after_mlp, space.made, space.made);
  add(space.residual, space.made, layer.residual, call.y, tokens, width, dtype, threads);
  return 0;
}

}  // namespace

// How many bytes a layer needs for its scratch.
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
