// Activations in the form that the kernels of a matrix want: QuantUnit rows, or f32 rows of whole units.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// Rows of activations for matrices of one format and width. Memory belongs to the arena; an f32 row that is
// whole units already is used where it lies.
class Activations {
  public:
    // Room for `rows` rows that will meet `matrix`.
    Activations(Cpu& cpu, const Matrix& matrix, int64_t rows, bool exact);

    // Makes row `row` from x, f32 [cols]. Workers may fill different rows at the same time.
    void fill(int64_t row, const float* x) const;

    const void* row(int64_t index) const { return rows_[index]; }
    const void* const* rows(int64_t first) const { return rows_ + first; }
    // The kernel of the matrix for these activations.
    BlockFn dot() const { return dot_; }

  private:
    const Kernels& kernels_;
    const void** rows_;
    uint8_t* memory_;
    size_t row_bytes_;
    int cols_, padded_cols_, span_;
    bool quantized_;
    BlockFn dot_;
};

// Most tokens of one sweep; partial results [kMaxTile][16] live on the stack.
constexpr int kMaxTile = 128;
// Tokens of one sweep over a block: their int8 activations should stay in a 256 KB L2 cache.
int token_tile(const Matrix& matrix);

// How far ahead of the work weights are asked for. 17 KB were enough on Zen 4.
constexpr size_t kPrefetchDistance = 32 * 1024;
inline int blocks_ahead(const Matrix& matrix) {
    return static_cast<int>((kPrefetchDistance + matrix.block_bytes - 1) / matrix.block_bytes);
}

}  // namespace strata::cpu
