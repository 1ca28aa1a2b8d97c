#include "cpu/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/activations.h"
#include "cpu/weight_path.h"

namespace strata::cpu {
namespace {

constexpr int kHalf = kRowBlock / 2;            // hidden columns that a gate_up block makes
constexpr int kUnitBlocks = kUnitCols / kHalf;  // gate_up blocks that make a unit of down's columns

// A slice of an expert and where its hidden activations stand: rows [first_row, first_row + count).
struct Slot {
    const ExpertWork* work;
    const FfnSlice* slice;
    int64_t first_row;

    TokenTiles tiles(int most) const { return TokenTiles(work->count, most); }
    // The rows of the hidden activations that tile `index` is.
    Range rows(const TokenTiles& tiles, int index) const {
        const Range tile = tiles.at(index);
        return {first_row + tile.begin, first_row + tile.end};
    }
};

// Slots stand team after team, each team's expert after expert. Sums are made in the order of experts and
// their slices, whoever computes them.
struct SlotOrder {
    int experts, slices, teams, copies;

    int team_slices() const { return slices / teams; }
    int team_slots() const { return experts * team_slices(); }
    // Where slice i of expert e stands.
    int at(int e, int i) const {
        return i / team_slices() * team_slots() + e * team_slices() + i % team_slices();
    }
};

// What all workers share during one call.
struct Shared {
    Cpu& cpu;
    const Slot* slots;
    int slot_count;
    int64_t hidden_rows;          // over all slots
    int tile;                     // most tokens of one sweep
    const Activations& inputs;    // row t is the panel of token t
    const Activations& gathered;  // `tile` rows for each worker
    const Activations& middles;   // a panel for each tile of each slot
    // Workers take whole units of down's columns and quantize them at once; else the gated values wait in
    // `hidden`, f32 [hidden_rows][hidden_stride], until all are there.
    bool whole_units;
    float* hidden;
    int hidden_stride;
    // Null, or f32 [hidden_rows][width]: what down made of every row, where workers take parts of all slots'
    // row blocks together and y is summed afterwards (spread_down).
    float* products;
    const Gating& gating;
    const float* x;
    int tokens, width;  // width: of the model
    float* y;
    bool apart;  // y has a row for each row of `middles`, not for each token
    SlotOrder order;

    const Matrix& gate_up() const { return slots[0].slice->gate_up; }
    const Matrix& down() const { return slots[0].slice->down; }
    // Slot n in the order of sums.
    const Slot& summed(int n) const { return slots[order.at(n / order.slices, n % order.slices)]; }
    // Those who share out slots among them, as far as slots are dealt to teams.
    Team team_of(int worker) const {
        return order.teams > 1 ? cpu.teams.of(worker) : Team{0, 0, cpu.pool.size()};
    }
};

// Work of one block with m tokens relative to reading it: measured for w4g64 in the prototypes.
double block_cost(int tokens) { return 1.0 + 0.35 * tokens; }

// First block of worker `worker` of `workers`, counted over `count` slots, which have `blocks` each; blocks
// are weighted by cost. Within a slot the point is a multiple of `step`.
int64_t split_point(const Slot* slots, int count, int64_t blocks, int64_t step, int worker, int workers) {
    // Not left to the sums below: they round, and the last block of all would be nobody's.
    if (worker == workers) return count * blocks;
    double total = 0;
    for (int i = 0; i < count; i++) total += blocks * block_cost(slots[i].work->count);
    double left = total * worker / workers;
    for (int i = 0; i < count; i++) {
        const double cost = block_cost(slots[i].work->count);
        if (left < blocks * cost)
            return i * blocks + std::min<int64_t>(blocks, std::llround(left / cost / step) * step);
        left -= blocks * cost;
    }
    return count * blocks;
}

// The part of worker `worker` in its team's slots, counted over all slots.
Range split(const Shared& s, const Matrix& matrix, int64_t step, int worker) {
    const Team team = s.team_of(worker);
    const int count = s.order.team_slots(), first = team.index * count;
    const auto point = [&](int member) {
        return first * matrix.blocks +
               split_point(s.slots + first, count, matrix.blocks, step, member, team.size);
    };
    return {point(worker - team.first), point(worker - team.first + 1)};
}

// One thread's part of a call.
class Worker {
  public:
    Worker(const Shared& shared, int index, Stretch* room)
        : s_(shared),
          gate_up_(split(shared, shared.gate_up(), shared.whole_units ? kUnitBlocks : 1, index)),
          columns_(share(shared.down().blocks, index, shared.cpu.pool.size())),
          down_(shared.products != nullptr ? split(shared, shared.down(), 1, index) : columns_),
          copy_(std::min(shared.cpu.teams.of(index).index, shared.order.copies - 1) * shared.order.slices),
          index_(index),
          path_(room) {}

