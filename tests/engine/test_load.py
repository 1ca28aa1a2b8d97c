"""From a store on disk to an engine: sizes, refusals, and the same text from both backends."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.backends.base import KvSpec
from strata.config import Override, load_config
from strata.core import KvDtype, Request, SamplingParams
from strata.engine.device_run import DeviceRun
from strata.engine.engine import Engine
from strata.engine.load import load_engine, plan_store
from strata.errors import CapacityError, ConfigError, StoreError
from strata.hardware.numa import MemoryNode
from strata.hardware.profile import HardwareProfile, Processor, Rate
from strata.hardware.profile_file import load_profile
from strata.interfaces.models import open_model
from strata.model.resolve import resolve
from strata.plan.kv import KvNeed, kv_size
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.store.checkpoint import open_checkpoint
from strata.store.convert import convert
from strata.store.options import ConvertOptions
from strata.store.reader import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
NEED = KvNeed("tiny", longest=256, page_tokens=16, page_bytes=1000)
PROMPT = [5, 77, 3, 120, 42]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE, experts and shared layers in 4 bit."""
    folder = tmp_path_factory.mktemp("load")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "checkpoint")
    source = open_checkpoint(folder / "checkpoint")
    resolved = resolve(source.config, source.tensors, source.kind)
    options = ConvertOptions(experts="w4g64", shared="w4g64", head="w8", embed="bf16", slices=1)
    convert(source, resolved.spec, resolved.targets, resolved.experts, folder / "store", options)
    return folder / "store"


def machine(available: int = 1 << 30) -> HardwareProfile:
    """Two cores, and as much free memory as told."""
    node = MemoryNode(0, (0, 1), (0, 1), 1 << 30, 1 << 30)
    processor = Processor("test", "avx2", Rate(1e11, "assumed"))
    return HardwareProfile("test", processor, (node,), (Rate(2e10, "assumed"),), available)


def load(store: Path, threads: int = 2, kv_dtype: KvDtype = "int8", **options: Any) -> Engine:
    """An engine by the plan for that machine."""
    plan = plan_store(store, machine(), PlanOptions(threads=threads), kv_dtype=kv_dtype)
    return load_engine(store, plan, **options)


def answer(engine: Engine) -> list[int]:
    return list(engine.generate(Request("a", PROMPT, GREEDY)))


def test_both_backends_give_the_same_text(store: Path) -> None:
    exact = load(store, backend="cpu", activations="f32", kv_dtype="f32")
    truth = load(store, backend="reference", threads=1, kv_dtype="f32")
    assert answer(exact) == answer(truth)


def test_the_engine_is_as_planned(store: Path) -> None:
    options = PlanOptions(context=100, requests=3, chunk=7, threads=1)
    plan = plan_store(store, machine(), options, kv_dtype="bf16", page_tokens=16)
    engine = load_engine(store, plan)
    found = engine.options
    assert (found.context, found.pages, found.page_tokens) == (100, 3 * 7, 16)
    assert (found.kv_dtype, found.chunk, found.valid_tokens) == ("bf16", 7, 128)
    assert engine.decoder.backend.cpu.threads == 1 == len(plan.cpus)  # type: ignore[attr-defined]
    assert len(answer(engine)) == 12


def test_memory_is_a_cache_of_the_disk_where_the_plan_leaves_experts_there(store: Path) -> None:
    """The same answer with room for 5 of 16 experts, and the next start reads the favourites at once."""
    plan = plan_store(store, machine(), PlanOptions(threads=2))
    small = replace(plan, host=replace(plan.host, in_memory=5, disk_bytes=1))
    engine = load_engine(store, small)
    assert answer(engine) == answer(load(store))
    tier = engine.decoder.tier
    assert tier is not None and tier.cache.statistics.evictions
    del engine, tier
    gc.collect()
    assert (store / "heat.json").is_file()
    warm = load_engine(store, small).decoder.tier
    assert warm is not None and not warm.cache.free


def test_no_room_for_a_single_expert_is_an_error_with_its_size(store: Path) -> None:
    plan = plan_store(store, machine(), PlanOptions(threads=2))
    with pytest.raises(CapacityError, match=r"expert of \d+ bytes"):
        load_engine(store, replace(plan, host=replace(plan.host, in_memory=0, disk_bytes=1)))


def test_a_file_that_is_cut_while_it_serves_ends_the_request_with_the_reason(
    store: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    plan = plan_store(copy, machine(), PlanOptions(threads=2))
    engine = load_engine(copy, replace(plan, host=replace(plan.host, in_memory=2, disk_bytes=1)))
    files = sorted((copy / "experts").iterdir())
    assert len(answer(engine)) == 12
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StoreError, match="is shorter than it was"):
        answer(engine)
    engine.check_integrity()


def test_what_was_asked_and_is_not_given_is_said(store: Path) -> None:
    plan = plan_store(store, machine(), PlanOptions(threads=99))
    with pytest.warns(RuntimeWarning, match="99 threads asked for, 2 CPUs allowed"):
        load_engine(store, plan)


def test_valid_tokens_bound_the_answer(store: Path) -> None:
    limit = sorted(answer(load(store)))[6]
    engine = load(store, valid_tokens=limit)
    assert max(answer(engine)) < limit


