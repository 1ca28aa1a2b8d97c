// x *= sigmoid(gate): x is f32 [rows, columns], gate f32 [rows]. Grid: (columns / block, rows).
#include "activation.cuh"

extern "C" __global__ void __launch_bounds__(256) scale_by_sigmoid(float* x, const float* gate, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < columns) x[static_cast<size_t>(blockIdx.y) * columns + column] *= sigmoid(gate[blockIdx.y]);
}
EXPORT_KERNEL(scale_by_sigmoid)
