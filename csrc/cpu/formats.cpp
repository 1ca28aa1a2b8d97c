#include "cpu/formats.h"

#include <algorithm>

namespace strata::cpu {
namespace {

size_t padded(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

Matrix make_matrix(const uint8_t* data, int code, int rows, int cols) {
    const Format& format = kFormats[code];
    const size_t all_cols = padded(cols, std::max(kUnitCols, format.group));
    size_t groups = 0;
    if (format.scale_bytes != 0) groups = format.group != 0 ? all_cols / format.group : 1;
    const size_t scale_block = kRowBlock * groups * format.scale_bytes;
    Matrix m{};
    m.data = data;
    m.code = code;
    m.rows = rows;
    m.cols = cols;
    m.blocks = static_cast<int>(padded(rows, kRowBlock) / kRowBlock);
    m.units = static_cast<int>(all_cols / kUnitCols);
    m.scales_at = static_cast<size_t>(m.units) * kUnitBytes[static_cast<int>(format.values)];
    m.mins_at = m.scales_at + scale_block;
    m.block_bytes = padded(m.mins_at + (format.minimum ? scale_block : 0), kBlockAlign);
    m.bytes = m.block_bytes * m.blocks;
    return m;
}

}  // namespace strata::cpu
