// The library's entries: each goes to the variant that this machine runs best.
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "calls.h"

namespace {

struct Variant {
  const char* name;
  int64_t (*attention)(const AttentionCall&);
  int64_t (*linear_size)(const LinearWeight&);
  void (*linear_pack)(const LinearWeight&, const void*, int64_t, int);
  int (*linear_rows)(const LinearWeight&, const int64_t*, int64_t, void*, int);
  void (*linear)(const LinearWeight&, const void*, int64_t, void*, int64_t, int64_t, int);
  void (*norm)(const NormWeight&, const void*, void*, int64_t, int64_t, int, int);
  void (*gate)(int, const void*, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t,
               int, int);
  void (*heads)(const HeadsCall&, int, int);
  void (*add)(const void*, const void*, float, void*, int64_t, int64_t, int, int);
  void (*low_rank)(const AdaptedRows&, int64_t, int64_t, const void*, int64_t, void*, int64_t, int,
                   int);
  int64_t (*layer_scratch)(const LayerSpec&, int64_t);
  int64_t (*layers)(LayersCall&);
  void (*greedy)(const void*, int64_t, int64_t, int64_t, int64_t*, int);
  void (*draw)(const void*, int64_t, const int64_t*, int64_t, int64_t, int, const double*,
               const float*, int64_t*, int);
  void (*convolution)(const ConvolutionCall&);
  void (*delta_rule)(const DeltaRuleCall&);
  void (*recur)(const LayerSpec&, const RecurrentCall&);
  void (*gated_norm)(const LayerSpec&, void*, const void*, int64_t, int);
  int64_t (*recurrent_scratch)(const LayerSpec&);
};

}  // namespace

#define HEADRACE_VARIANT(isa)                                                                    \
  namespace isa {                                                                                \
  int64_t attention(const AttentionCall& call);                                                  \
  int64_t linear_size(const LinearWeight& weight);                                               \
  void linear_pack(const LinearWeight& weight, const void* rows, int64_t stride, int threads);   \
  int linear_rows(const LinearWeight& weight, const int64_t* wanted, int64_t count,              \
                  void* rows, int threads);                                                      \
  void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y,              \
              int64_t y_stride, int64_t rows, int threads);                                      \
  void norm(const NormWeight& norm, const void* x, void* y, int64_t stride, int64_t rows,        \
            int dtype, int threads);                                                             \
  void gate(int activation, const void* gate, int64_t stride, const void* up, int64_t up_stride, \
            void* y, int64_t y_stride, int64_t rows, int64_t width, int dtype, int threads);     \
  void heads(const HeadsCall& call, int dtype, int threads);                                     \
  void add(const void* x, const void* y, float factor, void* sum, int64_t rows, int64_t width,   \
           int dtype, int threads);                                                              \
  void low_rank(const AdaptedRows& adapted, int64_t first, int64_t count, const void* x,         \
                int64_t x_stride, void* y, int64_t y_stride, int dtype, int threads);            \
  int64_t layer_scratch(const LayerSpec& layer, int64_t tokens);                                 \
  int64_t layers(LayersCall& call);                                                              \
  void greedy(const void* logits, int64_t stride, int64_t rows, int64_t width, int64_t* tokens,  \
              int threads);                                                                      \
  void draw(const void* logits, int64_t stride, const int64_t* rows, int64_t count,              \
            int64_t width, int dtype, const double* uniforms, const float* temperatures,         \
            int64_t* tokens, int threads);                                                       \
  void convolution(const ConvolutionCall& call);                                                 \
  void delta_rule(const DeltaRuleCall& call);                                                    \
  void recur(const LayerSpec& layer, const RecurrentCall& call);                                 \
  void gated_norm(const LayerSpec& layer, void* x, const void* projected, int64_t rows,          \
                  int threads);                                                                  \
  int64_t recurrent_scratch(const LayerSpec& layer);                                             \
  const Variant VARIANT = {#isa, attention, linear_size, linear_pack, linear_rows, linear, norm, \
                           gate, heads, add, low_rank, layer_scratch, layers, greedy, draw,       \
                           convolution, delta_rule, recur, gated_norm, recurrent_scratch};       \
  }

