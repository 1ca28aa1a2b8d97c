// Latent attention as DeepSeek V2 and V3 and Kimi-K2 have it: keys of 512 + 64 elements, values their first
// 512.
#include "attention_wide.cuh"

ATTENTION_WIDE(attention_latent_int8_576, Int8Latent, 576, 512, 8)
ATTENTION_WIDE(attention_latent_bf16_576, Bf16Latent, 576, 512, 8)
