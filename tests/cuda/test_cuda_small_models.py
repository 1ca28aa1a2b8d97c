"""Small models with attention that the demo has not, on the emulated device: the CPU backend's tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from test_cuda_kernel_set import NotingLoader, cuda_backend, generated
from tiny_model import TinyStore, mla_spec, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.cuda import launch_shapes
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.core import KvDtype
from strata.plan.spec import AttentionSpec, MlaSpec, ModelSpec, RopeSpec


def deepseek_spec() -> ModelSpec:
    """DeepSeek's latent sizes, the others small."""
    spec = mla_spec()
    rope = RopeSpec("default", 1e4, 64, interleaved=True)
    mla = MlaSpec(16, 512, 16, 64, 16)
    return replace(spec, attention=replace(spec.attention, head_dim=80, scale=80**-0.5, rope=rope, mla=mla))


def check_same(
    spec: ModelSpec, prompts: list[list[int]], files: set[str], kv_dtype: KvDtype = "int8"
) -> None:
    """files: kernels that must have run."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    store, cpu = TinyStore(spec), CpuBackend(threads=1, activations="f32")
    wanted = generated(store, cpu, prompts, 3, kv_dtype=kv_dtype)
    loader = NotingLoader()
    backend = cuda_backend(cpu, store, loader, PrefillChoice(rows=5))
    assert generated(store, backend, prompts, 3, kv_dtype=kv_dtype) == wanted
    assert files <= loader.files
    backend.check_integrity()
    backend.close()


def test_latent_attention_says_the_same_on_cuda_kernels() -> None:
    """A prompt of 19 tokens goes by tiles, one of 5 by rows; then both decode."""
    prompts = [[7 * i % 50 for i in range(19)], [3, 1, 4, 1, 5]]
    check_same(deepseek_spec(), prompts, {"attention_latent", "prepare_heads"})


def test_a_prompt_that_is_split_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 tokens, then 18 behind them; splits that have nothing to do are among them."""
    monkeypatch.setattr(launch_shapes, "prefill_splits", lambda longest, blocks: 3)
    attention = AttentionSpec(4, 2, 16, 0.25, RopeSpec("default", 1e4, 16), sinks=True)
    prompts = [[7 * i % 50 for i in range(50)]]
    check_same(moe_spec(attention=attention), prompts, {"attention_prefill_dims", "attention_combine"})


def test_several_scales_per_head_say_the_same_on_cuda_kernels() -> None:
    """A prompt of 19 tokens and one of 5, then both decode."""
    attention = AttentionSpec(4, 2, 64, 0.125, RopeSpec("default", 1e4, 64))
    prompts = [[7 * i % 50 for i in range(19)], [3, 1, 4, 1, 5]]
    check_same(moe_spec(attention=attention), prompts, {"attention_grouped", "prepare_heads"}, "int8g32")
