#include "cpu/features.h"

#include <cpuid.h>

#include <cstdint>
#include <cstring>

namespace strata::cpu {
namespace {

struct Leaf {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Leaf r;
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return Leaf{};
    return r;
}

bool has(uint32_t reg, int bit) { return (reg >> bit & 1) != 0; }

// XCR0: which registers the operating system saves on a task switch. Only legal when OSXSAVE is set.
uint64_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

std::string brand_string() {
    char text[49] = {};
    if (cpuid(0x80000000u).eax < 0x80000004u) return "unknown x86-64 processor";
    for (uint32_t i = 0; i < 3; i++) {
        const Leaf part = cpuid(0x80000002u + i);
        std::memcpy(text + 16 * i, &part, 16);
    }
    return text;
}

}  // namespace

Features detect_features() {
    constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
    constexpr int kFma = 12, kOsxsave = 27, kF16c = 29, kAvx2 = 5, kBmi2 = 8;
    constexpr int kAvx512f = 16, kAvx512dq = 17, kAvx512bw = 30, kAvx512vl = 31, kVnni = 11;
    Features found;
    found.brand = brand_string();
    const Leaf basic = cpuid(1), extended = cpuid(7);
    if (!has(basic.ecx, kOsxsave)) return found;
    const uint64_t saved = saved_registers();
    found.avx2 = (saved & kYmm) == kYmm && has(basic.ecx, kFma) && has(basic.ecx, kF16c) &&
                 has(extended.ebx, kAvx2) && has(extended.ebx, kBmi2);
    found.avx512 = found.avx2 && (saved & kZmm) == kZmm && has(extended.ebx, kAvx512f) &&
                   has(extended.ebx, kAvx512dq) && has(extended.ebx, kAvx512bw) &&
                   has(extended.ebx, kAvx512vl) && has(extended.ecx, kVnni);
    return found;
}

}  // namespace strata::cpu
