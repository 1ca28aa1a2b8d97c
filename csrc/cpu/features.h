// What the processor and the operating system offer. Runs on any x86-64.
#pragma once

#include <string>

namespace strata::cpu {

struct Features {
    bool avx2 = false;    // AVX2, FMA, F16C, BMI2, and the system saves the 256-bit registers
    bool avx512 = false;  // AVX-512 F, BW, VL, DQ, VNNI, and the system saves the 512-bit registers
    std::string brand;    // the processor's name
};

Features detect_features();

}  // namespace strata::cpu
