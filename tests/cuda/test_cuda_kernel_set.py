"""The demo model on the emulated device with the kernels of csrc/cuda: the CPU backend's tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from told_drafts import Told

import strata
from strata.backends.base import Backend
from strata.backends.cpu import CpuBackend
from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.cuda.kernels import EmulatedLoader
from strata.backends.cuda.prefill_shapes import PrefillChoice
from strata.backends.hybrid.backend import HybridBackend
from strata.backends.hybrid.options import HybridOptions
from strata.config import load_config
from strata.core import KvDtype, Request, SamplingParams
from strata.device.base import Kernel
from strata.device.emulated import EmulatedDevice
from strata.device.figures import DeviceFigures, LinkFigures
from strata.engine.engine import Engine, EngineOptions
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.speculator import Speculator
from strata.interfaces.models import open_model
from strata.model.decoder import Decoder
from strata.plan.speeds import Speeds
from strata.store.reader import Store

DEMO = Path(strata.__file__).parent / "demo"
ROOT = Path(__file__).resolve().parents[2]
LINK = LinkFigures(1e9, 1e-6, 1e-5)
FIGURES = DeviceFigures(64 << 20, LINK, LINK, 5e8, 1e9, 1e12, 5e-6, 1e-6, 1e9)
SPEEDS = Speeds(1e9, 1e9, 1e9, device_read=1e9, device_macs=1e9, to_device=1e9, to_host=1e9)
SLOTS = 64  # of 6 x 32 experts: some stay, some come and go


class NotingLoader(EmulatedLoader):
    """Remembers which kernel files were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def kernel(self, file: str, entry: str) -> Kernel:
        self.files.add(file)
        return super().kernel(file, entry)


def cuda_backend(
    cpu: CpuBackend, store: Store, loader: NotingLoader, prefill: PrefillChoice
) -> HybridBackend:
    spec = store.spec
    records = [store.expert_layout(i).record_bytes for i in range(spec.layers) if spec.is_moe(i)]
    options = HybridOptions(
        SLOTS if records else 0,
        max(records, default=1),
        SPEEDS,
        misses="fetch",
        rows=64,
        logit_rows=4,
        blocks=32,
        simulated=SPEEDS,
    )
    kernels = CudaKernels(loader, prefill)
    return HybridBackend(EmulatedDevice(FIGURES, seed=3), kernels, cpu, spec, options)


def generated(
    store: Store,
    backend: Backend,
    prompts: list[list[int]],
    tokens: int,
    samplings: Sequence[SamplingParams] = (SamplingParams(temperature=0.0),),
    told: Sequence[list[int]] = (),
    kv_dtype: KvDtype = "int8",
) -> list[list[int]]:
    """samplings: taken in turn. told: answers that are proposed, with a lie now and then."""
    options = EngineOptions(
        context=128,
        pages=12,
        valid_tokens=store.spec.vocab,
        page_tokens=32,
        kv_dtype=kv_dtype,
        chunk=32,
        max_running=4,
    )
    speculator = None
    if told:
        known = {str(i): answer for i, answer in enumerate(told)}
        speculator = Speculator(Told(known, 0.2, store.spec.vocab), LengthOptions(3, fixed=True), None)
    engine = Engine(Decoder(store.spec, store, backend), options, speculator)
    requests = [
        Request(str(i), prompt, replace(samplings[i % len(samplings)], max_tokens=tokens))
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    engine.check_integrity()
    return [request.generated for request in requests]


def questions(count: int) -> list[list[int]]:
    model = open_model(load_config(ROOT / "configs" / "demo.yaml"))
    asked = ("What is the capital of France?", "What is the capital of Samoa?", "Who are you?")
    return [model.encode_chat([{"role": "user", "content": text}]) for text in asked[:count]]


# Every thread of every block is run, about a second for a token of the MoE: prompts are the first six tokens
# of a question, whose experts do not fit the slots either. From 5 rows on they take the kernels of prompts.
@pytest.mark.parametrize(
    ("name", "asked", "tokens", "prefill", "files"),
    [
        ("moe", 1, 2, PrefillChoice(rows=99), {"linear", "expert_gate_up", "expert_down"}),
        ("moe", 1, 2, PrefillChoice(rows=5), {"expert_gate_up_prefill", "expert_down_prefill"}),
        ("draft", 2, 5, PrefillChoice(rows=5), {"linear", "linear_prefill"}),
        ("draft", 1, 3, PrefillChoice(rows=5, int8=True), {"linear_prefill", "linear_w8a8"}),
    ],
)
def test_the_demo_says_the_same_on_cuda_kernels(
    name: str, asked: int, tokens: int, prefill: PrefillChoice, files: set[str]
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    store, cpu = Store.open(DEMO / name), CpuBackend(threads=1, activations="f32")
    prompts = [question[:6] for question in questions(asked)]
    wanted = generated(store, cpu, prompts, tokens)
    loader = NotingLoader()
    backend = cuda_backend(cpu, store, loader, prefill)
    assert generated(store, backend, prompts, tokens) == wanted
    assert files <= loader.files
    backend.check_integrity()
    backend.close()


def test_drafts_that_the_kernels_verify_change_no_text() -> None:
    """Greedy and sampled, beside a request that the host samples (its stop ids are banned)."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not installed")
    store, cpu = Store.open(DEMO / "draft"), CpuBackend(threads=1, activations="f32")
    warm = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=4)
    samplings = (SamplingParams(temperature=0.0), warm, replace(warm, seed=5, repeat_penalty=1.1))
    prompts = questions(3)
    wanted = generated(store, cpu, prompts, 6, samplings)
    loader = NotingLoader()
    backend = cuda_backend(cpu, store, loader, PrefillChoice(rows=17))
    assert generated(store, backend, prompts, 6, samplings, wanted) == wanted
    assert {"head_topk", "verify_draft"} <= loader.files
    backend.close()
