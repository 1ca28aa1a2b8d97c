"""Conversion of small models: what arrives in the store, what is refused, what the files look like."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SmallModel, small_model
from safetensors import safe_open

from strata.core import ExpertId
from strata.errors import (
    CapacityError,
    FileFormatError,
    IncompleteError,
    StoreError,
    UsageError,
    WeightValueError,
)
from strata.store.convert import ConvertReport, convert
from strata.store.formats import FORMATS
from strata.store.inspect import inspect_source, inspect_store
from strata.store.options import ConvertOptions
from strata.store.pack import Codes, dequantize, unpack
from strata.store.quantize import quantize
from strata.store.reader import Store
from strata.store.source import QuantizedRows, SourceRows, TargetTensor
from strata.store.verify import verify_store

EXTRA = {"tokenizer.json": b'{"model": {}}', "chat_template.jinja": b"{{ messages }}"}
ALL_BF16 = ConvertOptions(experts="bf16", shared="bf16", embed="bf16")


def run(model: SmallModel, out: Path, options: ConvertOptions | None = None, **more: Any) -> ConvertReport:
    return convert(model.source, model.spec, model.targets, model.experts, out, options, **more)


def digest(store: Path) -> dict[str, str]:
    """Every file of a store and its hash."""
    files = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def expert_matrices(store: Store, expert: ExpertId) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate, up and down put together again from the slices of a record."""
    layout = store.expert_layout(expert.layer)
    gates, ups, downs = [], [], []
    for part in range(layout.slices):
        gate_up, down = (unpack(tensor) for tensor in store.expert_part(expert, part))
        halves = gate_up.reshape(-1, 2, 8, layout.hidden).swapaxes(0, 1).reshape(2, -1, layout.hidden)
        gates.append(halves[0, : layout.slice_width])
        ups.append(halves[1, : layout.slice_width])
        downs.append(down)
    return np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)


@pytest.mark.parametrize("width", [128, 100, 12])
@pytest.mark.parametrize("slices", [1, 2])
def test_bf16_store_holds_the_source_exactly(tmp_path: Path, width: int, slices: int) -> None:
    model = small_model(width=width, biases=True)
    arrays = model.source.arrays
    run(model, tmp_path / "s", ConvertOptions(experts="bf16", shared="bf16", embed="bf16", slices=slices))
    with Store.open(tmp_path / "s") as store:
        assert store.spec == model.spec
        assert store.expert_layout(1).slices == (slices if width == 128 else 1)
        assert np.array_equal(unpack(store.tensor("embed.weight")), arrays["emb"])
        assert np.array_equal(store.plain("layers.1.router.weight"), arrays["1.router"])
        qkv = np.concatenate([arrays[f"1.{part}"] for part in "qkv"])
        assert np.array_equal(unpack(store.tensor("layers.1.attn.qkv.weight")), qkv)
        for index in range(4):
            gate, up, down = expert_matrices(store, ExpertId(1, index))
            assert np.array_equal(gate, arrays[f"1.{index}.gate"])
            assert np.array_equal(up, arrays[f"1.{index}.up"])
            assert np.array_equal(down, arrays[f"1.{index}.down"])
        assert all(record.exact for record in store.manifest.tensors.values())
        assert store.manifest.layers[1].exact


def test_biases_follow_the_order_of_the_rows(tmp_path: Path) -> None:
    model = small_model(biases=True)
    arrays = model.source.arrays
    run(model, tmp_path / "s", ALL_BF16)
    store = Store.open(tmp_path / "s")
    layout, record = store.expert_layout(1), store.expert(ExpertId(1, 2))
    down = record[layout.down_bias_offset :][: layout.hidden * 4].view(np.float32)
    assert np.array_equal(down, arrays["1.2.down_b"])
    start = layout.gate_up_bias_offset + layout.gate_up.rows * 4  # slice 1
    gate_up = record[start:][: layout.gate_up.rows * 4].view(np.float32).reshape(-1, 2, 8)
    assert np.array_equal(gate_up[:, 0].ravel(), arrays["1.2.gate_b"][64:])
    assert np.array_equal(gate_up[:, 1].ravel(), arrays["1.2.up_b"][64:])


