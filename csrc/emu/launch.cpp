#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "emu/fiber.h"
#include "emu/machine.h"
#include "emu/memory_check.h"

namespace strata::emu {

const Builtins* builtins = nullptr;

Machine& machine() {
    static Machine the_machine;
    return the_machine;
}

u8* shared_memory() { return memory().shared; }

void register_kernel(const char* name, void (*call)(void**), int arguments) {
    machine().kernels[name] = {call, arguments};
}

static void to_scheduler() {
    strata_emu_switch(&machine().current->stack_pointer, machine().scheduler_stack);
}

void wait_as(State state, Site site) {
    machine().current->state = state;
    machine().current->waits_at = site;
    to_scheduler();
}

void fail(const char* format, ...) {
    char text[512], place[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const Thread& me = *machine().current;
    snprintf(place, sizeof place, " [thread (%u,%u,%u) of block (%u,%u,%u)]", me.thread_index.x,
             me.thread_index.y, me.thread_index.z, me.block_index.x, me.block_index.y, me.block_index.z);
    machine().error = std::string(text) + place;
    to_scheduler();
    abort();
}

void trap(const char* what, Site site) { fail("%s at %s:%d", what, site.file, site.line); }

void explicit_access(const void* address, size_t bytes, Access kind) {
    check_access(address, bytes, kind, __builtin_return_address(0));
}

void thread_fence() { fence(); }

static void thread_main() {
    Machine& m = machine();
    m.kernel->call(m.arguments);
    Thread& me = *m.current;
    if (!me.open_copies.empty() || !me.copy_groups.empty())
        fail("cp.async: the thread exits with copies that were never waited for");
    me.state = State::finished;
    --m.unfinished;
    to_scheduler();
    abort();
}

static Index3 unflatten(unsigned i, Index3 size) {
    return {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
}

static void start_threads(Index3 block_index, Index3 block, Index3 grid) {
    Machine& m = machine();
    m.barrier.arrived = 0;
    m.unfinished = m.thread_count;
    for (Warp& warp : m.warps) warp.arrived = 0, warp.epoch = 0;
    u8* const all = stacks(kMaxThreads);
    for (unsigned i = 0; i < m.thread_count; ++i) {
        Thread& thread = m.threads[i];
        static_cast<Builtins&>(thread) = {unflatten(i, block), block_index, block, grid};
        thread.index = i, thread.warp = i / kLanes, thread.lane = i % kLanes;
        thread.state = State::ready;
        thread.stack = all + i * kStackBytes;
        thread.stack_pointer = fresh_stack(thread.stack, &thread_main);
        thread.open_copies.clear();
        thread.copy_groups.clear();
    }
}

static void report_deadlock() {
    Machine& m = machine();
    unsigned at_barrier = 0, in_collective = 0;
    const Thread* first = nullptr;
    for (unsigned i = 0; i < m.thread_count; ++i) {
        const Thread& thread = m.threads[i];
        at_barrier += thread.state == State::at_barrier;
        in_collective += thread.state == State::in_collective;
        if (first == nullptr && thread.state != State::finished) first = &thread;
    }
    char text[512];
    snprintf(
        text, sizeof text,
        "deadlock in block (%u,%u,%u): %u threads at a barrier, %u in a collective, %u have exited; thread "
        "%u waits at %s:%d",
        first->block_index.x, first->block_index.y, first->block_index.z, at_barrier, in_collective,
        m.thread_count - m.unfinished, first->index, first->waits_at.file, first->waits_at.line);
    m.error = text;
}

static std::vector<unsigned> ordered_indices(unsigned count) {
    Machine& m = machine();
    std::vector<unsigned> indices(count);
    std::iota(indices.begin(), indices.end(), 0u);
    if (m.order == Order::reverse) std::reverse(indices.begin(), indices.end());
    if (m.order == Order::random) std::shuffle(indices.begin(), indices.end(), m.random);
    return indices;
}

// Lets every ready thread run once; false when none was ready or one failed.
static bool run_ready_threads(std::vector<unsigned>& order) {
    Machine& m = machine();
    bool progress = false;
    if (m.order == Order::random) std::shuffle(order.begin(), order.end(), m.random);
    for (const unsigned i : order) {
        if (m.threads[i].state != State::ready) continue;
        progress = true;
        m.current = &m.threads[i];
        builtins = m.current;
        strata_emu_switch(&m.scheduler_stack, m.current->stack_pointer);
        m.current = nullptr;
        if (m.error.empty() && overflowed(m.threads[i].stack)) m.error = "a thread needs more than its stack";
        if (!m.error.empty()) return false;
    }
    if (!progress) report_deadlock();
    return progress;
}

static bool refuse(const std::string& why) {
    machine().error = why;
    return false;
}

static bool accept(const std::string& name, Index3 block, size_t shared_bytes, int argument_count) {
    Machine& m = machine();
    const auto found = m.kernels.find(name);
    if (found == m.kernels.end()) return refuse("launch: there is no kernel '" + name + "'");
    m.kernel = &found->second;
    if (m.kernel->arguments != argument_count)
        return refuse("launch: '" + name + "' takes " + std::to_string(m.kernel->arguments) +
                      " arguments, not " + std::to_string(argument_count));
    m.thread_count = block.x * block.y * block.z;
    if (m.thread_count == 0 || m.thread_count > kMaxThreads || m.thread_count % kLanes != 0)
        return refuse("launch: " + std::to_string(m.thread_count) +
                      " threads are no number of full warps up to 1024");
    if (shared_bytes > kMaxShared)
        return refuse("launch: " + std::to_string(shared_bytes) + " bytes of shared memory, at most " +
                      std::to_string(kMaxShared));
    return true;
}

bool launch(const std::string& name, Index3 grid, Index3 block, size_t shared_bytes, void** arguments,
            int argument_count) {
    Machine& m = machine();
    m.error.clear();
    if (!accept(name, block, shared_bytes, argument_count)) return false;
    m.arguments = arguments;
    begin_launch(shared_bytes);
    for (const unsigned index : ordered_indices(grid.x * grid.y * grid.z)) {
        begin_block();
        start_threads(unflatten(index, grid), block, grid);
        std::vector<unsigned> order = ordered_indices(m.thread_count);
        while (m.unfinished > 0)
            if (!run_ready_threads(order)) return false;
    }
    return true;
}

}  // namespace strata::emu
