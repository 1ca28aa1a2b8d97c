// Planted defects, one per kernel: the emulator must report each, and none of the `fine_` kernels. All are
// launched with 128 threads, and shared memory and `data` for one float per thread unless said otherwise.
#include "last_block.cuh"

#define KERNEL extern "C" __global__ void

DEVICE float* shared_floats() {
    SHARED_MEMORY(shared);
    return reinterpret_cast<float*>(shared);
}

KERNEL race_between_warps(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    data[threadIdx.x] = s[(threadIdx.x + 33) % blockDim.x];
}
EXPORT_KERNEL(race_between_warps)

KERNEL race_inside_a_warp(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    data[threadIdx.x] = s[threadIdx.x ^ 1];
}
EXPORT_KERNEL(race_inside_a_warp)

KERNEL fine_syncwarp(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    __syncwarp();
    data[threadIdx.x] = s[threadIdx.x ^ 1];
}
EXPORT_KERNEL(fine_syncwarp)

KERNEL shuffle_is_no_barrier(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    const float other = __shfl_xor_sync(FULL, 1.0f, 1);
    data[threadIdx.x] = s[threadIdx.x ^ 1] + other;
}
EXPORT_KERNEL(shuffle_is_no_barrier)

KERNEL syncwarp_is_no_block_barrier(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    __syncwarp();
    data[threadIdx.x] = s[threadIdx.x ^ 32];
}
EXPORT_KERNEL(syncwarp_is_no_block_barrier)

KERNEL write_after_read(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    __syncthreads();
    const float value = s[(threadIdx.x + 32) % blockDim.x];
    s[threadIdx.x] = value + 1.0f;
    data[threadIdx.x] = value;
}
EXPORT_KERNEL(write_after_read)

// The last reader is the writer itself in every order of threads; the others are what makes it a race.
KERNEL write_after_many_reads(float* data) {
    float* const s = shared_floats();
    s[threadIdx.x] = 1.0f;
    __syncthreads();
    data[threadIdx.x] = s[0];
    __shfl_sync(FULL, 1, 0);
    data[threadIdx.x] += s[threadIdx.x / kWarp];
    if (threadIdx.x == 5) s[0] = s[0] + 1.0f;
}
EXPORT_KERNEL(write_after_many_reads)

KERNEL same_value_by_all(float* data) {
    float* const s = shared_floats();
    s[0] = 1.0f;
    __syncthreads();
    data[threadIdx.x] = s[0];
}
EXPORT_KERNEL(same_value_by_all)

KERNEL write_beyond_the_end(float* data) { data[threadIdx.x + 1] = 1.0f; }
EXPORT_KERNEL(write_beyond_the_end)

KERNEL read_before_the_begin(float* data) {
    const float value = data[static_cast<int>(threadIdx.x) - 1];
    __syncthreads();
    data[threadIdx.x] = value;
}
EXPORT_KERNEL(read_before_the_begin)

