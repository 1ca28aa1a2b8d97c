// Which experts a launch computes, for which tokens, and where their records lie.
#pragma once

#include "tile.cuh"

// A pair is one token routed to one expert. Pairs are grouped by expert: those of the launch's expert e are
// first_pair[e] .. first_pair[e + 1]. records[e] is the address of the expert's record in its slot.
struct ExpertTable {
    const u64* records;
    const int* first_pair;

    METHOD const u8* record() const { return reinterpret_cast<const u8*>(records[blockIdx.y]); }
    METHOD int begin() const { return first_pair[blockIdx.y]; }
    METHOD int end() const { return first_pair[blockIdx.y + 1]; }
};
