// How many of a block's 16 rows a kernel takes at once, and how their lanes come into registers: all of them.
#pragma once

namespace strata::cpu::STRATA_ISA {
namespace {

struct WholeBlock {
    using Ints = STRATA_ISA::Ints;
    using Floats = STRATA_ISA::Floats;
    static constexpr int kLanes = 16;
    STRATA_INLINE Ints load_ints(const void* p) { return STRATA_ISA::load_ints(p); }
    STRATA_INLINE Ints set_ints(int32_t x) { return STRATA_ISA::set_ints(x); }
    STRATA_INLINE Ints load_u8(const void* p) { return STRATA_ISA::load_u8(p); }
    STRATA_INLINE Floats load_floats(const float* p) { return STRATA_ISA::load_floats(p); }
    STRATA_INLINE Floats load_f16(const void* p) { return STRATA_ISA::load_f16(p); }
    STRATA_INLINE Floats set_floats(float x) { return STRATA_ISA::set_floats(x); }
    STRATA_INLINE void store_floats(float* p, Floats x) { STRATA_ISA::store_floats(p, x); }
};

}  // namespace
}  // namespace strata::cpu::STRATA_ISA
