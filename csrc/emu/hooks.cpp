// What GCC calls for -fsanitize=thread, alignment, bounds and shift in kernel code. The sanitizers' own
// libraries are not linked: these functions take their place.
#include "emu/machine.h"
#include "emu/memory_check.h"

using namespace strata::emu;

#define PC __builtin_return_address(0)
#define HOOKS_OF_SIZE(n)                                                               \
    void __tsan_read##n(void* p) { check_access(p, n, Access::read, PC); }             \
    void __tsan_write##n(void* p) { check_access(p, n, Access::write, PC); }           \
    void __tsan_unaligned_read##n(void* p) { check_access(p, n, Access::read, PC); }   \
    void __tsan_unaligned_write##n(void* p) { check_access(p, n, Access::write, PC); } \
    void __tsan_volatile_read##n(void* p) { check_access(p, n, Access::read, PC); }    \
    void __tsan_volatile_write##n(void* p) { check_access(p, n, Access::write, PC); }

extern "C" {
HOOKS_OF_SIZE(1)
HOOKS_OF_SIZE(2)
HOOKS_OF_SIZE(4)
HOOKS_OF_SIZE(8)
HOOKS_OF_SIZE(16)
void __tsan_read_range(void* p, size_t bytes) { check_access(p, bytes, Access::read, PC); }
void __tsan_write_range(void* p, size_t bytes) { check_access(p, bytes, Access::write, PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

void __ubsan_handle_type_mismatch_v1(void*, void* p) {
    fail("misaligned: vector access at %p, pc %p", p, PC);
}
void __ubsan_handle_out_of_bounds(void*, void*) { fail("out of bounds: index of a local array, pc %p", PC); }
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { fail("undefined shift, pc %p", PC); }
}
