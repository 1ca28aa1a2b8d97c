// Attention over int8 pages with a scale per `group` elements of a head, a multiple of 32:
// attention_wide.cuh's, each of whose warps has 32 elements. Single rows and prompts alike.
#include "attention_wide.cuh"

#define ATTENTION_GROUPED(kernel, dim, warps)                                                              \
    extern "C" __global__ void __launch_bounds__(warps* kWarp, 512 / (warps * kWarp))                      \
        kernel(const float* q, const u64* pages, const int* tiles, const float* sinks, float* partial,     \
               float* out, int heads, int kv_heads, int page_tokens, int layer_at, int window, int splits, \
               float scale, int group) {                                                                   \
        attention_wide<Int8Grouped, dim, dim, warps>(                                                      \
            q, pages, tiles, sinks, partial, out,                                                          \
            {heads, kv_heads, page_tokens, layer_at, window, splits, scale, group});                       \
    }                                                                                                      \
    EXPORT_KERNEL(kernel)

ATTENTION_GROUPED(attention_grouped_64, 64, 2)
ATTENTION_GROUPED(attention_grouped_96, 96, 3)
ATTENTION_GROUPED(attention_grouped_128, 128, 4)
ATTENTION_GROUPED(attention_grouped_192, 192, 6)
ATTENTION_GROUPED(attention_grouped_256, 256, 8)
