// `size` elements of each head from element `from` of x's heads to element `to` of out's heads.
//
// x is f32 [rows, heads * x_head], out f32 [rows, heads * out_head]; the rest of out stays.
// Grid: (heads * size / block, rows).
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_heads(const float* x, float* out, int heads, int size, int x_head, int from, int out_head, int to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads * size) return;
    const int head = blockIdx.y * heads + i / size, element = i % size;
    out[static_cast<size_t>(head) * out_head + to + element] =
        x[static_cast<size_t>(head) * x_head + from + element];
}
EXPORT_KERNEL(copy_heads)
