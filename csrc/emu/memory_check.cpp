#include "emu/memory_check.h"

#include <algorithm>
#include <cstdlib>

#include "emu/fiber.h"

namespace strata::emu {

Memory::Memory() : shared_cells(kMaxShared) {
    u8* const all = static_cast<u8*>(aligned_alloc(kGuard, kMaxShared + 2 * kGuard));
    if (all == nullptr) abort();
    shared = all + kGuard;
}

Memory& memory() {
    static Memory the_memory;
    return the_memory;
}

void begin_launch(size_t shared_bytes) {
    Memory& m = memory();
    m.shared_bytes = shared_bytes;
    m.launch_begin = ++m.epoch;
    m.published.by_word.clear();
    std::sort(m.buffers.begin(), m.buffers.end(),
              [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
}

void begin_block() {
    Memory& m = memory();
    m.block_begin = ++m.epoch;
    Published& p = m.published;
    p.found.clear(), p.fenced.clear(), p.visible.clear();
    p.fence_epoch = 0;
    memset(m.shared, 0xff, m.shared_bytes);
    for (Cell& cell : m.shared_cells) cell.pending = false;
}

void next_epoch() {
    Memory& m = memory();
    ++m.epoch;
    Published& p = m.published;
    p.visible.insert(p.visible.end(), p.fenced.begin(), p.fenced.end());
    p.fenced.clear();
}

void fence() {
    Memory& m = memory();
    if (!m.checked) return;
    Published& p = m.published;
    const unsigned thread = machine().current->index;
    p.fencing_thread = thread;
    p.fence_epoch = m.epoch;
    if (p.finding_thread != thread) return;
    p.fenced.insert(p.fenced.end(), p.found.begin(), p.found.end());
    p.found.clear();
}

namespace {

// An atomic of the running thread: what it publishes, and what it finds.
void meet(uintptr_t word) {
    Memory& m = memory();
    Published& p = m.published;
    const unsigned thread = machine().current->index;
    std::vector<Span>& spans = p.by_word[word];
    p.found = spans;
    p.finding_thread = thread;
    if (p.fence_epoch != 0 && p.fencing_thread == thread) spans.push_back({m.block_begin, p.fence_epoch});
}

bool is_visible(u32 epoch) {
    const std::vector<Span>& spans = memory().published.visible;
    return std::any_of(spans.begin(), spans.end(),
                       [epoch](const Span& s) { return epoch >= s.begin && epoch < s.end; });
}

struct Place {
    const char* name;
    long offset;
    bool is_shared;
    const void* pc;
};

const char* verb(Access kind) { return kind == Access::read ? "read" : "write"; }

// Whether an access of this epoch by `thread` is known to lie before the running thread's next one.
bool ordered(unsigned thread, u16 warp_epoch) {
    const Thread& me = *machine().current;
    if (thread == me.index) return true;
    return thread / kLanes == me.warp && warp_epoch != machine().warps[me.warp].epoch;
}

void check_against_writer(const Cell& cell, Access kind, const Place& at) {
    const Memory& m = memory();
    if (cell.write_epoch < m.block_begin && !is_visible(cell.write_epoch))
        fail("race: %s of %s+%ld, which another block wrote in this launch, pc %p", verb(kind), at.name,
             at.offset, at.pc);
    if (cell.write_epoch == m.epoch && !ordered(cell.writer, cell.writer_warp_epoch))
        fail("race: %s of %s+%ld after a write by thread %u with no barrier between, pc %p", verb(kind),
             at.name, at.offset, cell.writer, at.pc);
}

void check_against_readers(const Cell& cell, const Place& at) {
    const Memory& m = memory();
    if (cell.other_blocks || cell.read_epoch < m.block_begin)
        fail("race: write of %s+%ld, which another block reads in this launch, pc %p", at.name, at.offset,
             at.pc);
    if (cell.read_epoch != m.epoch) return;
    const bool same_moment = cell.reader_warp_epoch == machine().warps[cell.reader / kLanes].epoch;
    if (cell.many_warps || !ordered(cell.reader, cell.reader_warp_epoch) || (cell.many_lanes && same_moment))
        fail("race: write of %s+%ld after a read by thread %u with no barrier between, pc %p", at.name,
             at.offset, cell.reader, at.pc);
}

void note_reader(Cell& cell, bool atomic, u32 begin) {
    const Memory& m = memory();
    const Thread& me = *machine().current;
    const u16 warp_epoch = machine().warps[me.warp].epoch;
    if (cell.read_epoch < begin)
        cell.other_blocks = false;
    else if (cell.read_epoch < m.block_begin)
        cell.other_blocks = true;
    if (cell.read_epoch != m.epoch)
        cell.many_lanes = cell.many_warps = false;
    else if (cell.reader / kLanes != me.warp)
        cell.many_warps = true;
    else if (cell.reader_warp_epoch != warp_epoch)
        cell.many_lanes = false;
    else if (cell.reader != me.index)
        cell.many_lanes = true;
    cell.read_epoch = m.epoch;
    cell.reader = static_cast<u16>(me.index);
    cell.reader_warp_epoch = warp_epoch;
    cell.atomic_read = atomic;
}

void note_writer(Cell& cell, bool atomic) {
    const Thread& me = *machine().current;
    cell.write_epoch = memory().epoch;
    cell.writer = static_cast<u16>(me.index);
    cell.writer_warp_epoch = machine().warps[me.warp].epoch;
    cell.atomic_write = atomic;
}

void check_byte(Cell& cell, Access kind, const Place& at) {
    const Memory& m = memory();
    const u32 begin = at.is_shared ? m.block_begin : m.launch_begin;
    const bool atomic = kind == Access::atomic;
    if (cell.pending && kind != Access::async_arrive)
        fail("cp.async: %s of %s+%ld before the copy was waited for, pc %p", verb(kind), at.name, at.offset,
             at.pc);
    if (kind == Access::read && at.is_shared && cell.write_epoch < begin)
        fail("uninitialised: read of shared memory, offset %ld, pc %p", at.offset, at.pc);
    if (cell.write_epoch >= begin && !(atomic && cell.atomic_write)) check_against_writer(cell, kind, at);
    const bool writes = kind != Access::read;
    if (writes && cell.read_epoch >= begin && !(atomic && cell.atomic_read)) check_against_readers(cell, at);
    if (!writes || atomic) note_reader(cell, atomic, begin);
    if (writes) note_writer(cell, atomic);
    cell.pending = kind == Access::async_issue;
}

void check_bytes(Cell* cells, size_t bytes, Access kind, Place at) {
    for (size_t i = 0; i < bytes; ++i, ++at.offset) check_byte(cells[i], kind, at);
}

Buffer* buffer_at(uintptr_t address) {
    std::vector<Buffer>& all = memory().buffers;
    const auto above = std::upper_bound(all.begin(), all.end(), address,
                                        [](uintptr_t value, const Buffer& b) { return value < b.begin; });
    return above == all.begin() ? nullptr : &above[-1];
}

void check_shared(uintptr_t address, size_t bytes, Access kind, const void* pc) {
    Memory& m = memory();
    const long offset = static_cast<long>(address - reinterpret_cast<uintptr_t>(m.shared));
    if (offset < 0 || offset + bytes > m.shared_bytes)
        fail("out of bounds: %s of shared memory at offset %ld, the block has %zu bytes, pc %p", verb(kind),
             offset, m.shared_bytes, pc);
    check_bytes(&m.shared_cells[offset], bytes, kind, {"shared memory", offset, true, pc});
}

void check_global(uintptr_t address, size_t bytes, Access kind, const void* pc) {
    Buffer* const buffer = buffer_at(address);
    if (buffer == nullptr)
        fail("out of bounds: %s of %zu bytes below every buffer, pc %p", verb(kind), bytes, pc);
    const long offset = static_cast<long>(address - buffer->begin);
    if (address + bytes > buffer->end)
        fail("out of bounds: %s of %zu bytes at '%s'+%ld, which has %ld bytes, pc %p", verb(kind), bytes,
             buffer->name.c_str(), offset, static_cast<long>(buffer->end - buffer->begin), pc);
    if (kind == Access::atomic) meet(address);
    if (!buffer->read_only)
        check_bytes(&buffer->cells[offset], bytes, kind, {buffer->name.c_str(), offset, false, pc});
    else if (kind != Access::read)
        fail("read-only: write to '%s'+%ld, pc %p", buffer->name.c_str(), offset, pc);
}

// The emulator's own memory, which kernels reach through locals and built-in variables.
bool is_private(uintptr_t address) {
    const uintptr_t stack = reinterpret_cast<uintptr_t>(machine().current->stack);
    const uintptr_t threads = reinterpret_cast<uintptr_t>(machine().threads.data());
    return address - stack < kStackBytes || address - threads < kMaxThreads * sizeof(Thread) ||
           address == reinterpret_cast<uintptr_t>(&builtins);
}

}  // namespace

void check_access(const void* pointer, size_t bytes, Access kind, const void* pc) {
    if (machine().current == nullptr || !memory().checked) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (is_private(address)) return;
    const bool is_vector = bytes > 1 && bytes <= 16 && (bytes & (bytes - 1)) == 0;
    if (is_vector && (address & (bytes - 1)) != 0)
        fail("misaligned: %s of %zu bytes at %p, pc %p", verb(kind), bytes, pointer, pc);
    const uintptr_t guarded = reinterpret_cast<uintptr_t>(memory().shared) - kGuard;
    if (address - guarded < kMaxShared + 2 * kGuard)
        check_shared(address, bytes, kind, pc);
    else
        check_global(address, bytes, kind, pc);
}

}  // namespace strata::emu