def test_dense_gate_up_is_interleaved_and_completed(tmp_path: Path) -> None:
    """dense_width 100 is padded to 104 rows of each kind; the four missing rows are zero."""
    model = small_model()
    run(model, tmp_path / "s", ALL_BF16)
    matrix = unpack(Store.open(tmp_path / "s").tensor("layers.0.mlp.gate_up.weight"))
    halves = matrix.reshape(13, 2, 8, 96).swapaxes(0, 1).reshape(2, 104, 96)
    for half, name in zip(halves, ("0.gate", "0.up"), strict=True):
        assert np.array_equal(half[:100], model.source.arrays[name])
        assert not half[100:].any()


@pytest.mark.parametrize("name", ["w4g32", "w4g64", "w4g128", "w4g64m", "w8", "w8g32", "mxfp4", "f16"])
def test_record_holds_what_quantize_makes(tmp_path: Path, name: str) -> None:
    """Cutting into runs, slices and row blocks changes nothing of the quantized values."""
    model = small_model(width=256)
    report = run(model, tmp_path / "s", ConvertOptions(experts=name, shared=name, embed=name))
    fmt = FORMATS[name]
    store = Store.open(tmp_path / "s")
    embed = model.source.arrays["emb"]
    assert np.array_equal(unpack(store.tensor("embed.weight")), dequantize(fmt, quantize(embed, fmt, "")))
    for found, part in zip(expert_matrices(store, ExpertId(1, 3)), ("gate", "up", "down"), strict=True):
        values = model.source.arrays[f"1.3.{part}"]
        assert np.array_equal(found, dequantize(fmt, quantize(values, fmt, "")))
    assert verify_store(tmp_path / "s").problems == ()
    assert report.records == 6 + 4


def test_files_are_valid_and_aligned_safetensors(tmp_path: Path) -> None:
    run(small_model(layers=3), tmp_path / "s", extra_files=EXTRA)
    files = sorted((tmp_path / "s").rglob("*.safetensors"))
    assert [file.name for file in files][:2] == ["expert-000.safetensors", "expert-001.safetensors"]
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            assert all(file.get_tensor(name).numel() for name in names)
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert (8 + length) % 4096 == 0
        align = 4096 if "expert" in path.name else 64
        for name in names:
            entry = header[name]
            assert entry["data_offsets"][0] % (align if entry["dtype"] == "U8" else 2) == 0
    assert (tmp_path / "s" / "tokenizer.json").read_bytes() == EXTRA["tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"], "nothing is left beside the store"


def test_stacking_strides_columns_transposition_and_order(tmp_path: Path) -> None:
    """SourceRows in all its parts, e.g. gpt-oss's interleaved columns and GGUF's permuted rows."""
    model = small_model()
    values = np.round(np.random.default_rng(0).standard_normal((40, 64)) * 8).astype(np.float32)
    model.source.arrays["x"] = values
    order = (3, 1, 0, 2)
    blocks = (
        SourceRows("x", 4, 20, col_start=1, col_stop=33, col_stride=2, transposed=True),
        SourceRows("x", 0, 40, stride=10, col_stop=16, row_order=order),
    )
    expected = np.concatenate([values[4:20, 1:33:2].T, values[::10, :16][list(order)]])
    model.targets.append(TargetTensor("layers.0.x.weight", blocks, (20, 16), "shared"))
    run(model, tmp_path / "s", ALL_BF16)
    assert np.array_equal(unpack(Store.open(tmp_path / "s").tensor("layers.0.x.weight")), expected)


