// Which experts a launch computes, for which tokens, and where their records lie.
#pragma once

#include "tile.cuh"

// A pair is one token routed to one expert. Pairs are grouped by expert: those of the launch's expert e are
// first_pair[e] .. first_pair[e + 1]. places[e] is where the expert's record lies in the device region,
// in units of 256 bytes: slots of any size.
struct ExpertTable {
    const u8* region;
    const int* places;
    const int* first_pair;

    METHOD const u8* record() const { return region + static_cast<size_t>(places[blockIdx.y]) * 256; }
    METHOD int begin() const { return first_pair[blockIdx.y]; }
    METHOD int end() const { return first_pair[blockIdx.y + 1]; }
};
