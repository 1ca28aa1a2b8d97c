// Only addresses: a constructor here would run at import, with instructions the processor may lack.
#include "cpu/kernels/tables.h"

#define STRATA_TEXT_(x) #x
#define STRATA_TEXT(x) STRATA_TEXT_(x)

namespace strata::cpu::STRATA_ISA {

const Kernels kKernels = {STRATA_TEXT(STRATA_ISA), kDotQ8, dot_w8a8,  kDotF32,   kDecodeRow, quantize,
                          quantize_token,          gate,   int8_peak, kAttention};

}  // namespace strata::cpu::STRATA_ISA
