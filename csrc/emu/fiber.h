// Switching between the stacks of fibers (x86-64 System V only, as Strata itself).
#pragma once

#include <cstddef>

#include "emu/types.h"

namespace strata::emu {

constexpr size_t kStackBytes = 128 << 10;

// Saves the callee-saved registers and the stack pointer in *save and continues at `to`.
extern "C" void strata_emu_switch(void** save, void* to);

// `count` stacks of kStackBytes; made once, kept until the process ends. No guard pages between them: a
// process may have 65,530 mappings and loads many kernels.
u8* stacks(size_t count);
// The stack pointer with which strata_emu_switch starts `entry` on a fresh stack.
void* fresh_stack(u8* stack, void (*entry)());
// Whether the fiber wrote beyond its stack's end.
bool overflowed(const u8* stack);

}  // namespace strata::emu
