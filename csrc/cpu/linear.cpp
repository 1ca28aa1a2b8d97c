#include "cpu/linear.h"

#include <algorithm>

#include "cpu/activations.h"
#include "cpu/parallel.h"

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

Ahead ahead_of(const Matrix& matrix, int block, int64_t end) {
    const int next = block + blocks_ahead(matrix);
    return next < end ? Ahead{matrix.block(next), matrix.block_bytes} : Ahead{};
}

}  // namespace

void linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, const float* bias, bool exact,
            float* y) {
    const Activations inputs(cpu, matrix, tokens, exact);
    const int tile = token_tile(matrix), workers = cpu.pool.size();
    cpu.pool.run([&](int worker) {
        const Range mine = share(tokens, worker, workers);
        for (int64_t t = mine.begin; t < mine.end; t++) inputs.fill(t, x + t * matrix.cols);
        cpu.pool.barrier();
        const Range blocks = share(matrix.blocks, worker, workers);
        float z[kMaxTile * kRowBlock];
        for (int first = 0; first < tokens; first += tile) {
            const int count = std::min(tile, tokens - first);
            for (int b = static_cast<int>(blocks.begin); b < blocks.end; b++) {
                inputs.dot()({&matrix, matrix.block(b), inputs.rows(first), count, z,
                              ahead_of(matrix, b, blocks.end)});
                const int last = std::min(kRowBlock, matrix.rows - b * kRowBlock);
                store_rows(matrix, b, 0, last, z, count, bias, y + static_cast<size_t>(first) * matrix.rows);
            }
        }
    });
}

void head_linear(Cpu& cpu, const Matrix& matrix, const float* x, int tokens, int heads, bool exact,
                 float* y) {
    // Input row t * heads + h; a block may belong to several heads and is then computed once for each.
    const Activations inputs(cpu, matrix, static_cast<int64_t>(tokens) * heads, exact);
    const int workers = cpu.pool.size(), head_rows = matrix.rows / heads;
    cpu.pool.run([&](int worker) {
        const Range mine = share(static_cast<int64_t>(tokens) * heads, worker, workers);
        for (int64_t i = mine.begin; i < mine.end; i++) inputs.fill(i, x + i * matrix.cols);
        cpu.pool.barrier();
        const Range blocks = share(matrix.blocks, worker, workers);
        float z[kMaxTile * kRowBlock];
        const void* rows[kMaxTile];
        for (int b = static_cast<int>(blocks.begin); b < blocks.end; b++) {
            const int row = b * kRowBlock, end = std::min(row + kRowBlock, matrix.rows);
            for (int head = row / head_rows; head * head_rows < end; head++) {
                const int from = std::max(row, head * head_rows), to = std::min(end, (head + 1) * head_rows);
                for (int first = 0; first < tokens; first += kMaxTile) {
                    const int count = std::min(kMaxTile, tokens - first);
                    for (int t = 0; t < count; t++)
                        rows[t] = inputs.row(static_cast<int64_t>(first + t) * heads + head);
                    inputs.dot()({&matrix, matrix.block(b), rows, count, z, ahead_of(matrix, b, blocks.end)});
                    float* out = y + static_cast<size_t>(first) * matrix.rows;
                    store_rows(matrix, b, from - row, to - row, z, count, nullptr, out);
                }
            }
        }
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
