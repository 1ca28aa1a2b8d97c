#include "cpu/linear.h"

#include <algorithm>

#include "cpu/activations.h"
#include "cpu/parallel.h"
#include "cpu/weight_path.h"

namespace strata::cpu {
namespace {

// One result block [tokens][16] to its place: rows [first, last) of the block, plus bias.
void store_rows(const Matrix& matrix, int block, int first, int last, const float* z, int tokens,
                const float* bias, float* y) {
    const int row = block * kRowBlock;
    for (int t = 0; t < tokens; t++) {
        float* out = y + static_cast<size_t>(t) * matrix.rows + row;
        const float* in = z + t * kRowBlock;
        if (bias != nullptr)
            for (int r = first; r < last; r++) out[r] = in[r] + bias[row + r];
        else
            for (int r = first; r < last; r++) out[r] = in[r];
    }
}

// What all workers share during one call.
struct Shared {
    Cpu& cpu;
    const Matrix& matrix;
    const Activations& inputs;
    TokenTiles tiles;
    const float* bias;
    float* y;
};

void fill_inputs(const Shared& s, const float* x, Range tokens) {
    for (int i = 0; i < s.tiles.count; i++) {
        const Range tile = s.tiles.at(i);
        const Panel panel = s.inputs.panel(tile);
        for (int64_t t = std::max(tile.begin, tokens.begin); t < std::min(tile.end, tokens.end); t++)
            s.inputs.form.fill(panel, static_cast<int>(t - tile.begin), x + t * s.matrix.cols);
    }
}

// Row blocks `blocks` of one tile of tokens.
void multiply(const Shared& s, const Panel& panel, Range tokens, Range blocks, Ahead* ahead) {
    alignas(64) float z[kMostBlocks * kMaxTile * kRowBlock];
    float* y = s.y + tokens.begin * s.matrix.rows;
    for (int64_t b = blocks.begin; b < blocks.end; b += kMostBlocks) {
        const int first = static_cast<int>(b);
        const int count = static_cast<int>(std::min<int64_t>(kMostBlocks, blocks.end - b));
        s.inputs.form.dot()(
            {&s.matrix, s.matrix.block(first), count, panel.at, panel.rows, panel.rows, z, ahead});
        for (int i = 0; i < count; i++) {
            const int last = std::min(kRowBlock, s.matrix.rows - (first + i) * kRowBlock);
            store_rows(s.matrix, first + i, 0, last, z + i * panel.rows * kRowBlock, panel.rows, s.bias, y);
        }
    }
}

void work(const Shared& s, const float* x, int tokens, Stretch* room, int worker) {
    const int workers = s.cpu.pool.size();
    const Range blocks = share(s.matrix.blocks, worker, workers);
    WeightPath path(room);
    for (int i = 0; i < s.tiles.count; i++) path.add(s.matrix, blocks.begin, blocks.end);
    Ahead* ahead = path.start();
    fill_inputs(s, x, share(tokens, worker, workers));
    s.cpu.pool.barrier();
    for (int i = 0; i < s.tiles.count; i++)
        multiply(s, s.inputs.panel(s.tiles.at(i)), s.tiles.at(i), blocks, ahead);
}

}  // namespace

void linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, const float* bias, bool exact,
            float* y) {
    const Activations inputs(cpu, matrix, tokens, exact);
    const Shared shared{cpu, matrix, inputs, TokenTiles(tokens, token_tile(matrix)), bias, y};
    Stretch* room = cpu.arena.take<Stretch>(static_cast<size_t>(cpu.pool.size()) * shared.tiles.count);
    cpu.pool.run([&](int worker) { work(shared, x, tokens, room + worker * shared.tiles.count, worker); });
}

namespace {

// Row block `block` of all the heads it belongs to; computed once for each.
void multiply_heads(const Shared& s, int heads, int block) {
    const int head_rows = s.matrix.rows / heads, row = block * kRowBlock;
    const int end = std::min(row + kRowBlock, s.matrix.rows);
    const int64_t tokens = s.tiles.tokens;
    alignas(64) float z[kMaxTile * kRowBlock];
    for (int head = row / head_rows; head * head_rows < end; head++) {
        const int from = std::max(row, head * head_rows), to = std::min(end, (head + 1) * head_rows);
        for (int i = 0; i < s.tiles.count; i++) {
            const Range tile = s.tiles.at(i);
            const Panel panel = s.inputs.panel({head * tokens + tile.begin, head * tokens + tile.end});
            s.inputs.form.dot()(
                {&s.matrix, s.matrix.block(block), 1, panel.at, panel.rows, panel.rows, z, nullptr});
            store_rows(s.matrix, block, from - row, to - row, z, panel.rows, nullptr,
                       s.y + tile.begin * s.matrix.rows);
        }
    }
}

}  // namespace

void head_linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, int heads, bool exact,
                 float* y) {
    // Row h * tokens + t is token t of head h.
    const Activations inputs(cpu, matrix, static_cast<int64_t>(tokens) * heads, exact);
    const Shared s{cpu, matrix, inputs, TokenTiles(tokens, kMaxTile), nullptr, y};
    const int workers = cpu.pool.size();
    cpu.pool.run([&](int worker) {
        const Range mine = share(static_cast<int64_t>(s.tiles.count) * heads, worker, workers);
        for (int64_t i = mine.begin; i < mine.end; i++) {
            const int64_t head = i / s.tiles.count;
            const Range tile = s.tiles.at(static_cast<int>(i % s.tiles.count));
            const Panel panel = inputs.panel({head * tokens + tile.begin, head * tokens + tile.end});
            for (int64_t t = tile.begin; t < tile.end; t++)
                inputs.form.fill(panel, static_cast<int>(t - tile.begin),
                                 x + (t * heads + head) * matrix.cols);
        }
        cpu.pool.barrier();
        const Range blocks = share(matrix.blocks, worker, workers);
        for (int64_t b = blocks.begin; b < blocks.end; b++) multiply_heads(s, heads, static_cast<int>(b));
    });
}

void embedding(Cpu& cpu, const Matrix& matrix, const int32_t* ids, int tokens, float scale, float* y) {
    const DecodeRowFn decode = cpu.kernels.decode_row[matrix.code];
    parallel_for(cpu.pool, tokens, 4 * matrix.cols, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end; t++) {
            float* out = y + t * matrix.cols;
            decode(matrix, ids[t], out);
            for (int i = 0; i < matrix.cols; i++) out[i] *= scale;
        }
    });
}

}  // namespace strata::cpu
