// Of several blocks that make parts of something, the last one to finish does what needs all of them.
#pragma once

#include "device.cuh"

// Whether this block is the last of `blocks` that count in the ticket: the same in all threads, none of which
// may have returned. Its threads may then read what all of these blocks wrote before (not by load_once, which
// may answer from a stale line). The ticket is 0 before the launch and is left so.
DEVICE bool last_of(u32* ticket, int blocks) {
    const u32 all = static_cast<u32>(blocks) - 1;
    int last = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what the block wrote is seen by whoever sees the ticket
        last = atomicInc(ticket, all) == all;
        __threadfence();  // and what others wrote by this block
    }
    return __syncthreads_or(last) != 0;
}
