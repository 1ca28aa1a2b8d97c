#include "cpu/experts.h"

#include <algorithm>
#include <cstring>

#include "cpu/activations.h"

namespace strata::cpu {
namespace {

// A slice of an expert and where its hidden activations stand: rows [first_row, first_row + count).
struct Slot {
    const ExpertWork* work;
    const FfnSlice* slice;
    int64_t first_row;
};

// What all workers share during one call.
struct Shared {
    Cpu& cpu;
    const Slot* slots;
    int slot_count;
    int64_t hidden_rows;   // over all slots
    float* hidden;         // [hidden_rows][hidden_stride], the gated values
    size_t hidden_stride;  // padded columns of down
    const Activations& inputs;
    const Activations& middles;
    const Gating& gating;
    int width;  // model width
    float* y;
};

// A run of blocks [begin, end) of one slot.
struct Run {
    int slot, begin, end;
};

// A worker's place in the sequence (slot, block) of gate_up matrices, then in that of down matrices.
class Weights {
  public:
    Weights(const Shared& shared, int64_t gate_up_end, Range down_blocks)
        : shared_(shared), gate_up_end_(gate_up_end), down_(down_blocks) {}

    // The block that lies `blocks_ahead` blocks after gate_up block `position`, or the first ones of down.
    Ahead after_gate_up(int64_t position) const {
        const Matrix& matrix = shared_.slots[0].slice->gate_up;
        const int64_t next = position + blocks_ahead(matrix);
        if (next < gate_up_end_) {
            const int64_t slot = next / matrix.blocks;
            return {shared_.slots[slot].slice->gate_up.block(static_cast<int>(next % matrix.blocks)),
                    matrix.block_bytes};
        }
        return first_of_down(next - gate_up_end_, matrix.block_bytes);
    }

    // position: slot * (blocks of this worker) + block - first block.
    Ahead after_down(int64_t position) const {
        const Matrix& matrix = shared_.slots[0].slice->down;
        const int64_t next = position + blocks_ahead(matrix), count = down_.end - down_.begin;
        if (next >= count * shared_.slot_count) return {};
        const int block = static_cast<int>(down_.begin + next % count);
        return {shared_.slots[next / count].slice->down.block(block), matrix.block_bytes};
    }

  private:
    // The index-th piece of `bytes` bytes of this worker's first run of down blocks.
    Ahead first_of_down(int64_t index, size_t bytes) const {
        const Matrix& matrix = shared_.slots[0].slice->down;
        const size_t all = static_cast<size_t>(down_.end - down_.begin) * matrix.block_bytes;
        const size_t start = static_cast<size_t>(index) * bytes;
        if (start >= all) return {};
        return {matrix.block(static_cast<int>(down_.begin)) + start, std::min(bytes, all - start)};
    }

