#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "cpu/attention_plan.h"

namespace strata::cpu {
namespace {

// Floats of splits' results at one time, 16 MB: a deep decode of DeepSeek (128 heads of 512 elements) has
// 1 GB of them per million tokens.
constexpr size_t kPartFloats = size_t{4} << 20;
// Below this many multiply-adds one thread is done before others are awake.
constexpr size_t kSerialMacs = 65536;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Softmax of a tile's queries over some of their tokens: largest score, sum of weights, weighted values.
struct State {
    float top[kTileQueries], sum[kTileQueries];
    float* values;
};

// What a thread works with, for all its units.
struct Scratch {
    AttentionTile tile;
    KvBlock blocks[2];
    State so_far, part;
    uint8_t* turned;  // a block's values where only keys are stored
};

KvShape shape_of(const KvLayer& cache) {
    KvShape shape{};
    shape.key_steps = static_cast<int>(cache.stored_key_dim() / cache.per_lane());
    shape.value_chunks = static_cast<int>(cache.stored_value_dim() / kLanes);
    shape.value_chunk_bytes =
        cache.value_in_key ? kBlockTokens / cache.per_lane() * kChunkBytes : cache.value_chunk_bytes();
    shape.octets_apart = cache.key_lanes() == kOctet;
    shape.key_groups = static_cast<int>(cache.groups(cache.key_dim));
    shape.value_groups = static_cast<int>(cache.groups(cache.value_dim));
    const bool one = cache.type != KvType::int8_groups;
    shape.group_steps = one ? shape.key_steps : static_cast<int>(cache.group / cache.per_lane());
    shape.group_chunks = one ? shape.value_chunks : static_cast<int>(cache.group / kLanes);
    shape.scale_stride = cache.page_tokens;
    return shape;
}

// The op's arguments and what follows from them.
struct Op {
    const AttentionArgs& args;
    const KvLayer& cache;
    const AttentionFns& fns;
    const float* q;
    float* out;
    size_t dim = cache.stored_value_dim();
    size_t query_stride = (cache.key_dim + kLanes - 1) / kLanes * kLanes;
    KvShape shape = shape_of(cache);
    size_t groups = cache.coded() ? std::max(shape.key_groups, shape.value_groups) : 0;
};

void take_state(Arena& arena, const Op& op, State& state) {
    state.values = arena.take<float>(kTileQueries * op.dim);
}

void take_scratch(Arena& arena, const Op& op, Scratch& scratch) {
    scratch.tile.x = arena.take<float>(kTileQueries * op.query_stride);
    scratch.tile.query_stride = op.query_stride;
    scratch.tile.groups = op.groups ? arena.take<ScaleGroup>(op.groups) : nullptr;
    take_state(arena, op, scratch.so_far);
    take_state(arena, op, scratch.part);
    scratch.turned =
        op.cache.value_in_key ? arena.take<uint8_t>(op.dim * kBlockTokens * sizeof(float)) : nullptr;
}

void locate_octet(const Op& op, uint8_t* page, size_t head, size_t slot, int octet, uint8_t* turned,
                  KvBlock& block) {
    const KvLayer& cache = op.cache;
    const size_t chunks = kOctet / cache.per_lane();
    block.keys[octet] = cache.keys(page, head) + cache.key_offset(slot);
    block.values[octet] = turned != nullptr ? turned + octet * chunks * kChunkBytes
                                            : cache.values(page, head) + slot / kOctet * chunks * kChunkBytes;
    if (!cache.coded()) return;
    if (cache.per_tensor) {
        block.key_scales[octet] = cache.steps->keys;
        block.value_scales[octet] = cache.value_in_key ? cache.steps->keys : cache.steps->values;
        return;
    }
    block.key_scales[octet] = cache.key_scales(page, head) + slot;
    block.value_scales[octet] =
        turned != nullptr ? block.key_scales[octet] : cache.value_scales(page, head) + slot;
}

// Addresses of a block's tokens, [first, end) at most; octets beyond repeat the first one's.
void locate(const Op& op, const QueryTile& tile, size_t first, uint8_t* turned, KvBlock& block) {
    block.tokens = static_cast<int>(std::min<size_t>(kBlockTokens, tile.end - first));
    size_t index = first / op.cache.page_tokens, slot = first % op.cache.page_tokens;
    int octet = 0;
    for (; octet * kOctet < block.tokens; ++octet, slot += kOctet) {
        if (slot == op.cache.page_tokens) {
            ++index;
            slot = 0;
        }
        uint8_t* page = op.cache.block(static_cast<size_t>(tile.sequence->pages[index]));
        locate_octet(op, page, tile.kv_head, slot, octet, turned, block);
    }
    for (; octet < kOctets; ++octet) {
        block.keys[octet] = block.keys[0];
        block.values[octet] = block.values[0];
        block.key_scales[octet] = block.key_scales[0];
        block.value_scales[octet] = block.value_scales[0];
    }
}

// What each query sees of the block of `tokens` tokens that begins with token `first`.
void set_visible(const Op& op, const QueryTile& tile, size_t first, AttentionTile& queries) {
    for (size_t row = 0; row < tile.rows; ++row) {
        const size_t stop = tile.sequence->start + tile.first_row + row + 1;
        const size_t start = op.args.window && stop > op.args.window ? stop - op.args.window : 0;
        const auto inside = [&](size_t token) {
            return static_cast<int>(token < first ? 0 : std::min<size_t>(token - first, kBlockTokens));
        };
        for (size_t i = row * tile.heads; i < (row + 1) * tile.heads; ++i) {
            queries.begin[i] = inside(start);
            queries.end[i] = inside(stop);
        }
    }
}

void prepare(const Op& op, const QueryTile& tile, AttentionTile& queries) {
    const size_t dim = op.cache.key_dim;
    queries.queries = static_cast<int>(tile.queries());
    for (int i = 0; i < queries.queries; ++i) {
        const size_t row = tile.sequence->first_row + tile.first_row + i / tile.heads;
        const size_t head = tile.first_head + i % tile.heads;
        op.fns.prepare(op.shape, op.q + (row * op.args.heads + head) * dim, static_cast<int>(dim),
                       op.args.scale, i, queries);
    }
}

// The tile's softmax over the split [begin, end). Reads up to the split's end; then fetches begin with
// `next`.
void absorb(const Op& op, const QueryTile& tile, size_t begin, size_t end, const AttentionUnit* next,
            Scratch& scratch, State& result) {
    AttentionTile& queries = scratch.tile;
    queries.values = result.values;
    std::fill_n(queries.top, queries.queries, kMinusInfinity);
    std::fill_n(queries.sums[0], queries.queries * kLanes, 0.0f);
    std::fill_n(queries.values, queries.queries * op.dim, 0.0f);
    KvBlock *block = &scratch.blocks[0], *ahead = &scratch.blocks[1];
    locate(op, tile, begin, scratch.turned, *block);
    for (size_t first = begin; first < end; first += kBlockTokens, std::swap(block, ahead)) {
        if (first + kBlockTokens < end)
            locate(op, tile, first + kBlockTokens, scratch.turned, *ahead);
        else if (next != nullptr)
            locate(op, *next->tile, next->begin, scratch.turned, *ahead);
        else
            *ahead = *block;
        set_visible(op, tile, first, queries);
        if (scratch.turned != nullptr) op.fns.values_of_keys(op.shape, *block, scratch.turned);
        op.fns.attend(op.shape, *block, *ahead, queries);
    }
    for (int i = 0; i < queries.queries; ++i) {
        result.top[i] = queries.top[i];
        result.sum[i] = std::accumulate(queries.sums[i], queries.sums[i] + kLanes, 0.0f);
    }
}

// Joins what comes after `into` to it.
void join(const Op& op, size_t query, const State& part, State& into) {
    if (part.sum[query] == 0.0f) return;  // none of its tokens was seen
    const float top = std::max(into.top[query], part.top[query]);
    const float old_share = std::exp(into.top[query] - top), share = std::exp(part.top[query] - top);
    float* sums = into.values + query * op.dim;
    const float* values = part.values + query * op.dim;
    for (size_t d = 0; d < op.dim; ++d) sums[d] = sums[d] * old_share + values[d] * share;
    into.sum[query] = into.sum[query] * old_share + part.sum[query] * share;
    into.top[query] = top;
}

void finish(const Op& op, const QueryTile& tile, size_t query, const State& state) {
    const size_t row = tile.sequence->first_row + tile.first_row + query / tile.heads;
    const size_t head = tile.first_head + query % tile.heads;
    float share = 1.0f, total = state.sum[query];
    if (op.args.sinks != nullptr) {
        const float sink = op.args.sinks[head], top = std::max(state.top[query], sink);
        share = std::exp(state.top[query] - top);
        total = total * share + std::exp(sink - top);
    }
    const float factor = share / total;
    float* out = op.out + (row * op.args.heads + head) * op.cache.value_dim;
    for (size_t d = 0; d < op.cache.value_dim; ++d) out[d] = state.values[query * op.dim + d] * factor;
}

void run_whole(const Op& op, const AttentionUnit& unit, const AttentionUnit* next, Scratch& scratch) {
    const QueryTile& tile = *unit.tile;
    prepare(op, tile, scratch.tile);
    for (size_t begin = unit.begin; begin < unit.end; begin += kSplitTokens) {
        const size_t end = std::min(unit.end, begin + kSplitTokens);
        const AttentionUnit rest{&tile, end, unit.end};
        State& result = begin == unit.begin ? scratch.so_far : scratch.part;
        absorb(op, tile, begin, end, end < unit.end ? &rest : next, scratch, result);
        for (size_t i = 0; begin != unit.begin && i < tile.queries(); ++i)
            join(op, i, scratch.part, scratch.so_far);
    }
    for (size_t i = 0; i < tile.queries(); ++i) finish(op, tile, i, scratch.so_far);
}

// Units [first, last) of a plan. The results of splits lie in `parts`, those of a tile that is cut by the end
// of the wave go on through `carried`.
struct Wave {
    const AttentionUnit* units;
    size_t first, last, first_part;
    State* parts;
    const State* carried_in;
    State* carried_out;
    std::atomic<size_t> next;
};

void run_unit(const Op& op, Wave& wave, size_t unit, const AttentionUnit* following, Scratch& scratch) {
    const AttentionUnit& mine = wave.units[unit];
    if (unit < wave.first_part) return run_whole(op, mine, following, scratch);
    prepare(op, *mine.tile, scratch.tile);
    absorb(op, *mine.tile, mine.begin, mine.end, following, scratch, wave.parts[unit - wave.first_part]);
}

// Units one by one. While there are many, a thread takes its next one beforehand, and its first lines are
// fetched in time; the last ones are left to whoever is free: of two units on two threads each takes one.
void run_units(const Op& op, Wave& wave, size_t workers, Scratch& scratch) {
    constexpr size_t kMany = 4;
    for (size_t unit = wave.next.fetch_add(1), next; unit < wave.last; unit = next) {
        const bool many = unit + kMany * workers < wave.last;
        next = many ? wave.next.fetch_add(1) : wave.last;
        run_unit(op, wave, unit, next < wave.last ? &wave.units[next] : nullptr, scratch);
        if (!many) next = wave.next.fetch_add(1);
    }
}

void copy(const Op& op, size_t query, const State& from, State& to) {
    to.top[query] = from.top[query];
    to.sum[query] = from.sum[query];
    std::copy_n(from.values + query * op.dim, op.dim, to.values + query * op.dim);
}

// One query of a tile whose splits in this wave are units [begin, end).
void join_splits(const Op& op, const Wave& wave, size_t begin, size_t end, size_t query, State& so_far) {
    const QueryTile& tile = *wave.units[begin].tile;
    const State* parts = wave.parts + (begin - wave.first_part);
    const bool carried = wave.units[begin].begin != tile.begin;
    copy(op, query, carried ? *wave.carried_in : parts[0], so_far);
    for (size_t i = carried ? 0 : 1; i < end - begin; ++i) join(op, query, parts[i], so_far);
    if (wave.units[end - 1].end == tile.end)
        finish(op, tile, query, so_far);
    else
        copy(op, query, so_far, *wave.carried_out);
}

// Every worker takes its share of the queries of all tiles that were split.
void join_wave(const Op& op, const Wave& wave, size_t worker, size_t workers, State& so_far) {
    size_t turn = 0;
    for (size_t begin = wave.first_part, end; begin < wave.last; begin = end) {
        const QueryTile* tile = wave.units[begin].tile;
        for (end = begin + 1; end < wave.last && wave.units[end].tile == tile;) ++end;
        for (size_t query = 0; query < tile->queries(); ++query)
            if (turn++ % workers == worker) join_splits(op, wave, begin, end, query, so_far);
    }
}

void run_wave(Cpu& cpu, const Op& op, Wave& wave, Scratch* scratch, bool serial) {
    if (serial) {
        run_units(op, wave, 1, scratch[0]);
        return join_wave(op, wave, 0, 1, scratch[0].so_far);
    }
    cpu.pool.run([&](int worker) {
        run_units(op, wave, cpu.pool.size(), scratch[worker]);
        if (wave.first_part == wave.last) return;
        cpu.pool.barrier();
        join_wave(op, wave, worker, cpu.pool.size(), scratch[worker].so_far);
    });
}

}  // namespace

void attention(Cpu& cpu, const AttentionArgs& args, const KvLayer& cache, const SequenceView* sequences,
               size_t count, const float* q, float* out) {
    const Op op{args, cache, cpu.kernels.attention[static_cast<int>(cache.type)], q, out};
    const size_t workers = cpu.pool.size(), mark = cpu.arena.mark();
    const AttentionPlan plan = plan_attention(cpu.arena, args, cache, sequences, count, workers);
    const bool serial = workers == 1 || plan.cost * (cache.key_dim + cache.value_dim) <= kSerialMacs;
    Scratch* scratch = cpu.arena.take<Scratch>(serial ? 1 : workers);
    for (size_t i = 0; i < (serial ? 1 : workers); ++i) take_scratch(cpu.arena, op, scratch[i]);
    const size_t room =
        std::min(std::max<size_t>(1, kPartFloats / (kTileQueries * op.dim)), plan.count - plan.whole);
    State* parts = cpu.arena.take<State>(room + 2);
    for (size_t i = 0; room > 0 && i < room + 2; ++i) take_state(cpu.arena, op, parts[i]);
    State *carried_in = &parts[room], *carried_out = &parts[room + 1];
    for (size_t first = 0, last; first < plan.count; first = last) {
        const size_t first_part = std::max(first, plan.whole);
        last = std::min(plan.count, first_part + room);
        Wave wave{plan.units, first, last, first_part, parts, carried_in, carried_out, {first}};
        run_wave(cpu, op, wave, scratch, serial);
        std::swap(carried_in, carried_out);
    }
    cpu.arena.rewind(mark);
}

}  // namespace strata::cpu
