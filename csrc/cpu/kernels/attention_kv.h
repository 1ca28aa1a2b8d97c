// How the KV types differ: what a chunk holds and how it is multiplied.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/simd.h"

namespace strata::cpu::STRATA_ISA {
namespace {

// Integers: 8-bit codes widened to 16 bits times 16-bit queries or weights. AVX2 multiplies 16-bit pairs as
// fast as 8-bit ones, which need a sign trick and a widening of every sum; and at 16 bits neither queries
// nor weights lose what could be seen behind int8 keys and values.
struct Int8Kv {
    using X = int16_t;
    using Sum = Ints;
    using Part = Ints;
    static constexpr int kPerLane = 4;  // elements of a 32-bit lane
    static constexpr int kParts = 2;    // vectors that a chunk unpacks to
    static constexpr bool kScaled = true, kGrouped = false;

    // Bytes 0 and 2 of every lane, then 1 and 3: elements 0, 1 and 2, 3 (kv_cache.h).
    STRATA_INLINE void unpack(Ints chunk, Part (&part)[kParts]) {
        part[0] = and_ints(chunk, set_ints(0x00ff00ff));
        part[1] = shift_right_words(chunk, 8);
    }
    STRATA_INLINE Sum begin_sum(int32_t start) { return set_ints(start); }
    STRATA_INLINE Floats end_sum(Sum sum) { return to_floats(sum); }
    STRATA_INLINE Sum mac(Sum sum, Part part, const X* x) {
        return mac_words(sum, part, broadcast4(reinterpret_cast<const int8_t*>(x)));
    }
};

// More than one scale per token and head.
struct Int8GroupKv : Int8Kv {
    static constexpr bool kGrouped = true;
};

// What BF16 and F32 share: both are multiplied as f32.
struct FloatKv {
    using X = float;
    using Sum = Floats;
    using Part = Floats;
    static constexpr bool kScaled = false, kGrouped = false;

    STRATA_INLINE Sum begin_sum(int32_t) { return set_floats(0.0f); }
    STRATA_INLINE Floats end_sum(Sum sum) { return sum; }
    STRATA_INLINE Sum mac(Sum sum, Part part, const X* x) { return fma(part, set_floats(*x), sum); }
};

struct Bf16Kv : FloatKv {
    static constexpr int kPerLane = 2;
    static constexpr int kParts = 2;

    STRATA_INLINE void unpack(Ints chunk, Part (&part)[kParts]) {
        part[0] = as_floats(shift_left(chunk, 16));
        part[1] = as_floats(and_ints(chunk, set_ints(-65536)));
    }
};

struct F32Kv : FloatKv {
    static constexpr int kPerLane = 1;
    static constexpr int kParts = 1;

    STRATA_INLINE void unpack(Ints chunk, Part (&part)[kParts]) { part[0] = as_floats(chunk); }
};

// sum[t] += chunk `step` of keys or values times x[t].
template <class Kv, int T>
STRATA_INLINE void add_chunk(Ints chunk, const typename Kv::X* const (&x)[T], int step,
                             typename Kv::Sum (&sum)[T]) {
    constexpr int kPartX = Kv::kPerLane / Kv::kParts;
    typename Kv::Part part[Kv::kParts];
    Kv::unpack(chunk, part);
#pragma GCC unroll 2
    for (int j = 0; j < Kv::kParts; j++)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++)
            sum[t] = Kv::mac(sum[t], part[j], x[t] + step * Kv::kPerLane + j * kPartX);
}

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
