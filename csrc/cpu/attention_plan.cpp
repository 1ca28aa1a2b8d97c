#include "cpu/attention_plan.h"

#include <algorithm>

namespace strata::cpu {
namespace {

size_t pieces(size_t n, size_t size) { return (n + size - 1) / size; }

size_t splits(const QueryTile& tile) { return pieces(tile.end - tile.begin, kSplitTokens); }

QueryTile make_tile(const AttentionArgs& args, const SequenceView& sequence, size_t first_row, size_t rows) {
    QueryTile tile{};
    tile.sequence = &sequence;
    tile.first_row = first_row;
    tile.rows = std::min(rows, sequence.count - first_row);
    const size_t first = sequence.start + first_row;  // position of the tile's first row
    const size_t oldest = args.window && first + 1 > args.window ? first + 1 - args.window : 0;
    tile.begin = oldest / kSplitTokens * kSplitTokens;
    tile.end = first + tile.rows;
    return tile;
}

// All tiles; a sequence's last rows first: they see most, and what takes longest should begin first.
size_t make_tiles(const AttentionArgs& args, const KvLayer& cache, const SequenceView* sequences,
                  size_t count, QueryTile* tiles) {
    const size_t group = args.heads / cache.kv_heads, heads = std::min<size_t>(group, kTileQueries);
    const size_t rows = kTileQueries / heads;
    size_t made = 0;
    for (size_t s = 0; s < count; ++s)
        for (size_t piece = pieces(sequences[s].count, rows); piece-- > 0;)
            for (size_t head = 0; head < args.heads;) {
                QueryTile& tile = tiles[made++] = make_tile(args, sequences[s], piece * rows, rows);
                tile.kv_head = head / group;
                tile.first_head = head;
                tile.heads = std::min(heads, (tile.kv_head + 1) * group - head);
                head += tile.heads;
            }
    return made;
}

size_t most_tiles(const AttentionArgs& args, const KvLayer& cache, const SequenceView* sequences,
                  size_t count) {
    const size_t group = args.heads / cache.kv_heads, heads = std::min<size_t>(group, kTileQueries);
    size_t tiles = 0;
    for (size_t s = 0; s < count; ++s) tiles += pieces(sequences[s].count, kTileQueries / heads);
    return tiles * cache.kv_heads * pieces(group, heads);
}

}  // namespace

AttentionPlan plan_attention(Arena& arena, const AttentionArgs& args, const KvLayer& cache,
                             const SequenceView* sequences, size_t count, size_t workers) {
    QueryTile* tiles = arena.take<QueryTile>(most_tiles(args, cache, sequences, count));
    const size_t tile_count = make_tiles(args, cache, sequences, count, tiles);
    AttentionPlan plan{};
    for (size_t i = 0; i < tile_count; ++i) plan.cost += tiles[i].cost();
    // A thread's share holds at least four such tiles, so that they can be spread evenly.
    const auto is_whole = [&](const QueryTile& tile) {
        return splits(tile) == 1 || tile.cost() * 4 * workers <= plan.cost;
    };
    size_t units = 0;
    for (size_t i = 0; i < tile_count; ++i) units += is_whole(tiles[i]) ? 1 : splits(tiles[i]);
    plan.units = arena.take<AttentionUnit>(units);
    for (size_t i = 0; i < tile_count; ++i)
        if (is_whole(tiles[i])) plan.units[plan.count++] = {&tiles[i], tiles[i].begin, tiles[i].end};
    plan.whole = plan.count;
    for (size_t i = 0; i < tile_count; ++i)
        for (size_t at = tiles[i].begin; !is_whole(tiles[i]) && at < tiles[i].end; at += kSplitTokens)
            plan.units[plan.count++] = {&tiles[i], at, std::min(tiles[i].end, at + kSplitTokens)};
    return plan;
}

}  // namespace strata::cpu
