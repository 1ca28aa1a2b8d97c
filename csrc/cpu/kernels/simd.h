// The primitives in which all kernels are written: vectors of 16 lanes, one lane per row of a block.
// A kernel never asks which instruction set it runs on; all differences are in the two headers below.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define STRATA_INLINE static inline __attribute__((always_inline))
#define STRATA_INLINE_MEMBER inline __attribute__((always_inline))

#ifdef __AVX512VNNI__
#include "cpu/kernels/simd_avx512.h"
#else
#include "cpu/kernels/simd_avx2.h"
#endif
