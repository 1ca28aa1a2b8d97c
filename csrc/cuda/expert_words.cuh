// What a launch of routed experts for a few tokens looks up: tables of 4-byte words, one after the other,
// made by strata/backends/cuda/expert_tables.py.
#pragma once

#include "tile.cuh"

constexpr int kNearWords = 256;

// Tables that fit come with the launch itself: no kernel has to bring them, and nothing is read over the bus.
struct NearWords {
    u32 at[kNearWords];
};

// A pair is one token routed to one expert; pairs are numbered expert by expert. The tables: addresses of the
// experts' records (two words each), first_pair of each expert and of one behind the last, token_of_pair;
// then for the sum pairs_of_token (a token's pairs in ascending order of their experts), the router's weight
// of each of these, first_of_token. far: the words in global memory, or null, and they are `near`.
struct ExpertWords {
    const u32* far;
    const NearWords& near;

    METHOD u32 word(int i) const { return far != nullptr ? far[i] : near.at[i]; }
    METHOD int number(int i) const { return static_cast<int>(word(i)); }
    METHOD const u8* record() const {
        const int place = 2 * blockIdx.y;
        return reinterpret_cast<const u8*>(static_cast<u64>(word(place + 1)) << 32 | word(place));
    }
    METHOD int first_pair(int expert) const { return number(2 * experts() + expert); }
    METHOD int begin() const { return first_pair(blockIdx.y); }
    METHOD int end() const { return first_pair(blockIdx.y + 1); }
    METHOD int pairs() const { return first_pair(experts()); }
    METHOD int token_of_pair(int pair) const { return number(3 * experts() + 1 + pair); }
    METHOD int pair_of_token(int i) const { return number(3 * experts() + 1 + pairs() + i); }
    METHOD float weight(int i) const { return __uint_as_float(word(3 * experts() + 1 + 2 * pairs() + i)); }
    METHOD int first_of_token(int token) const { return number(3 * experts() + 1 + 3 * pairs() + token); }

  private:
    DEVICE int experts() { return gridDim.y; }
};
