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

static constexpr size_t kPage = 4096, kSavedRegisters = 6;

u8* stacks(size_t count) {
    static u8* const all = [count] {
        void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        u8* const first = static_cast<u8*>(memory);
        for (size_t i = 0; i < count; ++i) mprotect(first + i * kStackBytes, kPage, PROT_NONE);
        return first;
    }();
    return all;
}

void* fresh_stack(u8* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry, as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (size_t i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    return top;
}

}  // namespace strata::emu
