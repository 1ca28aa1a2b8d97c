"""The table of architectures: config.json or GGUF metadata -> ModelSpec and tensor names."""

from __future__ import annotations

from strata.model.architectures import deepseek, glm, gpt_oss, llama, mixtral, qwen
from strata.model.architectures.base import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (
    *llama.ARCHITECTURES,
    *qwen.ARCHITECTURES,
    *mixtral.ARCHITECTURES,
    *glm.ARCHITECTURES,
    *gpt_oss.ARCHITECTURES,
    *deepseek.ARCHITECTURES,
)
BY_HF_TYPE: dict[str, Architecture] = {name: a for a in ARCHITECTURES for name in a.hf_types}
BY_GGUF: dict[str, Architecture] = {a.gguf: a for a in ARCHITECTURES if a.gguf}
