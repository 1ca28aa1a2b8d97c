// The emulator as a C library: describe the buffers, launch, ask for the error.
#include "emu/machine.h"
#include "emu/memory_check.h"

using namespace strata::emu;

extern "C" {

void strata_emu_configure(int checked, int order, unsigned seed) {
    memory().checked = checked != 0;
    machine().order = static_cast<Order>(order);
    machine().random.seed(seed);
}

void strata_emu_clear_buffers() { memory().buffers.clear(); }

void strata_emu_add_buffer(void* begin, size_t bytes, int read_only, const char* name) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    const size_t cells = read_only || !memory().checked ? 0 : bytes;
    memory().buffers.push_back({address, address + bytes, read_only != 0, name, std::vector<Cell>(cells)});
}

// grid and block: three sizes each. arguments: the address of each argument, as cuLaunchKernel takes them.
int strata_emu_launch(const char* name, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                      void** arguments, int count) {
    const bool done = launch(name, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes,
                             arguments, count);
    return done ? 0 : 1;
}

const char* strata_emu_error() { return machine().error.c_str(); }
}
