// Attention with heads of 192 and 256 elements.
#include "attention_wide.cuh"

ATTENTION_WIDE(attention_wide_int8_192, Int8Wide, 192, 192, 6)
ATTENTION_WIDE(attention_wide_int8_256, Int8Wide, 256, 256, 8)
ATTENTION_WIDE(attention_wide_bf16_192, Bf16Wide, 192, 192, 6)
ATTENTION_WIDE(attention_wide_bf16_256, Bf16Wide, 256, 256, 8)
