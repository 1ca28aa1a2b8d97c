// attention_prefill.cu for other head sizes: compiled only for the models that need it.
#include "attention_prefill.cuh"

ATTENTION_PREFILL(int8, 16, Int8Prefill)
ATTENTION_PREFILL(int8, 32, Int8Prefill)
ATTENTION_PREFILL(int8, 48, Int8Prefill)
ATTENTION_PREFILL(int8, 80, Int8Prefill)
ATTENTION_PREFILL(int8, 96, Int8Prefill)
ATTENTION_PREFILL(bf16, 16, Bf16Prefill)
ATTENTION_PREFILL(bf16, 32, Bf16Prefill)
ATTENTION_PREFILL(bf16, 48, Bf16Prefill)
ATTENTION_PREFILL(bf16, 80, Bf16Prefill)
ATTENTION_PREFILL(bf16, 96, Bf16Prefill)
