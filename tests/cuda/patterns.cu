// Access patterns whose cost is known, for the profile of the PTX simulation.
#include "device.cuh"

template <int Stride>
DEVICE void write_with_stride(float* data) {
    SHARED_MEMORY(shared);
    reinterpret_cast<float*>(shared)[threadIdx.x * Stride] = 1.0f;
    data[threadIdx.x * Stride] = 1.0f;
}

extern "C" __global__ void stride_1(float* data) { write_with_stride<1>(data); }
EXPORT_KERNEL(stride_1)

extern "C" __global__ void stride_2(float* data) { write_with_stride<2>(data); }
EXPORT_KERNEL(stride_2)

extern "C" __global__ void stride_32(float* data) { write_with_stride<32>(data); }
EXPORT_KERNEL(stride_32)

extern "C" __global__ void vectors_row_4(float* data) {
    SHARED_MEMORY(shared);
    reinterpret_cast<float4*>(shared)[threadIdx.x] = make_float4(1, 1, 1, 1);
    reinterpret_cast<float4*>(data)[threadIdx.x] = make_float4(1, 1, 1, 1);
}
EXPORT_KERNEL(vectors_row_4)
