// residual += scale * branch, both f32 [count]. Must move: branch once, residual twice.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
    add(float* residual, const float* branch, int count, float scale) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) residual[i] += scale * branch[i];
}
EXPORT_KERNEL(add)
