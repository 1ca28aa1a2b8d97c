// Attention of prompts for the head sizes that most models have; attention_prefill_dims.cu has the others.
#include "attention_prefill.cuh"

ATTENTION_PREFILL(int8, 128, Int8Prefill)
ATTENTION_PREFILL(int8, 64, Int8Prefill)
ATTENTION_PREFILL(bf16, 128, Bf16Prefill)
ATTENTION_PREFILL(bf16, 64, Bf16Prefill)