def kept_rows(values: np.ndarray, name: str, exact: bool = True) -> QuantizedRows:
    codes = quantize(values, FORMATS[name], "")
    assert codes.scales is not None
    return QuantizedRows(name, codes.values, codes.scales, codes.minimums, exact)


def keep(model: SmallModel, tensors: dict[str, str]) -> None:
    """Give tensors a quantized source type that a format holds exactly."""
    dtypes = {"w4g32": "Q4_0", "w4g32m": "Q4_1", "w8g32": "Q8_0", "mxfp4": "MXFP4"}
    for name, fmt in tensors.items():
        model.source.dtypes[name] = dtypes[fmt]
        kept = kept_rows(model.source.arrays[name], fmt)
        model.source.kept[name] = kept
        codes = Codes(kept.codes, kept.scales, kept.minimums)
        model.source.arrays[name] = dequantize(FORMATS[fmt], codes)


def all_experts(parts: dict[str, str], count: int = 4) -> dict[str, str]:
    return {f"1.{index}.{part}": fmt for index in range(count) for part, fmt in parts.items()}


@pytest.mark.parametrize("fmt", ["w4g32", "w4g32m", "w8g32", "mxfp4"])
def test_quantized_sources_are_kept_bit_by_bit(tmp_path: Path, fmt: str) -> None:
    model = small_model()
    keep(model, {"emb": fmt, **all_experts({"gate": fmt, "up": fmt, "down": fmt})})
    run(model, tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert store.manifest.tensors["embed.weight"].format == fmt
    assert store.manifest.tensors["embed.weight"].exact
    assert (store.manifest.layers[1].gate_up, store.manifest.layers[1].exact) == (fmt, True)
    assert np.array_equal(unpack(store.tensor("embed.weight")), model.source.arrays["emb"])
    for found, part in zip(expert_matrices(store, ExpertId(1, 1)), ("gate", "up", "down"), strict=True):
        assert np.array_equal(found, model.source.arrays[f"1.1.{part}"])


def test_mixed_types_fall_back_by_part_and_say_so(tmp_path: Path) -> None:
    """Q4_0 gate and up stay, a Q6_K down becomes w8g32; asked formats win over both."""
    model = small_model()
    keep(model, all_experts({"gate": "w4g32", "up": "w4g32"}))
    for index in range(4):
        model.source.dtypes[f"1.{index}.down"] = "Q6_K"
    report = run(model, tmp_path / "s")
    layer = Store.open(tmp_path / "s").manifest.layers[1]
    assert (layer.gate_up, layer.down, layer.exact) == ("w4g32", "w8g32", False)
    assert any("Q6_K" in note and "w8g32" in note for note in report.notes)
    run(model, tmp_path / "asked", ConvertOptions(experts="w4g64"))
    assert Store.open(tmp_path / "asked").manifest.layers[1].gate_up == "w4g64"
    run(model, tmp_path / "fresh", ConvertOptions(keep_quantized=False))
    assert Store.open(tmp_path / "fresh").manifest.layers[1].down == "w4g64"


def test_exact_keeps_what_a_source_is(tmp_path: Path) -> None:
    """What others are measured against: no default of four bits, and none of eight for Q6_K."""
    model = small_model()
    keep(model, all_experts({"gate": "w4g32", "up": "w4g32"}))
    for index in range(4):
        model.source.dtypes[f"1.{index}.down"] = "Q6_K"
    model.source.dtypes["emb"] = "F16"
    run(model, tmp_path / "s", ConvertOptions(exact=True))
    manifest = Store.open(tmp_path / "s").manifest
    assert (manifest.layers[1].gate_up, manifest.layers[1].down) == ("w4g32", "bf16")
    assert manifest.tensors["embed.weight"].format == "f16"
    assert manifest.tensors["layers.0.attn.qkv.weight"].format == "bf16"
    assert "exact" not in ConvertOptions().identity(), "stores from before keep their names"


def test_gate_and_up_of_different_types_share_a_format(tmp_path: Path) -> None:
    model = small_model()
    keep(model, all_experts({"gate": "w4g32", "up": "w4g32m", "down": "w4g32"}))
    run(model, tmp_path / "s")
    layer = Store.open(tmp_path / "s").manifest.layers[1]
    assert (layer.gate_up, layer.down) == ("w8g32", "w4g32")


def test_broken_scales_of_a_kept_type_are_refused(tmp_path: Path) -> None:
    """case-22: one Inf scale among thousands is enough to ruin a model."""
    model = small_model()
    keep(model, all_experts({"gate": "w4g32", "up": "w4g32", "down": "w4g32"}))
    model.source.kept["1.2.up"].scales[5, 1] = np.inf
    with pytest.raises(WeightValueError, match=r"1\.2\.up: 1 scales of its w4g32 blocks are NaN or Inf"):
        run(model, tmp_path / "s")


def test_nan_is_refused_or_recorded(tmp_path: Path) -> None:
    """case-22: tensor, first index and count; --allow-nan is written into the manifest."""
    model = small_model()
    model.source.arrays["1.3.down"][7, 9] = np.nan
    model.source.arrays["1.3.down"][90, 0] = np.inf
    with pytest.raises(WeightValueError, match=r"1\.3\.down: nan at \[7, 9\].* 2 in the whole tensor"):
        run(model, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    report = run(model, tmp_path / "t", ConvertOptions(experts="bf16", allow_nan=True))
    manifest = Store.open(tmp_path / "t").manifest
    assert report.replaced == manifest.replaced == {"1.3.down": 2}
    assert manifest.options["allow_nan"] is True
    down = expert_matrices(Store.open(tmp_path / "t"), ExpertId(1, 3))[2]
    assert down[7, 9] == down[90, 0] == 0
    assert np.isnan(model.source.arrays["1.3.down"][7, 9]), "the source itself is left alone"


def test_overrides_by_layer(tmp_path: Path) -> None:
    model = small_model(layers=4)
    run(model, tmp_path / "s", ConvertOptions(overrides={"experts.2-3": "w8", "shared.0": "bf16"}))
    manifest = Store.open(tmp_path / "s").manifest
    assert [manifest.layers[i].down for i in (1, 2, 3)] == ["w4g64", "w8", "w8"]
    assert manifest.tensors["layers.0.attn.qkv.weight"].format == "bf16"
    assert manifest.tensors["layers.1.attn.qkv.weight"].format == "w4g128"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "int4"}, "experts: unknown weight format 'int4'"),
        ({"overrides": {"head.1": "w8"}}, "override 'head.1' names no layers"),
        ({"overrides": {"experts.x": "w8"}}, "override 'experts.x'"),
        ({"overrides": {"experts.3-1": "w8"}}, "override 'experts.3-1'"),
        ({"overrides": {"experts.\u0663": "w8"}}, "override 'experts.\u0663'"),
        ({"slices": 0}, "slices is 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConvertOptions(**options)


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("experts.9", "experts is in layers 1 to 3"),
        ("experts.0", "experts is in layers 1 to 3"),
        ("mlp.down.2-3", "it has no mlp.down"),
        ("attn.q_a.0-3", "it has no attn.q_a"),
    ],
)
def test_a_format_for_what_is_not_there_is_refused(tmp_path: Path, key: str, there: str) -> None:
    """It would change nothing, and who asked for it would not know."""
    with pytest.raises(UsageError, match=f"{key}=w8 names nothing that this model has") as found:
        run(small_model(layers=4), tmp_path / "s", ConvertOptions(overrides={key: "w8"}))
    assert there in str(found.value.remedy)
    assert list(tmp_path.iterdir()) == []


