// attention_decode.cu for other head sizes: compiled only for the models that need it.
#include "attention_decode.cuh"

ATTENTION_DECODE(int8, 16, Int8Attention)
ATTENTION_DECODE(int8, 32, Int8Attention)
ATTENTION_DECODE(int8, 48, Int8Attention)
ATTENTION_DECODE(int8, 80, Int8Attention)
ATTENTION_DECODE(int8, 96, Int8Attention)
ATTENTION_DECODE(bf16, 16, Bf16Attention)
ATTENTION_DECODE(bf16, 32, Bf16Attention)
ATTENTION_DECODE(bf16, 48, Bf16Attention)
ATTENTION_DECODE(bf16, 80, Bf16Attention)
ATTENTION_DECODE(bf16, 96, Bf16Attention)