KERNEL shared_beyond_the_end(float* data) {
    shared_floats()[threadIdx.x + 1] = 1.0f;
    data[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(shared_beyond_the_end)

KERNEL local_array_beyond_the_end(float* data) {
    float local[4] = {};
    data[threadIdx.x] = local[threadIdx.x / kWarp + 1];
}
EXPORT_KERNEL(local_array_beyond_the_end)

KERNEL barrier_in_a_branch(float* data) {
    if (threadIdx.x < 32) __syncthreads();
    data[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(barrier_in_a_branch)

KERNEL barriers_at_two_places(float* data) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    data[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(barriers_at_two_places)

KERNEL return_before_a_barrier(float* data) {
    if (threadIdx.x == 7) return;
    __syncthreads();
    data[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(return_before_a_barrier)

KERNEL shuffle_in_a_branch(float* data) {
    float value = 0.0f;
    if (threadIdx.x & 1) value = __shfl_xor_sync(FULL, 1.0f, 2);
    data[threadIdx.x] = value;
}
EXPORT_KERNEL(shuffle_in_a_branch)

KERNEL shuffles_at_two_places(float* data) {
    float value;
    if (threadIdx.x & 1)
        value = __shfl_xor_sync(FULL, 1.0f, 2);
    else
        value = __shfl_xor_sync(FULL, 1.0f, 2);
    data[threadIdx.x] = value;
}
EXPORT_KERNEL(shuffles_at_two_places)

KERNEL mask_of_half_a_warp(float* data) { data[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 2); }
EXPORT_KERNEL(mask_of_half_a_warp)

KERNEL uninitialised_shared(float* data) { data[threadIdx.x] = shared_floats()[threadIdx.x]; }
EXPORT_KERNEL(uninitialised_shared)

// The cp.async kernels have 32 threads, 512 bytes of shared memory and 2 * 128 floats of `data`.
KERNEL copy_not_waited_for(float* data) {
    float* const s = shared_floats() + threadIdx.x * 4;
    copy_async16(s, data + threadIdx.x * 4, true);
    copy_async_commit();
    data[128 + threadIdx.x] = *s;
    copy_async_wait<0>();
}
EXPORT_KERNEL(copy_not_waited_for)

KERNEL copy_waited_for_too_little(float* data) {
    float* const s = shared_floats() + threadIdx.x * 4;
    copy_async16(s, data + threadIdx.x * 4, true);
    copy_async_commit();
    copy_async_wait<1>();
    data[128 + threadIdx.x] = *s;
    copy_async_wait<0>();
}
EXPORT_KERNEL(copy_waited_for_too_little)

KERNEL copy_left_at_exit(float* data) {
    copy_async16(shared_floats() + threadIdx.x * 4, data + threadIdx.x * 4, true);
    copy_async_commit();
}
EXPORT_KERNEL(copy_left_at_exit)

KERNEL copy_of_another_thread(float* data) {
    float* const s = shared_floats();
    copy_async16(s + threadIdx.x * 4, data + threadIdx.x * 4, true);
    copy_async_commit();
    copy_async_wait<0>();
    data[128 + threadIdx.x] = s[(threadIdx.x ^ 1) * 4];
}
EXPORT_KERNEL(copy_of_another_thread)

KERNEL fine_copy(float* data) {
    float* const s = shared_floats();
    copy_async16(s + threadIdx.x * 4, data + threadIdx.x * 4, threadIdx.x < 31);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    data[128 + threadIdx.x] = s[(threadIdx.x ^ 1) * 4];
}
EXPORT_KERNEL(fine_copy)

// Two blocks, twice as much `data`.
KERNEL read_of_another_block(float* data) {
    if (blockIdx.x == 0)
        data[threadIdx.x] = 1.0f;
    else
        data[128 + threadIdx.x] = data[threadIdx.x];
}
EXPORT_KERNEL(read_of_another_block)

KERNEL write_under_a_reader_of_another_block(float* data) {
    if (blockIdx.x == 1) data[threadIdx.x] = 1.0f;
    const float value = data[threadIdx.x];
    if (blockIdx.x == 0) data[128 + threadIdx.x] = value;
}
EXPORT_KERNEL(write_under_a_reader_of_another_block)

KERNEL sum_without_atomics(float* data) { data[0] += 1.0f; }
EXPORT_KERNEL(sum_without_atomics)

KERNEL fine_atomics(float* data) { atomicAdd(&data[0], 1.0f); }
EXPORT_KERNEL(fine_atomics)

KERNEL read_beside_atomics(float* data) {
    atomicAdd(&data[0], 1.0f);
    if (threadIdx.x == 100) data[1] = data[0];
}
EXPORT_KERNEL(read_beside_atomics)

// The parts of a sum by two blocks, `data` 256 floats; the ticket is behind the parts.
DEVICE void add_parts(float* data, bool is_last) {
    if (is_last) data[128 + threadIdx.x] = data[threadIdx.x] + data[threadIdx.x ^ 64];
}

DEVICE u32* ticket_of(float* data) { return reinterpret_cast<u32*>(data + 192); }

// Each block writes a half.
DEVICE void write_part(float* data) {
    if (threadIdx.x / 64 == blockIdx.x) data[threadIdx.x] = threadIdx.x;
}

KERNEL fine_last_block(float* data) {
    write_part(data);
    const bool is_last = last_of(ticket_of(data), 2);
    if (threadIdx.x < 64) add_parts(data, is_last);
}
EXPORT_KERNEL(fine_last_block)

KERNEL last_block_without_a_fence(float* data) {
    write_part(data);
    __syncthreads();
    const int last = threadIdx.x == 0 ? atomicInc(ticket_of(data), 1) == 1 : 0;
    if (threadIdx.x == 0) __threadfence();
    const bool is_last = __syncthreads_or(last) != 0;
    if (threadIdx.x < 64) add_parts(data, is_last);
}
EXPORT_KERNEL(last_block_without_a_fence)

KERNEL last_block_without_a_fence_behind(float* data) {
    write_part(data);
    __syncthreads();
    if (threadIdx.x == 0) __threadfence();
    const int last = threadIdx.x == 0 ? atomicInc(ticket_of(data), 1) == 1 : 0;
    const bool is_last = __syncthreads_or(last) != 0;
    if (threadIdx.x < 64) add_parts(data, is_last);
}
EXPORT_KERNEL(last_block_without_a_fence_behind)

KERNEL last_block_without_a_barrier(float* data) {
    write_part(data);
    int last = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(ticket_of(data), 1) == 1;
        __threadfence();
    }
    const bool is_last = __syncthreads_or(last) != 0;
    if (threadIdx.x < 64) add_parts(data, is_last);
}
EXPORT_KERNEL(last_block_without_a_barrier)

KERNEL last_block_of_another_ticket(float* data) {
    write_part(data);
    last_of(ticket_of(data) + blockIdx.x, 2);
    if (threadIdx.x < 64) add_parts(data, blockIdx.x == 1);
}
EXPORT_KERNEL(last_block_of_another_ticket)

KERNEL misaligned_vector(float* data) { *reinterpret_cast<float4*>(data + 1) = make_float4(0, 0, 0, 0); }
EXPORT_KERNEL(misaligned_vector)

KERNEL write_to_input(const float* input, float* data) {
    const_cast<float*>(input)[threadIdx.x] = 0.0f;
    data[threadIdx.x] = 0.0f;
}
EXPORT_KERNEL(write_to_input)
