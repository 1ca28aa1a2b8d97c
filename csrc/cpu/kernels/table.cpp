#include "cpu/kernels/kernels.h"

#define STRATA_TEXT_(x) #x
#define STRATA_TEXT(x) STRATA_TEXT_(x)

namespace strata::cpu::STRATA_ISA {

const Kernels kKernels = {
    STRATA_TEXT(STRATA_ISA),
};

}  // namespace strata::cpu::STRATA_ISA