// One that the compiler has no instructions for: a name, and nothing to call.
#define HEADRACE_LACKING(isa)     \
  namespace isa {                 \
  const Variant VARIANT = {#isa}; \
  }

#if defined(__x86_64__)
HEADRACE_VARIANT(avx2)
#ifdef HEADRACE_WITH_avx512
HEADRACE_VARIANT(avx512)
#else
HEADRACE_LACKING(avx512)
#endif
#ifdef HEADRACE_WITH_avx512_bf16
HEADRACE_VARIANT(avx512_bf16)
#else
HEADRACE_LACKING(avx512_bf16)
#endif
#ifdef HEADRACE_WITH_amx
HEADRACE_VARIANT(amx)
#else
HEADRACE_LACKING(amx)
#endif
#else
HEADRACE_VARIANT(portable)
#endif

namespace {

#if defined(__x86_64__)
// Whether the system lets this process use AMX's tiles, which it keeps only for those that ask.
bool may_use_tiles() {
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return !syscall(SYS_arch_prctl, request, tile_data);
}
#endif

// The best variant that this machine can run, or the one of that name if it can run it; of those
// that were built, or of all.
Variant choose(const char* wanted, bool built = true) {
  const auto fits = [=](const Variant& one) {
    return (!built || one.linear) && (!wanted || !std::strcmp(wanted, one.name));
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  if (has_bf16 && fits(amx::VARIANT) && __builtin_cpu_supports("amx-bf16") && may_use_tiles())
    return amx::VARIANT;
  if (has_bf16 && fits(avx512_bf16::VARIANT)) return avx512_bf16::VARIANT;
  if (has_avx512 && fits(avx512::VARIANT)) return avx512::VARIANT;
  if (has_avx2 && fits(avx2::VARIANT)) return avx2::VARIANT;
#else
  if (fits(portable::VARIANT)) return portable::VARIANT;
#endif
  return {};
}

Variant variant = choose(nullptr);

}  // namespace

#define HEADRACE_ENTRY extern "C" __attribute__((visibility("default")))

// Of the sources that this was built from; see ../build.py.
HEADRACE_ENTRY const char* headrace_fingerprint() { return HEADRACE_FINGERPRINT; }

// The instruction set in use; null: this machine has none that the kernels were built for.
HEADRACE_ENTRY const char* headrace_isa() { return variant.name; }

// The instruction set that this machine would use if the kernels had been built for it; null: it
// uses the best.
HEADRACE_ENTRY const char* headrace_lacks() {
  const Variant best = choose(nullptr, false);
  return best.linear ? nullptr : best.name;
}

// Use another variant, for tests. False: this machine cannot run it; then nothing changes.
HEADRACE_ENTRY bool headrace_use(const char* isa) {
  const Variant wanted = choose(isa);
  if (wanted.name) variant = wanted;
  return wanted.name;
}

// See `attention` in attention.cpp.
HEADRACE_ENTRY int64_t headrace_attention(const AttentionCall* call) {
  return variant.attention(*call);
}

// See `linear_pack` in linear_pack.cpp.
HEADRACE_ENTRY void headrace_linear_pack(const LinearWeight* weight, const void* rows,
                                         int64_t stride, int threads) {
  variant.linear_pack(*weight, rows, stride, threads);
}

// How many bytes packed weights are; without their addresses.
HEADRACE_ENTRY int64_t headrace_linear_size(const LinearWeight* weight) {
  return variant.linear_size(*weight);
}

// See `linear_rows` in linear_pack.cpp.
HEADRACE_ENTRY int headrace_linear_rows(const LinearWeight* weight, const int64_t* wanted,
                                        int64_t count, void* rows, int threads) {
  return variant.linear_rows(*weight, wanted, count, rows, threads);
}

// See `linear` in linear.cpp.
HEADRACE_ENTRY void headrace_linear(const LinearWeight* weight, const void* x, int64_t x_stride,
                                    void* y, int64_t y_stride, int64_t rows, int threads) {
  variant.linear(*weight, x, x_stride, y, y_stride, rows, threads);
}

// See `norm` in elementwise.cpp.
HEADRACE_ENTRY void headrace_norm(const NormWeight* norm, const void* x, void* y, int64_t stride,
                                  int64_t rows, int dtype, int threads) {
  variant.norm(*norm, x, y, stride, rows, dtype, threads);
}

// See `gate` in elementwise.cpp.
HEADRACE_ENTRY void headrace_gate(int activation, const void* gate, int64_t stride, const void* up,
                                  int64_t up_stride, void* y, int64_t y_stride, int64_t rows,
                                  int64_t width, int dtype, int threads) {
  variant.gate(activation, gate, stride, up, up_stride, y, y_stride, rows, width, dtype, threads);
}

// See `heads` in elementwise.cpp.
HEADRACE_ENTRY void headrace_heads(const HeadsCall* call, int dtype, int threads) {
  variant.heads(*call, dtype, threads);
}

// See `add` in elementwise.cpp.
HEADRACE_ENTRY void headrace_add(const void* x, const void* y, float factor, void* sum, int64_t rows,
                                 int64_t width, int dtype, int threads) {
  variant.add(x, y, factor, sum, rows, width, dtype, threads);
}

// See `low_rank` in low_rank.cpp.
HEADRACE_ENTRY void headrace_low_rank(const AdaptedRows* adapted, int64_t first, int64_t count,
                                      const void* x, int64_t x_stride, void* y, int64_t y_stride,
                                      int dtype, int threads) {
  variant.low_rank(*adapted, first, count, x, x_stride, y, y_stride, dtype, threads);
}

// See `layer_scratch` in layer.cpp.
HEADRACE_ENTRY int64_t headrace_layer_scratch(const LayerSpec* layer, int64_t tokens) {
  return variant.layer_scratch(*layer, tokens);
}

// See `layers` in layer.cpp.
HEADRACE_ENTRY int64_t headrace_layers(LayersCall* call) { return variant.layers(*call); }

// See `greedy` in greedy.cpp.
HEADRACE_ENTRY void headrace_greedy(const void* logits, int64_t stride, int64_t rows, int64_t width,
                                    int64_t* tokens, int threads) {
  variant.greedy(logits, stride, rows, width, tokens, threads);
}

// See `draw` in draw.cpp.
HEADRACE_ENTRY void headrace_draw(const void* logits, int64_t stride, const int64_t* rows,
                                  int64_t count, int64_t width, int dtype,
                                  const double* uniforms, const float* temperatures,
                                  int64_t* tokens, int threads) {
  variant.draw(logits, stride, rows, count, width, dtype, uniforms, temperatures, tokens, threads);
}

// See `convolution` in convolution.cpp.
HEADRACE_ENTRY void headrace_convolution(const ConvolutionCall* call) { variant.convolution(*call); }

// See `delta_rule` in delta_rule.cpp.
HEADRACE_ENTRY void headrace_delta_rule(const DeltaRuleCall* call) { variant.delta_rule(*call); }

// See `recur` in recurrent.cpp.
HEADRACE_ENTRY void headrace_recur(const LayerSpec* layer, const RecurrentCall* call) {
  variant.recur(*layer, *call);
}

// See `recurrent_scratch` in recurrent.cpp.
HEADRACE_ENTRY int64_t headrace_recurrent_scratch(const LayerSpec* layer) {
  return variant.recurrent_scratch(*layer);
}

// See `gated_norm` in elementwise.cpp.
HEADRACE_ENTRY void headrace_gated_norm(const LayerSpec* layer, void* x, const void* projected,
                                        int64_t rows, int threads) {
  variant.gated_norm(*layer, x, projected, rows, threads);
}
