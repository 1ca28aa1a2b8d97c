// The primitives in which all kernels are written: vectors of 16 lanes, one lane per row of a block.
// A kernel never asks which instruction set it runs on; all differences are in the two headers below.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/formats.h"

#define STRATA_INLINE static STRATA_ALWAYS_INLINE

#ifdef __AVX512VNNI__
#include "cpu/kernels/simd_avx512.h"
#else
#include "cpu/kernels/simd_avx2.h"
#endif

#include "cpu/kernels/whole_block.h"