def test_no_torch_for_the_cpu_backend() -> None:
    """`strata run` must not wait seconds for torch."""
    code = (
        "import sys; import strata.interfaces.models, strata.backends.cpu; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_store(store: Path, tmp_path: Path) -> None:
    plan = plan_store(store, machine())
    with pytest.raises(StoreError):
        load_engine(tmp_path, plan)
    with pytest.raises(StoreError):
        plan_store(tmp_path, machine())


@pytest.mark.parametrize(
    ("context", "kv_pages", "requests", "expected"),
    [
        (None, 100, 1, (256, 16)),
        (None, 10, 1, (160, 10)),
        (None, 10, 3, (48, 9)),
        (100, 100, 1, (100, 7)),
        (100, 100, 4, (100, 28)),
        (2, 1, 1, (2, 1)),
    ],
)
def test_size_of_the_kv_cache(
    context: int | None, kv_pages: int, requests: int, expected: tuple[int, int]
) -> None:
    """Pages of 16 tokens; the context asked for, or as much of the model's 256 as fits."""
    size = kv_size(NEED, context, kv_pages * NEED.page_bytes, requests)
    assert (size.context, size.pages) == expected


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"257 tokens, but .* was made for 256"):
        kv_size(NEED, 257, 1 << 30, 1)
    needed, budget = 2 * NEED.page_bytes, 2 * NEED.page_bytes - 1
    with pytest.raises(
        CapacityError, match=f"needs {needed} bytes for 1 x 32 tokens, {budget} are available"
    ):
        kv_size(NEED, 32, budget, 1)
    with pytest.raises(CapacityError, match=r"lower model\.context"):
        kv_size(NEED, None, 0, 1)


def test_a_small_machine_shortens_the_context(store: Path) -> None:
    """Half of what is free is the most that KV pages may take, and an eighth the least."""
    kv = KvSpec.of(Store.open(store).spec, 16, "f32")
    free = 20 * kv.page_bytes
    plan = plan_store(store, machine(free), kv_dtype="f32", page_tokens=16)
    assert 2 * 16 <= plan.kv.context <= 10 * 16


def check_taken(engine: Engine, plan: Plan) -> None:
    """What the backend took of the device is what the plan has parts for."""
    backend: Any = engine.decoder.backend
    sizes, planned = backend.memory.region.sizes, plan.device
    assert planned is not None
    parts = {part.name: part.nbytes for part in planned.parts}
    assert sizes.static == parts["static weights"] + parts["head"] + parts.get("KV staging", 0)
    assert sizes.shared == parts["expert slots"] + parts.get("KV pages", 0)
    assert sizes.workspace <= parts["workspace"]
    assert sizes.workspace > planned.stream.places * planned.slot_bytes
    assert backend.memory.region.slots == planned.slots
    backend.close()
    backend.device.close()


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("asked", [{}, {"chunk": 1, "slots": 4}, {"requests": 9, "chunk": 32}])
def test_the_device_is_filled_as_planned(store: Path, tier: Any, asked: dict[str, Any]) -> None:
    profile = load_profile("rtx3090-2x-e5-2680v4")
    with_card = replace(machine(), device=profile.device)
    plan = plan_store(store, with_card, PlanOptions(context=100, kv_tier=tier, **asked))
    engine = load_engine(store, plan, device=DeviceRun(with_card))
    check_taken(engine, plan)


def test_the_demo_fills_the_device_as_planned() -> None:
    asked = {"device.use": "emulated", "model.context": "256"}
    demo = Path(__file__).parents[2] / "configs" / "demo.yaml"
    model = open_model(load_config(str(demo), [Override(*pair, "test") for pair in asked.items()]))
    check_taken(model.engine, model.plan)


def emulated(store: Path) -> Engine:
    with_card = replace(machine(), device=load_profile("rtx3090-2x-e5-2680v4").device)
    plan = plan_store(store, with_card, PlanOptions(context=100, slots=8))
    return load_engine(store, plan, device=DeviceRun(with_card))


def test_a_run_with_a_device_keeps_what_it_learned(store: Path, tmp_path: Path) -> None:
    """Heat is written when the engine goes, not where nothing was decoded; the next run begins with it."""
    copy = Path(shutil.copytree(store, tmp_path / "copy", ignore=shutil.ignore_patterns("heat.json")))
    emulated(copy)
    gc.collect()
    assert not (copy / "heat.json").exists()
    first = answer(emulated(copy))
    gc.collect()
    written = (copy / "heat.json").read_bytes()
    engine: Any = emulated(copy)
    assert any(engine.decoder.backend.options.heat.shares(layer).any() for layer in range(2))
    assert answer(engine) == first
    del engine
    gc.collect()
    assert (copy / "heat.json").read_bytes() != written


def test_nothing_is_written_into_the_package() -> None:
    package = Path(strata.__file__).parent
    before = {path: path.stat().st_mtime_ns for path in package.rglob("heat.json")}
    asked = {"device.use": "emulated", "model.context": "256"}
    demo = Path(__file__).parents[2] / "configs" / "demo.yaml"
    model = open_model(load_config(str(demo), [Override(*pair, "test") for pair in asked.items()]))
    answer(model.engine)
    backend: Any = model.engine.decoder.backend
    assert backend.options.heat.changed
    del model, backend
    gc.collect()
    assert {path: path.stat().st_mtime_ns for path in package.rglob("heat.json")} == before