    const Shared& shared_;
    const int64_t gate_up_end_;
    const Range down_;
};

// Work of one block with m tokens relative to reading it: measured for w4g64 in the prototypes.
double block_cost(int tokens) { return 1.0 + 0.35 * tokens; }

// First gate_up block of worker `worker` of `workers`, counted over all slots; blocks are weighted by cost.
int64_t split_point(const Shared& s, int worker, int workers) {
    const int blocks = s.slots[0].slice->gate_up.blocks;
    // Not left to the sums below: they round, and the last block of all would be nobody's.
    if (worker == workers) return static_cast<int64_t>(s.slot_count) * blocks;
    double total = 0;
    for (int i = 0; i < s.slot_count; i++) total += blocks * block_cost(s.slots[i].work->count);
    double left = total * worker / workers;
    for (int i = 0; i < s.slot_count; i++) {
        const double cost = block_cost(s.slots[i].work->count);
        if (left < blocks * cost) return static_cast<int64_t>(i) * blocks + static_cast<int64_t>(left / cost);
        left -= blocks * cost;
    }
    return static_cast<int64_t>(s.slot_count) * blocks;
}

// Pointers to the activations of tokens [first, first + count) of a slot.
void gather(const Activations& inputs, const int32_t* tokens, int count, const void** rows) {
    for (int i = 0; i < count; i++) rows[i] = inputs.row(tokens[i]);
}

void gate_up_run(const Shared& s, const Weights& weights, const Run& run) {
    const Slot& slot = s.slots[run.slot];
    const Matrix& matrix = slot.slice->gate_up;
    const int tile = token_tile(matrix), half = kRowBlock / 2;
    float z[kMaxTile * kRowBlock];
    const void* rows[kMaxTile];
    for (int first = 0; first < slot.work->count; first += tile) {
        const int count = std::min(tile, slot.work->count - first);
        gather(s.inputs, slot.work->tokens + first, count, rows);
        float* hidden = s.hidden + (slot.first_row + first) * s.hidden_stride;
        for (int b = run.begin; b < run.end; b++) {
            const int64_t position = static_cast<int64_t>(run.slot) * matrix.blocks + b;
            s.inputs.dot()({&matrix, matrix.block(b), rows, count, z, weights.after_gate_up(position)});
            const float* bias = slot.slice->gate_up_bias;
            s.cpu.kernels.gate(s.gating, z, bias != nullptr ? bias + b * kRowBlock : nullptr, count,
                               hidden + b * half, s.hidden_stride);
        }
    }
}

void gate_up_phase(const Shared& s, const Weights& weights, int64_t begin, int64_t end) {
    const int blocks = s.slots[0].slice->gate_up.blocks;
    while (begin < end) {
        const int slot = static_cast<int>(begin / blocks), first = static_cast<int>(begin % blocks);
        const int last = static_cast<int>(std::min<int64_t>(blocks, first + end - begin));
        gate_up_run(s, weights, {slot, first, last});
        begin += last - first;
    }
}

// y[token] += weight * (z + bias) for one block of 16 output columns.
void add_block(const Shared& s, const Slot& slot, int block, const float* z, int first, int count) {
    const int column = block * kRowBlock, columns = std::min(kRowBlock, s.width - column);
    const float* bias = slot.slice->down_bias;
    for (int i = 0; i < count; i++) {
        float* y = s.y + static_cast<size_t>(slot.work->tokens[first + i]) * s.width + column;
        const float weight = slot.work->weights[first + i];
        for (int r = 0; r < columns; r++) {
            const float value =
                bias != nullptr ? z[i * kRowBlock + r] + bias[column + r] : z[i * kRowBlock + r];
            y[r] += weight * value;
        }
    }
}

void down_run(const Shared& s, const Weights& weights, const Run& run) {
    const Slot& slot = s.slots[run.slot];
    const Matrix& matrix = slot.slice->down;
    const int tile = token_tile(matrix);
    float z[kMaxTile * kRowBlock];
    for (int first = 0; first < slot.work->count; first += tile) {
        const int count = std::min(tile, slot.work->count - first);
        for (int b = run.begin; b < run.end; b++) {
            const int64_t position = static_cast<int64_t>(run.slot) * (run.end - run.begin) + b - run.begin;
            const void* const* rows = s.middles.rows(slot.first_row + first);
            s.middles.dot()({&matrix, matrix.block(b), rows, count, z, weights.after_down(position)});
            add_block(s, slot, b, z, first, count);
        }
    }
}

void clear_columns(const Shared& s, int tokens, Range blocks) {
    const int64_t from = blocks.begin * kRowBlock, to = std::min<int64_t>(blocks.end * kRowBlock, s.width);
    for (int t = 0; t < tokens; t++)
        std::fill(s.y + static_cast<size_t>(t) * s.width + from, s.y + static_cast<size_t>(t) * s.width + to,
                  0.0f);
}

void work(const Shared& s, const float* x, int tokens, int worker) {
    const int workers = s.cpu.pool.size();
    const Range mine = share(tokens, worker, workers);
    for (int64_t t = mine.begin; t < mine.end; t++) s.inputs.fill(t, x + t * s.width);
    const int64_t begin = split_point(s, worker, workers), end = split_point(s, worker + 1, workers);
    const Range down_blocks = share(s.slots[0].slice->down.blocks, worker, workers);
    const Weights weights(s, end, down_blocks);
    s.cpu.pool.barrier();
    gate_up_phase(s, weights, begin, end);
    clear_columns(s, tokens, down_blocks);
    s.cpu.pool.barrier();
    const Range rows = share(s.hidden_rows, worker, workers);
    for (int64_t row = rows.begin; row < rows.end; row++)
        s.middles.fill(row, s.hidden + row * s.hidden_stride);
    s.cpu.pool.barrier();
    if (down_blocks.begin == down_blocks.end) return;
    for (int slot = 0; slot < s.slot_count; slot++)
        down_run(s, weights, {slot, static_cast<int>(down_blocks.begin), static_cast<int>(down_blocks.end)});
}

Slot* make_slots(Cpu& cpu, const ExpertWork* experts, int expert_count, int slice_count, int64_t* rows) {
    Slot* slots = cpu.arena.take<Slot>(static_cast<size_t>(expert_count) * slice_count);
    *rows = 0;
    for (int e = 0; e < expert_count; e++) {
        for (int i = 0; i < slice_count; i++) {
            slots[e * slice_count + i] = {&experts[e], &experts[e].slices[i], *rows};
            *rows += experts[e].count;
        }
    }
    return slots;
}

}  // namespace

void gated_ffn(Cpu& cpu, const float* x, int tokens, int hidden, const ExpertWork* experts, int expert_count,
               int slice_count, const Gating& gating, bool exact, float* y) {
    if (expert_count == 0) {
        std::memset(y, 0, static_cast<size_t>(tokens) * hidden * sizeof(float));
        return;
    }
    int64_t rows = 0;
    const Slot* slots = make_slots(cpu, experts, expert_count, slice_count, &rows);
    const FfnSlice& first = experts[0].slices[0];
    const Activations inputs(cpu, first.gate_up, tokens, exact), middles(cpu, first.down, rows, exact);
    // gate writes whole blocks of 8 columns, which may exceed down's columns but not its padding.
    const size_t stride = first.down.padded_cols();
    float* gated = cpu.arena.take<float>(rows * stride);
    const int slot_count = expert_count * slice_count;
    const Shared shared{cpu, slots, slot_count, rows, gated, stride, inputs, middles, gating, hidden, y};
    cpu.pool.run([&](int worker) { work(shared, x, tokens, worker); });
}

}  // namespace strata::cpu