    void run();

  private:
    template <class Fn>
    void for_each_run(Range part, int64_t blocks, const Fn& fn) const;
    template <class Fn>
    void for_each_down(const Fn& fn) const;
    Ahead* plan();
    void fill_inputs();
    Panel gather(const Slot& slot, Range tile) const;
    void gate_up_run(const Slot& slot, Range tile, Range rows, Range blocks);
    void gate_up_unit(const Slot& slot, const Panel& x, Range blocks, float* h, int stride);
    void fill_middles();
    void clear_columns();
    void down_run(const Slot& slot, Range tile, Range rows, Range blocks);
    void keep_block(int64_t block, const float* z, Range rows);
    void add_columns(const Slot& slot, Range columns, const float* z, int stride, Range tile);
    void add_products();
    // The copy of a slot's weights that this worker reads.
    const FfnSlice& slice(const Slot& slot) const { return slot.slice[copy_]; }
    Range columns_of(Range blocks) const {
        return {blocks.begin * kRowBlock, std::min<int64_t>(blocks.end * kRowBlock, s_.width)};
    }

    const Shared& s_;
    const Range gate_up_;  // blocks, counted over all slots
    const Range columns_;  // of y, in row blocks of down
    const Range down_;     // row blocks of every slot or, with products, counted over all slots
    const int copy_;       // from a slice to the one that this worker reads
    const int index_;
    WeightPath path_;
    Ahead* ahead_ = nullptr;
    alignas(64) float z_[kMostBlocks * kMaxTile * kRowBlock];
    alignas(64) float h_[kMaxTile * kUnitCols];
};

// fn(slot, blocks) for every slot that `part` touches; it is counted over all slots of `blocks` each.
template <class Fn>
void Worker::for_each_run(Range part, int64_t blocks, const Fn& fn) const {
    for (int64_t at = part.begin; at < part.end;) {
        const int64_t first = at % blocks, last = std::min(blocks, first + part.end - at);
        fn(s_.slots[at / blocks], Range{first, last});
        at += last - first;
    }
}

// fn(slot, blocks) for the worker's part of down.
template <class Fn>
void Worker::for_each_down(const Fn& fn) const {
    if (s_.products != nullptr) return for_each_run(down_, s_.down().blocks, fn);
    for (int i = 0; i < s_.slot_count; i++) fn(s_.summed(i), down_);
}

Ahead* Worker::plan() {
    for_each_run(gate_up_, s_.gate_up().blocks, [&](const Slot& slot, Range blocks) {
        for (int i = 0; i < slot.tiles(s_.tile).count; i++)
            path_.add(slice(slot).gate_up, blocks.begin, blocks.end);
    });
    for_each_down([&](const Slot& slot, Range blocks) {
        for (int i = 0; i < slot.tiles(s_.tile).count; i++)
            path_.add(slice(slot).down, blocks.begin, blocks.end);
    });
    return path_.start();
}

void Worker::fill_inputs() {
    const Range mine = share(s_.tokens, index_, s_.cpu.pool.size());
    for (int64_t t = mine.begin; t < mine.end; t++)
        s_.inputs.form.fill(s_.inputs.panel({t, t + 1}), 0, s_.x + t * s_.width);
}

// The inputs of a tile of a slot's tokens as one panel.
Panel Worker::gather(const Slot& slot, Range tile) const {
    const int32_t* tokens = slot.work->tokens;
    const int count = static_cast<int>(tile.end - tile.begin);
    if (count == 1) return s_.inputs.panel({tokens[tile.begin], tokens[tile.begin] + 1});
    const int64_t first = static_cast<int64_t>(index_) * s_.tile;
    const Panel panel = s_.gathered.panel({first, first + count});
    for (int i = 0; i < count; i++) {
        const int64_t token = tokens[tile.begin + i];
        s_.inputs.form.copy(panel, i, s_.inputs.panel({token, token + 1}).at);
    }
    return panel;
}

// Blocks that make at most one unit of hidden columns: h, f32 [tokens][stride], gets the columns of the first
// of them and following.
void Worker::gate_up_unit(const Slot& slot, const Panel& x, Range blocks, float* h, int stride) {
    const Matrix& matrix = slice(slot).gate_up;
    const float* bias = slot.slice->gate_up_bias;
    for (int64_t b = blocks.begin; b < blocks.end; b += kMostBlocks) {
        const int count = static_cast<int>(std::min<int64_t>(kMostBlocks, blocks.end - b));
        s_.inputs.form.dot()(
            {&matrix, matrix.block(static_cast<int>(b)), count, x.at, x.rows, x.rows, z_, ahead_});
        for (int64_t i = b; i < b + count; i++)
            s_.cpu.kernels.gate(s_.gating, z_ + (i - b) * x.rows * kRowBlock,
                                bias != nullptr ? bias + i * kRowBlock : nullptr, x.rows,
                                h + (i - blocks.begin) * kHalf, stride);
    }
}

void Worker::gate_up_run(const Slot& slot, Range tile, Range rows, Range blocks) {
    const Panel x = gather(slot, tile), middle = s_.middles.panel(rows);
    if (!s_.whole_units)
        return gate_up_unit(slot, x, blocks, s_.hidden + rows.begin * s_.hidden_stride + blocks.begin * kHalf,
                            s_.hidden_stride);
    for (int64_t b = blocks.begin; b < blocks.end; b += kUnitBlocks) {
        const Range unit{b, std::min(blocks.end, b + kUnitBlocks)};
        gate_up_unit(slot, x, unit, h_, kUnitCols);
        const int columns = static_cast<int>(std::min<int64_t>(s_.down().cols, unit.end * kHalf) - b * kHalf);
        for (int i = 0; i < x.rows; i++)
            s_.middles.form.fill(middle, i, static_cast<int>(b / kUnitBlocks), h_ + i * kUnitCols, columns);
    }
}

void Worker::fill_middles() {
    const Range mine = share(s_.hidden_rows, index_, s_.cpu.pool.size());
    for (int i = 0; i < s_.slot_count; i++) {
        const TokenTiles tiles = s_.slots[i].tiles(s_.tile);
        for (int tile = 0; tile < tiles.count; tile++) {
            const Range rows = s_.slots[i].rows(tiles, tile);
            const Panel panel = s_.middles.panel(rows);
            for (int64_t r = std::max(rows.begin, mine.begin); r < std::min(rows.end, mine.end); r++)
                s_.middles.form.fill(panel, static_cast<int>(r - rows.begin),
                                     s_.hidden + r * s_.hidden_stride);
        }
    }
}

void Worker::clear_columns() {
    const Range columns = columns_of(columns_);
    for (int64_t t = 0, rows = s_.apart ? s_.hidden_rows : s_.tokens; t < rows; t++)
        std::fill(s_.y + t * s_.width + columns.begin, s_.y + t * s_.width + columns.end, 0.0f);
}

// y[token] += weight * (z + bias) for some output columns; z: f32 [tokens of the tile][stride].
void Worker::add_columns(const Slot& slot, Range columns, const float* z, int stride, Range tile) {
    const int first = static_cast<int>(columns.begin), count = static_cast<int>(columns.end - columns.begin);
    const float* bias = slot.slice->down_bias;
    for (int64_t t = tile.begin; t < tile.end; t++, z += stride) {
        const int64_t row = s_.apart ? slot.first_row + t : slot.work->tokens[t];
        float* y = s_.y + row * s_.width + first;
        const float weight = slot.work->weights[t];
        for (int r = 0; r < count; r++) y[r] += weight * (bias != nullptr ? z[r] + bias[first + r] : z[r]);
    }
}

void Worker::keep_block(int64_t block, const float* z, Range rows) {
    const Range columns = columns_of({block, block + 1});
    for (int64_t row = rows.begin; row < rows.end; row++, z += kRowBlock)
        std::copy_n(z, columns.end - columns.begin, s_.products + row * s_.width + columns.begin);
}

void Worker::add_products() {
    const Range columns = columns_of(columns_);
    if (columns.begin >= columns.end) return;
    for (int i = 0; i < s_.slot_count; i++) {
        const Slot& slot = s_.summed(i);
        add_columns(slot, columns, s_.products + slot.first_row * s_.width + columns.begin, s_.width,
                    {0, slot.work->count});
    }
}

void Worker::down_run(const Slot& slot, Range tile, Range rows, Range blocks) {
    const Matrix& matrix = slice(slot).down;
    const Panel x = s_.middles.panel(rows);
    for (int64_t b = blocks.begin; b < blocks.end; b += kMostBlocks) {
        const int count = static_cast<int>(std::min<int64_t>(kMostBlocks, blocks.end - b));
        s_.middles.form.dot()(
            {&matrix, matrix.block(static_cast<int>(b)), count, x.at, x.rows, x.rows, z_, ahead_});
        for (int64_t i = b; i < b + count; i++) {
            const float* z = z_ + (i - b) * x.rows * kRowBlock;
            if (s_.products != nullptr)
                keep_block(i, z, rows);
            else
                add_columns(slot, columns_of({i, i + 1}), z, kRowBlock, tile);
        }
    }
}

void Worker::run() {
    ahead_ = plan();
    fill_inputs();
    s_.cpu.pool.barrier();
    for_each_run(gate_up_, s_.gate_up().blocks, [&](const Slot& slot, Range blocks) {
        const TokenTiles tiles = slot.tiles(s_.tile);
        for (int i = 0; i < tiles.count; i++) gate_up_run(slot, tiles.at(i), slot.rows(tiles, i), blocks);
    });
    clear_columns();
    s_.cpu.pool.barrier();
    if (!s_.whole_units) {
        fill_middles();
        s_.cpu.pool.barrier();
    }
    for_each_down([&](const Slot& slot, Range blocks) {
        const TokenTiles tiles = slot.tiles(s_.tile);
        for (int i = 0; i < tiles.count; i++) down_run(slot, tiles.at(i), slot.rows(tiles, i), blocks);
    });
    if (s_.products == nullptr) return;
    s_.cpu.pool.barrier();
    add_products();
}

Slot* make_slots(Cpu& cpu, const ExpertWork* experts, const SlotOrder& order, int64_t* rows) {
    Slot* slots = cpu.arena.take<Slot>(static_cast<size_t>(order.experts) * order.slices);
    *rows = 0;
    for (int e = 0; e < order.experts; e++) {
        for (int i = 0; i < order.slices; i++) {
            slots[order.at(e, i)] = {&experts[e], &experts[e].slices[i], *rows};
            *rows += experts[e].count;
        }
    }
    return slots;
}

// Slots are dealt to the nodes' workers where every node has as many slices of every expert, and no copies.
SlotOrder order_of(const Cpu& cpu, int experts, int slices, int copies) {
    const int teams = cpu.teams.count();
    return {experts, slices, copies == 1 && slices % teams == 0 ? teams : 1, copies};
}

// Whether work is even enough when workers get whole units: the largest part exceeds the mean by 1/16 at
// most.
bool split_by_units(int slot_count, const Matrix& down, int workers) {
    return static_cast<int64_t>(slot_count) * down.units >= int64_t{16} * workers;
}

// Whether row blocks of down are to be split over all slots together: each slot's apart would leave a worker
// with over 1/16 more to read, and keeping what they make costs little, for rows are few. 40 workers and
// eight slots of 2048 rows, which is one token of Qwen3-30B-A3B: 32 row blocks at most instead of 26 of 25.6.
// Where teams have slots of their own, they read them only so.
bool spread_down(int64_t rows, int slot_count, const Matrix& down, int workers, int teams) {
    constexpr int kFewRows = 4;
    const auto most = [&](int64_t blocks) { return (blocks + workers - 1) / workers; };
    const bool uneven = 16 * slot_count * most(down.blocks) > 17 * most(int64_t{slot_count} * down.blocks);
    return rows <= int64_t{kFewRows} * slot_count && (teams > 1 || uneven);
}

}  // namespace

void gated_ffn(Cpu& cpu, const float* x, int tokens, int hidden, const ExpertWork* experts, int expert_count,
               int slice_count, const Gating& gating, bool exact, float* y, OutputRows output_rows,
               int copies) {
    if (expert_count == 0) {
        if (output_rows == OutputRows::kSummed)
            std::memset(y, 0, static_cast<size_t>(tokens) * hidden * sizeof(float));
        return;
    }
    int64_t rows = 0;
    const SlotOrder order = order_of(cpu, expert_count, slice_count, copies);
    const Slot* slots = make_slots(cpu, experts, order, &rows);
    const FfnSlice& first = experts[0].slices[0];
    const int slot_count = expert_count * slice_count, workers = cpu.pool.size();
    const int tile = std::min(token_tile(first.gate_up), token_tile(first.down));
    int tile_count = 0;
    for (int i = 0; i < slot_count; i++) tile_count += slots[i].tiles(tile).count;
    const Activations inputs(cpu, first.gate_up, tokens, exact), middles(cpu, first.down, rows, exact);
    const Activations gathered(cpu, first.gate_up, static_cast<int64_t>(tile) * workers, exact);
    const int team = order.teams > 1 ? cpu.teams.largest() : workers;
    const bool whole_units =
        !middles.form.whole_rows() && split_by_units(order.team_slots(), first.down, team);
    // gate writes whole blocks of 8 columns, which may exceed down's columns but not its padding.
    const int stride = first.down.padded_cols();
    float* gated = whole_units ? nullptr : cpu.arena.take<float>(rows * stride);
    const bool apart = output_rows == OutputRows::kApart;
    const bool spread = spread_down(rows, slot_count, first.down, workers, order.teams);
    float* products = spread ? cpu.arena.take<float>(rows * hidden) : nullptr;
    const Shared shared{cpu,     slots,       slot_count, rows,   tile,     inputs, gathered,
                        middles, whole_units, gated,      stride, products, gating, x,
                        tokens,  hidden,      y,          apart,  order};
    Stretch* room = cpu.arena.take<Stretch>(static_cast<size_t>(workers) * 2 * tile_count);
    cpu.pool.run([&](int worker) { Worker(shared, worker, room + worker * 2 * tile_count).run(); });
}

}  // namespace strata::cpu
