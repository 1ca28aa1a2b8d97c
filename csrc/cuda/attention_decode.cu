// Attention of single tokens for the head sizes that most models have; attention_decode_dims.cu has the
// others.
#include "attention_decode.cuh"

ATTENTION_DECODE(int8, 128, Int8Attention)
ATTENTION_DECODE(int8, 64, Int8Attention)
ATTENTION_DECODE(bf16, 128, Bf16Attention)
ATTENTION_DECODE(bf16, 64, Bf16Attention)