def test_fewer_slices_are_said(tmp_path: Path) -> None:
    """case-23: the plan, not the end, says what a width does not allow."""
    report = run(small_model(width=100), tmp_path / "s")
    assert report.notes == ("experts: 1 slice instead of 2: width 100 is no multiple of 2 x 64 (w4g64)",)


def test_a_full_disk_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("strata.store.writer.shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        CapacityError, match=r"needs [\d.]+ MiB \([\d,]{9,} bytes\), 1000 bytes are available"
    ):
        run(small_model(), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_store_is_replaced_only_by_force(tmp_path: Path) -> None:
    """case-39: a reader that has the old store mapped keeps its data."""
    old, new = small_model(seed=1), small_model(seed=2)
    run(old, tmp_path / "s", ALL_BF16)
    reader = Store.open(tmp_path / "s")
    with pytest.raises(StoreError, match="exists already"):
        run(new, tmp_path / "s", ALL_BF16)
    run(new, tmp_path / "s", ConvertOptions(experts="bf16", shared="bf16", embed="bf16", force=True))
    assert np.array_equal(unpack(reader.tensor("embed.weight")), old.source.arrays["emb"])
    assert np.array_equal(expert_matrices(reader, ExpertId(1, 3))[2], old.source.arrays["1.3.down"])
    fresh = unpack(Store.open(tmp_path / "s").tensor("embed.weight"))
    assert np.array_equal(fresh, new.source.arrays["emb"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_force_never_replaces_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="is not a store; it is left alone"):
        run(small_model(), tmp_path / "s", ConvertOptions(force=True))
    assert (tmp_path / "s" / "thesis.tex").read_text() == "precious"


def test_source_and_model_must_agree(tmp_path: Path) -> None:
    model = small_model()
    model.source.arrays["1.2.down"] = model.source.arrays["1.2.down"][:, :64]
    with pytest.raises(
        FileFormatError, match=r"expert 2 of layer 1: 1\.2\.down gives \[96, 64\], not \[96, 128\]"
    ):
        run(model, tmp_path / "s")
    model = small_model()
    model.source.arrays["norm"] = model.source.arrays["norm"][:50]
    with pytest.raises(FileFormatError, match=r"final_norm\.weight is \[96\] .* norm has 50"):
        run(model, tmp_path / "s")
    model = small_model()
    del model.source.arrays["emb"]
    with pytest.raises(FileFormatError, match="needs tensor emb"):
        run(model, tmp_path / "s")
    model = small_model()
    model.experts.pop()
    with pytest.raises(IncompleteError, match="layer 1 has experts"):
        run(model, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "manifest.json", ".hidden", "a/b"])
def test_extra_files_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot be the name"):
        run(small_model(), tmp_path / "s", extra_files={name: b""})


def test_threads_change_nothing(tmp_path: Path) -> None:
    model = small_model(layers=3)
    for threads in (1, 3):
        run(model, tmp_path / str(threads), ConvertOptions(threads=threads), extra_files=EXTRA)
    assert digest(tmp_path / "1") == digest(tmp_path / "3")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    run(small_model(), tmp_path / "s", progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][2] == "layer 1, expert 3"


def test_inspect_counts_the_same_parameters_on_both_sides(tmp_path: Path) -> None:
    model = small_model(width=128)
    run(model, tmp_path / "s")
    before = inspect_source(model.source, model.spec, model.targets, model.experts)
    after = inspect_store(Store.open(tmp_path / "s").manifest)
    assert before.parts["experts"].parameters == after.parts["experts"].parameters == 4 * 3 * 128 * 96
    assert before.expert_bytes == (2 * 3 * 128 * 96,) * 2
    assert before.parts["embed"].formats == {"BF16": 2 * 70 * 96}
    assert after.parts["experts"].bytes == 4 * after.expert_bytes[0]
    assert set(after.parts["experts"].formats) >= {"w4g64"}
    files = (tmp_path / "s").rglob("*.safetensors")
    assert after.bytes == sum(path.stat().st_size for path in files) - 5 * 4096
