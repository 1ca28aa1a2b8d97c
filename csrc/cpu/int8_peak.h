// The processor's limit for int8 products, measured.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// Multiply-adds per second of all threads together, at work from registers for about `seconds`: what no
// kernel of this instruction set can exceed. The best of several rounds, for neighbours only ever slow one
// down.
double int8_peak(Cpu& cpu, double seconds);

}  // namespace strata::cpu
