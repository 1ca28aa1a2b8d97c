"""What a plan knows of a model before anything is converted is what the converter then makes."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_files
import pytest
import small_models

from strata.backends.base import KvSpec
from strata.errors import FileFormatError, StrataError
from strata.hardware.profile_file import load_profile, profile_names
from strata.model.counts import count
from strata.model.footprint import (
    contents_of_checkpoint,
    contents_of_config,
    contents_of_store,
    footprint,
)
from strata.model.resolve import resolve
from strata.plan.advice import advise
from strata.plan.footprint import Footprint
from strata.plan.options import PlanOptions
from strata.plan.planner import make_plan
from strata.store.checkpoint import open_checkpoint, open_headers
from strata.store.convert import convert
from strata.store.inspect import inspect_store
from strata.store.manifest import read_manifest
from strata.store.options import ConvertOptions

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "cases" / "configs"
FILES = sorted(CONFIGS.glob("*/*_config.json")) + sorted(CONFIGS.glob("*/*.config.json"))


def of_config(path: Path, options: ConvertOptions | None = None) -> Footprint:
    contents = contents_of_config(json.loads(path.read_text()), options or ConvertOptions())
    return footprint(contents, KvSpec.of(contents.spec, 32, "int8"))


@pytest.mark.parametrize("case", sorted(small_models.CASES))
def test_a_config_tells_what_the_checkpoint_has(case: str, tmp_path: Path) -> None:
    """The same tensors with the same shapes and formats, the same expert records."""
    small_models.save(case, tmp_path)
    options = ConvertOptions()
    source = open_checkpoint(tmp_path)
    found = resolve(source.config, source.tensors, "safetensors")
    whole = contents_of_checkpoint(source, found, options)
    bare = contents_of_config(json.loads((tmp_path / "config.json").read_text()), options)
    assert {n: (t.shape, t.plain or t.format) for n, t in bare.tensors.items()} == {
        n: (t.shape, t.plain or t.format) for n, t in whole.tensors.items()
    }
    layouts = [{n: r.layout() for n, r in contents.layers.items()} for contents in (bare, whole)]
    assert layouts[0] == layouts[1]


def test_the_numbers_are_those_of_the_store(tmp_path: Path) -> None:
    small_models.save("qwen3_moe", tmp_path / "hf")
    source = open_checkpoint(tmp_path / "hf")
    found = resolve(source.config, source.tensors, "safetensors")
    options = ConvertOptions(experts="w4g64", slices=1)
    convert(source, found.spec, found.targets, found.experts, tmp_path / "store", options)
    manifest = read_manifest(tmp_path / "store")
    kv = KvSpec.of(found.spec, 16, "bf16")
    made = footprint(contents_of_store(manifest), kv)
    assert made == footprint(contents_of_checkpoint(source, found, options), kv)
    summary = inspect_store(manifest)
    lines = made.total - summary.bytes  # in memory every tensor begins a line of 256 bytes
    assert 0 <= lines < 256 * len(manifest.tensors)
    assert made.expert_total == summary.parts["experts"].bytes
    assert made.page_bytes == kv.page_bytes and made.kv_dtype == "bf16"
    counts = count(found.spec)
    assert made.expert_macs == counts.per_expert
    assert made.head_macs == counts.head or made.tied
    assert made.static_macs == counts.attention + counts.dense + counts.routers - 2 * 2 * 16


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_is_planned_on_every_machine_or_refused_by_name(path: Path) -> None:
    """Totals are those of transformers; plans add up; what Strata does not support is named."""
    config = json.loads(path.read_text())
    try:
        contents = contents_of_config(config, ConvertOptions())
    except StrataError as error:
        with pytest.raises(type(error)):
            resolve(config, None, "safetensors")
        return
    shared = 0
    for name, tensor in contents.tensors.items():
        if not name.endswith("select_bias"):  # a buffer, not a parameter
            values = 1
            for size in tensor.shape:
                values *= size
            shared += values
    assert shared == count(contents.spec).shared
    model = footprint(contents, KvSpec.of(contents.spec, 32, "int8"))
    for name in profile_names():
        profile, options = load_profile(name), PlanOptions(context=min(8192, model.context))
        try:
            plan = make_plan(model, profile, options)
        except StrataError as error:
            assert error.remedy and any(word.isdigit() for word in error.cause.split())
            continue
        assert sum(part.nbytes for part in plan.host.parts) == plan.host.total
        if plan.device:
            assert sum(part.nbytes for part in plan.device.parts) == plan.device.total
        advised = advise(plan, model, profile, options, {})
        assert all(entry.tokens_per_second > 0 for entry in advised.predictions)


@pytest.mark.skipif(not FILES, reason="the collected configurations are not here")
def test_columns_that_are_no_multiple_of_the_group() -> None:
    """case-23: decided in the plan, not after hours: gpt-oss's experts cannot be cut in two."""
    found = of_config(CONFIGS / "real" / "openai--gpt-oss-120b_config.json")
    assert found.slices == 1 and any("1 slice instead of 2" in note for note in found.notes)
    # 2,880 columns are padded to 2,880 (a multiple of 64) in gate and up and to 45 units of 64 in down.
    assert found.expert_bytes == 13_271_040
    assert of_config(CONFIGS / "real" / "Qwen--Qwen3-30B-A3B_config.json").notes == ()


@pytest.mark.skipif(not FILES, reason="the collected configurations are not here")
def test_qwen3_30b_by_hand() -> None:
    """128 experts of 3 x 768 x 2048 at 4.25 bits in 48 layers; 2 x 4 heads x 132 bytes of KV a layer."""
    found = of_config(CONFIGS / "real" / "Qwen--Qwen3-30B-A3B_config.json")
    assert found.expert_bytes == 3 * 768 * 2048 * 17 // 32  # 4.25 bits
    assert found.expert_total == found.expert_bytes * 128 * 48
    assert found.attention.new_bytes == 2 * 4 * 132
    assert found.kv_ceiling(32_768, 1) == 48 * 2 * 4 * 132 * 32_768
    assert found.head == 151_936 * 2048 + 151_936 * 4  # w8 with an f32 scale per row


def test_the_beginning_of_a_gguf_file_suffices(tmp_path: Path) -> None:
    """Nothing of the weights is there, and the plan is the same; a conversion is still refused."""
    path, head = tmp_path / "whole.gguf", tmp_path / "head.gguf"
    gguf_files.write(small_models.build("qwen3_moe"), path)
    whole = open_checkpoint(path)
    first = min(info.offset for info in whole.tensors.values())
    head.write_bytes(path.read_bytes()[:first])
    with pytest.raises(FileFormatError, match="truncated"):
        open_checkpoint(head)
    made = []
    for source in (whole, open_headers(head)):
        found = resolve(source.config, source.tensors, "gguf")
        contents = contents_of_checkpoint(source, found, ConvertOptions())
        made.append(footprint(contents, KvSpec.of(found.spec, 32, "int8")))
    assert made[0] == made[1]
    with pytest.raises(FileFormatError):
        open_headers(head).rows(next(iter(whole.tensors)), 0, 1)


@pytest.mark.skipif(not FILES, reason="the collected configurations are not here")
def test_a_tied_head_is_read_as_the_embedding() -> None:
    found = of_config(CONFIGS / "real" / "Qwen--Qwen3-0.6B_config.json")
    assert found.tied and found.head == found.embedding == 151_936 * 1024 + 151_936 * 4
    assert found.head_macs == 151_936 * 1024
    assert found.total == found.static + found.embedding
