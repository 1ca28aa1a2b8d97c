// The dispatch table: one per instruction set, filled by kernels/table.cpp, which is compiled for each.
//
// Files in this folder are compiled once per instruction set, in namespace `avx2` or `avx512`
// (STRATA_ISA). They define nothing with external linkage but functions of that namespace: an inline
// function shared between the two would be merged by the linker and could carry AVX-512 code to a machine
// without it (a test looks for such symbols). So: `static` or an anonymous namespace, no std:: containers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata::cpu {

struct Kernels {
    const char* name;
};

namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace strata::cpu
