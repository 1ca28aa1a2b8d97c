#include "cpu/activations.h"

#include <algorithm>
#include <cstring>

namespace strata::cpu {

Activations::Activations(Cpu& cpu, const Matrix& matrix, int64_t rows, bool exact)
    : kernels_(cpu.kernels),
      rows_(cpu.arena.take<const void*>(rows)),
      cols_(matrix.cols),
      padded_cols_(matrix.padded_cols()),
      span_(activation_span(matrix.format())),
      quantized_(!exact && cpu.kernels.dot_q8[matrix.code] != nullptr),
      dot_(quantized_ ? cpu.kernels.dot_q8[matrix.code] : cpu.kernels.dot_f32[matrix.code]) {
    row_bytes_ = quantized_ ? matrix.units * sizeof(QuantUnit) : padded_cols_ * sizeof(float);
    const bool in_place = !quantized_ && cols_ == padded_cols_;
    memory_ = in_place ? nullptr : cpu.arena.take<uint8_t>(rows * row_bytes_);
}

void Activations::fill(int64_t row, const float* x) const {
    if (memory_ == nullptr) {
        rows_[row] = x;
        return;
    }
    uint8_t* at = memory_ + row * row_bytes_;
    rows_[row] = at;
    if (quantized_) {
        // Units that only pad the columns to the weight's group stay zero.
        const size_t used = (cols_ + kUnitCols - 1) / kUnitCols * sizeof(QuantUnit);
        std::memset(at + used, 0, row_bytes_ - used);
        kernels_.quantize(x, cols_, span_, reinterpret_cast<QuantUnit*>(at));
    } else {
        std::memcpy(at, x, cols_ * sizeof(float));
        std::memset(at + cols_ * sizeof(float), 0, (padded_cols_ - cols_) * sizeof(float));
    }
}

int token_tile(const Matrix& matrix) {
    constexpr int kCacheBytes = 160 * 1024, kLeast = 16, kMost = kMaxTile;
    const int row_bytes = matrix.units * static_cast<int>(sizeof(QuantUnit));
    return std::clamp(kCacheBytes / row_bytes / 8 * 8, kLeast, kMost);
}

}  // namespace strata::cpu
