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

// A step's sequences and how their queries are cut: `heads` query heads of at most `rows` rows are a tile.
struct Cut {
    const AttentionArgs& args;
    const KvLayer& cache;
    const SequenceView* sequences;
    size_t count;
    size_t group = args.heads / cache.kv_heads, heads = std::min<size_t>(group, kTileQueries);
    size_t rows = kTileQueries / heads;

    size_t tiles() const {
        size_t found = 0;
        for (size_t s = 0; s < count; ++s) found += pieces(sequences[s].count, rows);
        return found * cache.kv_heads * pieces(group, heads);
    }
};

// Tiles as large as can be, unless some threads would then wait for others: three heads of one draft on two
// threads are better cut into six tiles. Where there are more than a few tiles for every thread, they spread.
size_t rows_of_tile(Cut cut, size_t workers) {
    constexpr size_t kEnough = 4, kLeastQueries = 8;
    size_t longest = 1;
    for (size_t s = 0; s < cut.count; ++s) longest = std::max(longest, cut.sequences[s].count);
    size_t best = cut.rows = std::min(cut.rows, longest);
    if (cut.tiles() >= kEnough * workers) return best;
    size_t least = pieces(cut.tiles(), workers) * best;  // rows that one thread goes through
    while (--cut.rows * cut.heads >= kLeastQueries) {
        const size_t turns = pieces(cut.tiles(), workers) * cut.rows;
        if (8 * turns > 7 * least) continue;
        best = cut.rows;
        least = turns;
    }
    return best;
}

// All tiles; a sequence's last rows first: they see most, and what takes longest should begin first.
size_t make_tiles(const Cut& cut, QueryTile* tiles) {
    size_t made = 0;
    for (size_t s = 0; s < cut.count; ++s)
        for (size_t piece = pieces(cut.sequences[s].count, cut.rows); piece-- > 0;)
            for (size_t head = 0; head < cut.args.heads;) {
                QueryTile& tile = tiles[made++] =
                    make_tile(cut.args, cut.sequences[s], piece * cut.rows, cut.rows);
                tile.kv_head = head / cut.group;
                tile.first_head = head;
                tile.heads = std::min(cut.heads, (tile.kv_head + 1) * cut.group - head);
                head += tile.heads;
            }
    return made;
}

}  // namespace

AttentionPlan plan_attention(Arena& arena, const AttentionArgs& args, const KvLayer& cache,
                             const SequenceView* sequences, size_t count, size_t workers) {
    Cut cut{args, cache, sequences, count};
    cut.rows = rows_of_tile(cut, workers);
    QueryTile* tiles = arena.take<QueryTile>(cut.tiles());
    const size_t tile_count = make_tiles(cut, tiles);
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
