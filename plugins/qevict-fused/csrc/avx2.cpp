// For x86 processors with AVX2, FMA and F16C; called only where they are there.
#include <type_traits>

#include "problem.h"

#if defined(QEVICT_HAS_AVX2)
#include <immintrin.h>

#define QEVICT_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace qevict_fused {
namespace {
#include "kernel.inc"
}  // namespace

Kernels avx2_kernels() { return {attend, angles}; }

}  // namespace qevict_fused

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
