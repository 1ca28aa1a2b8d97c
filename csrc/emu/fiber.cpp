#include "emu/fiber.h"

#include <sys/mman.h>

#include <cstdlib>

#ifndef __x86_64__
#error "the emulator's fibers are written for x86-64"
#endif

asm(R"(
.text
.globl strata_emu_switch
.type strata_emu_switch, @function
strata_emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

namespace strata::emu {

static constexpr size_t kSavedRegisters = 6;
static constexpr u64 kCanary = 0x5374726174612121;

u8* stacks(size_t count) {
    static u8* const all = [count] {
        void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        return static_cast<u8*>(memory);
    }();
    return all;
}

void* fresh_stack(u8* stack, void (*entry)()) {
    memcpy(stack, &kCanary, sizeof kCanary);
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry, as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (size_t i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    return top;
}

bool overflowed(const u8* stack) { return memcmp(stack, &kCanary, sizeof kCanary) != 0; }

}  // namespace strata::emu
