// The library's entries: each goes to the variant that this machine runs best.
#include <cstdint>

#include "calls.h"

#define HEADRACE_VARIANT(isa)                  \
  namespace isa {                              \
  int64_t attention(const AttentionCall& call); \
  }

#if defined(__x86_64__)
HEADRACE_VARIANT(avx2)
HEADRACE_VARIANT(avx512)
HEADRACE_VARIANT(avx512_bf16)
#else
HEADRACE_VARIANT(portable)
#endif

namespace {

struct Variant {
  const char* name;
  int64_t (*attention)(const AttentionCall&);
};

Variant choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512bf16")) return {"avx512_bf16", avx512_bf16::attention};
    return {"avx512", avx512::attention};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    return {"avx2", avx2::attention};
  return {nullptr, nullptr};
#else
  return {"portable", portable::attention};
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
