// Barriers of a block and collectives of a warp. A collective needs all 32 lanes at one place in the code.
#include "emu/machine.h"
#include "emu/memory_check.h"

namespace strata::emu {

static bool same(Site a, Site b) { return a.file == b.file && a.line == b.line; }

static void open_barrier(int predicate) {
    Machine& m = machine();
    next_epoch();
    m.barrier.arrived = 0;
    for (unsigned i = 0; i < m.thread_count; ++i) {
        Thread& thread = m.threads[i];
        if (thread.state == State::at_barrier) thread.state = State::ready;
        memcpy(thread.result, &predicate, sizeof predicate);
    }
}

int block_barrier(Barrier kind, int predicate, Site site) {
    Machine& m = machine();
    BlockBarrier& b = m.barrier;
    if (b.arrived == 0)
        b.kind = kind, b.site = site, b.predicate = kind == Barrier::all;
    else if (b.kind != kind || !same(b.site, site))
        fail("divergent barrier: %s:%d while others wait at %s:%d", site.file, site.line, b.site.file,
             b.site.line);
    if (kind == Barrier::any) b.predicate |= predicate != 0;
    if (kind == Barrier::all) b.predicate &= predicate != 0;
    Thread& me = *m.current;
    if (++b.arrived == m.thread_count)
        open_barrier(b.predicate);
    else
        wait_as(State::at_barrier, site);
    int combined;
    memcpy(&combined, me.result, sizeof combined);
    return combined;
}

static void shuffle_values(const Warp& warp, Thread* lanes) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        u64 in[2];
        memcpy(in, warp.in[lane], 16);
        const int argument = static_cast<int>(in[1]), own = static_cast<int>(lane);
        int source = argument & 31;
        if (warp.mode == Shuffle::bits) source = own ^ argument;
        if (warp.mode == Shuffle::up) source = own - argument;
        if (warp.mode == Shuffle::down) source = own + argument;
        if (source < 0 || source > 31) source = own;
        memcpy(lanes[lane].result, warp.in[source], 8);
    }
}

static void count_votes(const Warp& warp, Thread* lanes) {
    u32 votes = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        int predicate;
        memcpy(&predicate, warp.in[lane], 4);
        votes |= static_cast<u32>(predicate != 0) << lane;
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) memcpy(lanes[lane].result, &votes, 4);
}

static void execute(Warp& warp, Thread* lanes) {
    switch (warp.op) {
        case Collective::sync:
            ++warp.epoch;
            break;
        case Collective::shuffle:
            shuffle_values(warp, lanes);
            break;
        case Collective::ballot:
            count_votes(warp, lanes);
            break;
        case Collective::ldmatrix:
            load_matrices(warp, lanes);
            break;
        case Collective::movmatrix:
            transpose_matrix(warp, lanes);
            break;
        default:
            multiply_matrices(warp, lanes);
    }
}

void warp_collective(Collective op, u32 mask, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     Shuffle mode, Site site) {
    Thread& me = *machine().current;
    Warp& warp = machine().warps[me.warp];
    if (mask != ~0u)
        fail("collective: mask %08x at %s:%d, only full warps are supported", mask, site.file, site.line);
    if (warp.arrived == 0)
        warp.op = op, warp.mode = mode, warp.site = site;
    else if (warp.op != op || warp.mode != mode || !same(warp.site, site))
        fail("divergent collective: %s:%d while other lanes wait at %s:%d", site.file, site.line,
             warp.site.file, warp.site.line);
    if (in_bytes) memcpy(warp.in[me.lane], in, in_bytes);
    warp.arrived |= 1u << me.lane;
    if (warp.arrived == ~0u) {
        Thread* const lanes = &me - me.lane;
        warp.arrived = 0;
        execute(warp, lanes);
        for (unsigned lane = 0; lane < kLanes; ++lane)
            if (lane != me.lane) lanes[lane].state = State::ready;
    } else {
        wait_as(State::in_collective, site);
    }
    if (out_bytes) memcpy(out, me.result, out_bytes);
}

}  // namespace strata::emu
