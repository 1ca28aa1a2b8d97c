#include "cpu/activations.h"

#include <algorithm>
#include <cstring>

namespace strata::cpu {

static BlockFn dot_of(const Kernels& kernels, int code, bool quantized, bool whole_rows) {
    if (whole_rows) return kernels.dot_w8a8;
    return quantized ? kernels.dot_q8[code] : kernels.dot_f32[code];
}

ActivationForm::ActivationForm(const Cpu& cpu, const Matrix& matrix, bool exact)
    : kernels_(cpu.kernels),
      matrix_(matrix),
      quantized_(!exact && cpu.kernels.dot_q8[matrix.code] != nullptr),
      whole_rows_(quantized_ && cpu.token_scales && has_row_scales(matrix.format()) &&
                  matrix.cols <= kMostTokenCols),
      unit_bytes_(quantized_ ? sizeof(QuantUnit) : kUnitCols * sizeof(float)),
      dot_(dot_of(cpu.kernels, matrix.code, quantized_, whole_rows_)) {}

void ActivationForm::fill(const Panel& panel, int index, int unit, const float* x, int cols) const {
    const bool last = unit * kUnitCols + cols >= matrix_.cols;
    const int units = (last ? matrix_.units - unit : cols / kUnitCols);
    uint8_t* at = panel.at + (static_cast<size_t>(unit) * panel.rows + index) * unit_bytes_;
    if (whole_rows_)
        return kernels_.quantize_token(x, cols, units, reinterpret_cast<QuantUnit*>(at), panel.rows);
    if (quantized_)
        return kernels_.quantize(matrix_.format(), x, cols, units, reinterpret_cast<QuantUnit*>(at),
                                 panel.rows);
    for (int i = 0; i < units; i++, at += panel.rows * unit_bytes_) {
        const size_t used = std::clamp(cols - i * kUnitCols, 0, kUnitCols) * sizeof(float);
        std::memcpy(at, x + i * kUnitCols, used);
        std::memset(at + used, 0, unit_bytes_ - used);
    }
}

void ActivationForm::copy(const Panel& panel, int index, const uint8_t* row) const {
    uint8_t* at = panel.at + index * unit_bytes_;
    for (int unit = 0; unit < matrix_.units; unit++)
        std::memcpy(at + unit * panel.rows * unit_bytes_, row + unit * unit_bytes_, unit_bytes_);
}

int token_tile(const Matrix& matrix) {
    constexpr int kCacheBytes = 160 * 1024, kLeast = 16, kMost = kMaxTile;
    const int row_bytes = matrix.units * static_cast<int>(sizeof(QuantUnit));
    return std::clamp(kCacheBytes / row_bytes / 8 * 8, kLeast, kMost);
}

}  // namespace strata::cpu
