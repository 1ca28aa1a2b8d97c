// Activations in the form that the kernels of a matrix want: panels of QuantUnit or of f32 units.
#pragma once

#include "cpu/cpu.h"

namespace strata::cpu {

// Rows of activations that meet a matrix together: [units][rows] of QuantUnit or of float[64]. All that a
// unit of weights needs lies together, behind one pointer.
struct Panel {
    uint8_t* at;
    int rows;
};

// How activations are kept for matrices of one format and width, and the kernel that reads them.
class ActivationForm {
  public:
    ActivationForm(const Cpu& cpu, const Matrix& matrix, bool exact);

    size_t row_bytes() const { return unit_bytes_ * matrix_.units; }
    // Whether all columns of a row share one scale, so that a row is filled at once.
    bool whole_rows() const { return whole_rows_; }
    // Makes row `index` of a panel from x, f32 [cols].
    void fill(const Panel& panel, int index, const float* x) const { fill(panel, index, 0, x, matrix_.cols); }
    // The same from unit `unit` on, for x of `cols` columns from there; the last ones bring the padding. Not
    // with whole_rows.
    void fill(const Panel& panel, int index, int unit, const float* x, int cols) const;
    // Makes row `index` of a panel from a panel of one row.
    void copy(const Panel& panel, int index, const uint8_t* row) const;
    // The kernel of the matrix for these activations.
    BlockFn dot() const { return dot_; }

  private:
    const Kernels& kernels_;
    const Matrix matrix_;
    const bool quantized_, whole_rows_;
    const size_t unit_bytes_;
    const BlockFn dot_;
};

// Memory for rows of one form, of which any run can be a panel; it belongs to the arena.
class Activations {
  public:
    Activations(Cpu& cpu, const Matrix& matrix, int64_t rows, bool exact)
        : form(cpu, matrix, exact), memory_(cpu.arena.take<uint8_t>(rows * form.row_bytes())) {}

    Panel panel(Range rows) const {
        return {memory_ + rows.begin * form.row_bytes(), static_cast<int>(rows.end - rows.begin)};
    }

    const ActivationForm form;

  private:
    uint8_t* const memory_;
};

// Most tokens of one sweep; partial results [kMaxTile][16] live on the stack.
constexpr int kMaxTile = 128;
// Tokens of one sweep over a block: their int8 activations should stay in a 256 KB L2 cache.
int token_tile(const Matrix& matrix);

// Tokens cut into tiles of nearly equal size, at most `most`.
struct TokenTiles {
    TokenTiles(int64_t tokens, int most)
        : tokens(tokens), count(static_cast<int>((tokens + most - 1) / most)) {}

    Range at(int tile) const { return share(tokens, tile, count); }

    const int64_t tokens;
    const int count;
};

}  // namespace strata::cpu
