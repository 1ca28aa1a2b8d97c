// hidden = act(gate) * up for a dense FFN: both is f32 [rows, 2 * padded], 8 gate elements, then the 8 up
// elements of the same index; hidden f32 [rows, width]. Grid: (width / block, rows).
#include "activation.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gate(const float* both, float* hidden, int width, int kind, float alpha, float limit) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const int padded = (width + 7) / 8 * 8;
    const float* const pair = both + static_cast<size_t>(blockIdx.y) * 2 * padded + i / 8 * 16 + i % 8;
    hidden[static_cast<size_t>(blockIdx.y) * width + i] = gated(pair[0], pair[8], {kind, alpha, limit});
}
EXPORT_KERNEL(gate)
