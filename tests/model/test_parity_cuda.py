"""The CUDA kernels in the emulator against the cpu backend: the same greedy text, for every architecture.

Layers are launched as graphs, so that every replay is compared with what would have been launched; the demo
models of tests/cuda/test_cuda_kernel_set.py go without."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import small_models
from device_figures import ROUND

from strata.backends.base import Backend
from strata.backends.cpu import CpuBackend
from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.cuda.kernels import EmulatedLoader
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.options import HybridOptions
from strata.core import Request, SamplingParams
from strata.device.emulated import EmulatedDevice
from strata.engine.engine import Engine, EngineOptions
from strata.memory.locked_pieces import LockOptions
from strata.model.decoder import Decoder
from strata.plan.speeds import Speeds
from strata.store.options import ConvertOptions
from strata.store.reader import Store

W4 = ConvertOptions(experts="w4g64", shared="w8", head="w8", embed="w8")
SPEEDS = Speeds(1e9, 1e9, 1e9, device_read=1e9, device_macs=1e9, to_device=1e9, to_host=1e9)
PROMPT, TOKENS = 9, 3  # a chunk of 8 rows goes through the kernels for prompts, the ninth through the others
# Two heads of 64 elements; latent attention (MLA) has kernels for one size, that of the published models.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32}


def cuda(cpu: CpuBackend, store: Store, seed: int) -> HybridBackend:
    spec = store.spec
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    options = HybridOptions(
        slots=5 if records else 0,
        slot_bytes=max(records, default=1),
        speeds=SPEEDS,
        misses="fetch",
        rows=16,
        logit_rows=2,
        blocks=8,
        stream_experts=2,
        locks=LockOptions(None),
        graphs=True,
        simulated=SPEEDS,
    )
    device = EmulatedDevice(replace(ROUND, memory_bytes=64 << 20), seed=seed)
    return HybridBackend(device, CudaKernels(EmulatedLoader(), PrefillChoice(rows=8)), cpu, spec, options)


def greedy(store: Store, backend: Backend) -> list[int]:
    options = EngineOptions(
        context=64, pages=4, valid_tokens=store.spec.vocab, kv_dtype="bf16", chunk=8, max_running=2
    )
    engine = Engine(Decoder(store.spec, store, backend), options)
    prompt = parity.tokens(small_models.VOCAB)[:PROMPT]
    request = Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    list(engine.generate(request))
    return request.generated


def sizes_of(case: str) -> dict[str, Any]:
    return LATENT if case.startswith("deepseek") else SIZES


@pytest.mark.parametrize("case", small_models.CASES)
def test_greedy_text_is_that_of_the_cpu_backend(case: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    small_models.save(case, tmp_path / "hf", **sizes_of(case))
    store = parity.to_store(tmp_path / "hf", tmp_path / "store", W4)
    cpu = CpuBackend(threads=1, activations="f32")
    backend = cuda(cpu, store, seed=len(case))
    assert greedy(store, backend) == greedy(store, cpu)
    assert backend.graphs.captured > 0 and backend.graphs.replayed > 0
    backend.check_integrity()
    backend.close()
    backend.device.close()
