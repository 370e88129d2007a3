// The library's entries: each goes to the variant that this machine runs best.
#include <cstdint>

#include "calls.h"

namespace {

struct Variant {
  const char* name;
  int64_t (*attention)(const AttentionCall&);
  void (*linear_pack)(const LinearWeight&, const uint16_t*, int64_t, uint32_t*, int);
  void (*linear_rows)(const LinearWeight&, const int64_t*, int64_t, uint16_t*, int);
  void (*linear)(const LinearWeight&, const void*, int64_t, void*, int64_t, int);
};

}  // namespace

#define HEADRACE_VARIANT(isa)                                                                    \
  namespace isa {                                                                                \
  int64_t attention(const AttentionCall& call);                                                  \
  void linear_pack(const LinearWeight& weight, const uint16_t* rows, int64_t stride,             \
                   uint32_t* packed, int threads);                                               \
  void linear_rows(const LinearWeight& weight, const int64_t* outputs, int64_t count,            \
                   uint16_t* rows, int threads);                                                 \
  void linear(const LinearWeight& weight, const void* x, int64_t x_stride, void* y, int64_t rows, \
              int threads);                                                                      \
  constexpr Variant VARIANT = {#isa, attention, linear_pack, linear_rows, linear};               \
  }

#if defined(__x86_64__)
HEADRACE_VARIANT(avx2)
HEADRACE_VARIANT(avx512)
HEADRACE_VARIANT(avx512_bf16)
#else
HEADRACE_VARIANT(portable)
#endif

namespace {

Variant choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512bf16")) return avx512_bf16::VARIANT;
    return avx512::VARIANT;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return avx2::VARIANT;
  return {};
#else
  return portable::VARIANT;
#endif
}

const Variant variant = choose();

}  // namespace

#define HEADRACE_ENTRY extern "C" __attribute__((visibility("default")))

// Of the sources that this was built from; see ../build.py.
HEADRACE_ENTRY const char* headrace_fingerprint() { return HEADRACE_FINGERPRINT; }

// The instruction set in use; null: this machine has none that the kernels were built for.
HEADRACE_ENTRY const char* headrace_isa() { return variant.name; }

// See `attention` in attention.cpp.
HEADRACE_ENTRY int64_t headrace_attention(const AttentionCall* call) {
  return variant.attention(*call);
}

// See `linear_pack` in linear.cpp.
HEADRACE_ENTRY void headrace_linear_pack(const LinearWeight* weight, const uint16_t* rows,
                                         int64_t stride, uint32_t* packed, int threads) {
  variant.linear_pack(*weight, rows, stride, packed, threads);
}

// See `linear_rows` in linear.cpp.
HEADRACE_ENTRY void headrace_linear_rows(const LinearWeight* weight, const int64_t* outputs,
                                         int64_t count, uint16_t* rows, int threads) {
  variant.linear_rows(*weight, outputs, count, rows, threads);
}

// See `linear` in linear.cpp.
HEADRACE_ENTRY void headrace_linear(const LinearWeight* weight, const void* x, int64_t x_stride,
                                    void* y, int64_t rows, int threads) {
  variant.linear(*weight, x, x_stride, y, rows, threads);
}
