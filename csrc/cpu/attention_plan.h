// How the attention of a batch is cut into work for threads.
//
// A tile is up to 32 query vectors that read the same KV head. Its tokens fall into splits of fixed places,
// whose results are joined in order: the same sums whoever computes them. A tile that is a small part of the
// whole stays with one thread; the splits of a large one (a deep decode) are spread.
#pragma once

#include <cstddef>

#include "cpu/arena.h"
#include "cpu/attention.h"

namespace strata::cpu {

constexpr size_t kSplitTokens = 256;

struct QueryTile {
    const SequenceView* sequence;
    size_t first_row, rows;  // of the sequence
    size_t kv_head;
    size_t first_head, heads;  // query heads of every row
    size_t begin, end;         // tokens that any of the rows sees; begin is the start of a split

    size_t queries() const { return rows * heads; }
    size_t cost() const { return queries() * (end - begin); }
};

// What one thread does at a time: all tokens of a tile, or one split of it.
struct AttentionUnit {
    const QueryTile* tile;
    size_t begin, end;
};

struct AttentionPlan {
    AttentionUnit* units;
    size_t whole;  // units [0, whole) are whole tiles; then come splits, those of a tile in order
    size_t count;
    size_t cost;  // queries times tokens
};

// Lives in the arena.
AttentionPlan plan_attention(Arena& arena, const AttentionArgs& args, const KvLayer& cache,
                             const SequenceView* sequences, size_t count, size_t workers);

}  // namespace strata::cpu
