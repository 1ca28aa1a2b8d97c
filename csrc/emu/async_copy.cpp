// cp.async: a copy reads its source and writes its target when it is waited for and not before; until then
// the target holds 0xff and may not be touched.
#include "emu/machine.h"
#include "emu/memory_check.h"

namespace strata::emu {

static constexpr size_t kBytes = 16;

void async_copy16(void* shared, const void* global, bool valid, Site site) {
    const void* const pc = __builtin_return_address(0);
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) & (kBytes - 1))
        fail("misaligned: cp.async at %s:%d", site.file, site.line);
    if (valid) check_access(global, kBytes, Access::read, pc);
    check_access(shared, kBytes, Access::async_issue, pc);
    memset(shared, 0xff, kBytes);
    machine().current->open_copies.push_back(
        {static_cast<u8*>(shared), static_cast<const u8*>(global), valid});
}

void async_commit() {
    Thread& me = *machine().current;
    me.copy_groups.push_back(std::move(me.open_copies));
    me.open_copies.clear();
}

void async_wait(size_t groups_left) {
    Thread& me = *machine().current;
    for (; me.copy_groups.size() > groups_left; me.copy_groups.pop_front()) {
        for (const AsyncCopy& copy : me.copy_groups.front()) {
            check_access(copy.shared, kBytes, Access::async_arrive, __builtin_return_address(0));
            if (copy.valid)
                memcpy(copy.shared, copy.global, kBytes);
            else
                memset(copy.shared, 0, kBytes);
        }
    }
}

}  // namespace strata::emu
