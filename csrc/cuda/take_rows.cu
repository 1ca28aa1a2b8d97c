// out[i] = x[rows[i]], f32 rows of `columns`. Grid: (columns / block, rows of out).
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
    take_rows(const float* x, const int* rows, float* out, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    out[static_cast<size_t>(blockIdx.y) * columns + column] =
        x[static_cast<size_t>(rows[blockIdx.y]) * columns + column];
}
EXPORT_KERNEL(take_rows)
