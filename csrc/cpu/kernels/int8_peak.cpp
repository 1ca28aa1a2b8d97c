// The most int8 multiply-adds the instruction set can do: the products of 4-bit weights and int8 activations
// as the kernels form them, without loads, scales or anything else. Where sums are 16 bits wide (AVX2) they
// are widened as rarely as 4-bit weights allow.
#include "cpu/kernels/simd.h"
#include "cpu/kernels/tables.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// Independent sums: enough to cover the latency of the products on every port, few enough for the registers.
constexpr int kChains = kPeakChains;
constexpr int kLargestWeight = 15;
constexpr int kStepsPerRound = unsigned_steps(kLargestWeight);

STRATA_INLINE void round_of_sums(Ints (&sum)[kChains], Ints w, Ints& x) {
    Ints part[kChains];
#pragma GCC unroll 16
    for (int step = 0; step < kStepsPerRound; step++) {
#pragma GCC unroll 16
        for (int c = 0; c < kChains; c++) {
            x = keep(x);  // or the compiler would multiply only once
            part[c] = step == 0 ? begin_unsigned(sum[c], w, x) : mac_unsigned(part[c], w, x);
        }
    }
    for (int c = 0; c < kChains; c++) sum[c] = flush_unsigned(sum[c], part[c]);
}

}  // namespace

int64_t int8_peak(int64_t rounds, int32_t* sums) {
    Ints sum[kChains], x = set_bytes(1);
    const Ints w = keep(set_bytes(kLargestWeight));
    for (int c = 0; c < kChains; c++) sum[c] = set_ints(0);
    for (int64_t round = 0; round < rounds; round++) round_of_sums(sum, w, x);
    for (int c = 1; c < kChains; c++) sum[0] = add_ints(sum[0], sum[c]);
    store_ints(sums, sum[0]);
    constexpr int kProductsPerStep = kRowBlock * 4;
    return rounds * kStepsPerRound * kChains * kProductsPerStep;
}

}  // namespace strata::cpu::STRATA_ISA
