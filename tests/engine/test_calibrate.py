"""Calibration: statistics equal those of activations computed at once, and a stopped run goes on."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tiny_model import TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import KvSpec
from strata.backends.reference import ReferenceBackend
from strata.backends.reference_ffn import expert_of
from strata.core import Batch, ExpertId, Sequence
from strata.engine.calibrate.accumulate import Accumulator
from strata.engine.calibrate.run import calibrate
from strata.errors import CapacityError, NumericalError, StoreError
from strata.model.decoder import Decoder
from strata.plan.spec import ModelSpec
from strata.store.calibration import CalibrationStats, DataFile, StatsInfo
from strata.store.calibration_inputs import linear_inputs

Floats = NDArray[np.float32]
WINDOWS = [[3, 14, 15, 9, 2, 6, 5], [35, 8, 9, 7, 9, 3, 2, 38, 46], [26, 4, 33]]
TOKENS = sum(map(len, WINDOWS))


def info_of(spec: ModelSpec, *, moments: bool = True, min_tokens: int = 1) -> StatsInfo:
    data = (DataFile("a.txt", 5, "0", TOKENS),)
    return StatsInfo(spec, "0", TOKENS, 9, min_tokens, moments, data, "test")


class Watcher(ReferenceBackend):
    """Keeps every input of a matrix, by name; of routed experts by (layer, expert) and part."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Floats]] = {}

    def keep(self, name: str, x: Any) -> None:
        self.seen.setdefault(name, []).append(x.numpy().copy().reshape(-1, x.shape[-1]))

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        self.keep(weight.tensor.name, x)
        return super().linear(x, weight, bias)

    def head_linear(self, x: Any, weight: Any, heads: int) -> Any:
        for head in range(heads):
            self.keep(f"{weight.tensor.name}[{head}]", x.view(len(x), heads, -1)[:, head])
        return super().head_linear(x, weight, heads)

    def _grouped_query(self, hidden: Any, part: Any, cache: Any, batch: Any) -> Any:
        """Column by column of hidden: what attention makes of it in the place of every head's first value."""
        import torch

        heads, kv, dim = part.spec.heads, part.spec.kv_heads, part.spec.head_dim
        q, k, _ = self._heads(super().linear(hidden, part.qkv, part.qkv_bias), part, batch)
        mixed = torch.zeros(kv, *hidden.shape)
        for col in range(hidden.shape[1]):
            values = torch.zeros(len(hidden), kv, dim)
            values[:, :, 0] = hidden[:, None, col]
            found = self.attention(
                q.clone(), k.clone(), values.reshape(len(hidden), -1), cache, batch, part.call
            )
            for row, head in itertools.product(range(len(hidden)), range(kv)):
                of = head * (heads // kv) + row % (heads // kv)
                mixed[head, row, col] = found[row, of * dim]
        self.keep(part.qkv.tensor.name.replace("qkv.weight", "v"), mixed)
        return super()._grouped_query(hidden, part, cache, batch)

    def ffn(self, x: Any, gate_up: Any, down: Any, width: int, gating: Any) -> Any:
        return self.linear(self._gated(self.linear(x, gate_up), width, gating), down)

    def _gated(self, both: Any, width: int, gating: Any) -> Any:
        import torch

        from strata.backends.reference_ffn import gated, separate

        rows = [gated(*separate(row, width), gating) for row in both]
        return torch.stack(rows)

    def experts(self, x: Any, ids: Any, weights: Any, bank: Any, gating: Any, active: Any = None) -> Any:
        for row, chosen in zip(x, ids, strict=True):
            for index in chosen.tolist():
                ffn = expert_of(bank.record(index), bank.layout, self.dtype).slices[0]
                both = ffn.gate_up @ row + (0 if ffn.gate_up_bias is None else ffn.gate_up_bias)
                h = self._gated(both[None], bank.layout.width, gating)
                base = f"layers.{bank.layer}.experts"
                self.keep(f"{base}.gate_up[{index}]", row)
                self.keep(f"{base}.down[{index}]", h)
                self.keep(f"{base}.gate_up.pooled", row)
                self.keep(f"{base}.down.pooled", h)
        return super().experts(x, ids, weights, bank, gating, active)


def watched(spec: ModelSpec, store: TinyStore) -> dict[str, Floats]:
    """Inputs of every matrix, by the decoder's own forward pass of the reference, one window at a time."""
    backend = Watcher()
    decoder = Decoder(spec, store, backend)
    for window in WINDOWS:
        rows = np.arange(len(window), dtype=np.int32)
        batch = Batch(np.array(window, np.int32), rows, (Sequence(0, len(rows), 0, rows[:1]),), rows)
        decoder.forward(batch, backend.kv_cache(KvSpec.of(spec, 16, "f32"), 1))
    return {name: np.concatenate(parts) for name, parts in backend.seen.items()}


SPECS = {
    "dense": dataclasses.replace(moe_spec(), moe_layers=(), experts=None, tied_head=True),
    "moe": moe_spec(3, residual_scale=0.6, embedding_scale=2.0, logit_scale=0.5),
    "gpt_oss": gpt_oss_spec(),
    "mla": mla_spec(),
    "mla without a low rank": mla_spec(0),
}


@pytest.mark.parametrize("name", SPECS)
def test_statistics_are_those_of_the_references_activations(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    store = TinyStore(spec)
    calibrate(store, info_of(spec), WINDOWS, tmp_path / "s", threads=1)
    stats, seen = CalibrationStats(tmp_path / "s"), watched(spec, store)
    compared = 0
    for entry in linear_inputs(spec):
        for member in range(entry.members):
            label = entry.name if entry.members == 1 else f"{entry.name}[{member}]"
            wanted = "embed.weight" if spec.tied_head and label == "head.weight" else label
            if wanted not in seen:
                assert stats.linear(entry.name, member).tokens == 0
                continue
            compare(stats, entry.name, member, seen[wanted])
            compared += 1
    assert compared > 8


def compare(stats: CalibrationStats, name: str, member: int, x: Floats) -> None:
    found = stats.linear(name, member)
    if not name.endswith("gate_up.pooled"):  # counts every row once, see linear_inputs
        assert found.tokens == len(x), name
    size = np.abs(x)
    close(found.absmax, size.max(axis=0))
    close(found.p999, np.quantile(size, 0.999, axis=0, method="inverted_cdf"))
    close(found.mean_abs, size.mean(axis=0))
    close(found.mean_square, (x * x).mean(axis=0))
    assert found.moments is not None
    close(found.moments, x.T @ x / len(x))


def close(found: Floats, wanted: Floats) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())


@settings(max_examples=60)
@given(
    x=arrays(
        np.float32, st.tuples(st.integers(1, 60), st.integers(1, 5)), elements=st.floats(-9, 9, width=32)
    ),
    repeat=st.sampled_from([1, 40, 90]),
    cut=st.integers(1, 400),
)
def test_the_percentile_is_exact_however_the_rows_come(x: Floats, repeat: int, cut: int) -> None:
    rows = np.concatenate([x * (1 + 0.001 * i) for i in range(repeat)]).astype(np.float32)
    found = Accumulator(rows.shape[1], len(rows), False)
    for start in range(0, len(rows), cut):
        found.add(rows[start : start + cut])
    absmax, p999, mean_abs, mean_square = found.result().vectors
    assert np.array_equal(absmax, np.abs(rows).max(axis=0))
    assert np.array_equal(p999, np.quantile(np.abs(rows), 0.999, axis=0, method="inverted_cdf"))
    np.testing.assert_allclose(mean_abs, np.abs(rows).mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(mean_square, (rows.astype(float) ** 2).mean(axis=0), rtol=1e-4, atol=1e-12)


class Stop(Exception):  # noqa: N818  # no error of the run: somebody pulls the plug
    pass


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_stopped_run_goes_on_where_it_was(moment: int, tmp_path: Path) -> None:
    spec = moe_spec(3)
    calibrate(TinyStore(spec), info_of(spec), WINDOWS, tmp_path / "whole", threads=1)
    left = iter(range(moment))

    def progress(done: int, total: int, what: str) -> None:
        if next(left, None) is None:
            raise Stop

    with pytest.raises(Stop):
        calibrate(TinyStore(spec), info_of(spec), WINDOWS, tmp_path / "s", threads=1, progress=progress)
    assert not (tmp_path / "s").exists()
    store = TinyStore(spec)
    report = calibrate(store, info_of(spec), WINDOWS, tmp_path / "s", threads=1)
    assert (tmp_path / "s").read_bytes() == (tmp_path / "whole").read_bytes()
    assert {expert.layer for expert in store.experts_read} == set(range(max(1, report.resumed), 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "whole"]


def test_other_tokens_do_not_continue_a_run(tmp_path: Path) -> None:
    spec = moe_spec(2)
    stop_after(spec, tmp_path / "s", layers=1)
    with pytest.raises(StoreError, match=r"something else: tokens is [0-9a-f]{16} there, [0-9a-f]{16} now"):
        calibrate(TinyStore(spec), info_of(spec), [*WINDOWS[:2], [1, 2, 3]], tmp_path / "s", threads=1)
    calibrate(
        TinyStore(spec), info_of(spec), [*WINDOWS[:2], [1, 2, 3]], tmp_path / "s", threads=1, force=True
    )


def test_states_that_changed_on_the_disk_are_not_continued(tmp_path: Path) -> None:
    spec = moe_spec(2)
    stop_after(spec, tmp_path / "s", layers=1)
    with (tmp_path / "s.partial" / "states.1").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(StoreError, match=r"states\.1: the checksum is"):
        calibrate(TinyStore(spec), info_of(spec), WINDOWS, tmp_path / "s", threads=1)


def stop_after(spec: ModelSpec, out: Path, layers: int) -> None:
    def progress(done: int, total: int, what: str) -> None:
        if what == f"layer {layers}":
            raise Stop

    with pytest.raises(Stop):
        calibrate(TinyStore(spec), info_of(spec), WINDOWS, out, threads=1, progress=progress)


class CountingStore(TinyStore):
    """Counts which arrays that it handed out are alive."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.alive: dict[str, weakref.ref[Any]] = {}
        self.most: list[set[str]] = []

    def tensor(self, name: str) -> Any:
        found = super().tensor(name)
        self.packed.clear()
        data = found.data.copy()
        self._count(name, data)
        return dataclasses.replace(found, data=data)

    def expert(self, expert: ExpertId) -> Any:
        data = super().expert(expert).copy()
        self.records.clear()
        self._count(f"{expert}", data)
        return data

    def _count(self, name: str, data: Any) -> None:
        self.alive[name] = weakref.ref(data)
        self.most.append({key for key, ref in self.alive.items() if ref() is not None})


def test_one_layer_and_one_expert_are_in_memory_at_a_time(tmp_path: Path) -> None:
    spec = mla_spec()
    spec = dataclasses.replace(spec, layers=4, moe_layers=(False, True, True, True))
    store = CountingStore(spec)
    calibrate(store, info_of(spec), WINDOWS, tmp_path / "s", threads=1)
    for names in store.most:
        layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
        experts = [name for name in names if name.startswith("ExpertId")]
        assert len(layers) <= 1 and len(experts) <= 1, names
    assert len(store.most) > 40


def test_experts_that_saw_few_rows_are_listed(tmp_path: Path) -> None:
    spec = moe_spec(2)
    report = calibrate(TinyStore(spec), info_of(spec, min_tokens=4), WINDOWS, tmp_path / "s", threads=1)
    counts = CalibrationStats(tmp_path / "s").tokens("layers.1.experts.gate_up").tolist()
    assert sum(counts) == TOKENS * 2
    assert report.starved == {ExpertId(1, i): n for i, n in enumerate(counts) if n < 4}
    assert 0 < len(report.starved) < 8


def test_without_moments_the_file_is_small(tmp_path: Path) -> None:
    spec = moe_spec(2)
    sizes = {}
    for moments in (True, False):
        out = tmp_path / f"{moments}"
        sizes[moments] = calibrate(
            TinyStore(spec), info_of(spec, moments=moments), WINDOWS, out, threads=1
        ).bytes
    assert CalibrationStats(tmp_path / "False").linear("head.weight").moments is None
    assert sizes[False] < sizes[True] / 2


class BrokenStore(TinyStore):
    def plain(self, name: str) -> Floats:
        values = super().plain(name)
        if name == "layers.1.attn_norm.weight":
            values[3] = np.nan
        return values


def test_nan_ends_the_run_and_names_the_layer(tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match="layer 1: NaN or Inf"):
        calibrate(BrokenStore(moe_spec(2)), info_of(moe_spec(2)), WINDOWS, tmp_path / "s", threads=1)
    assert not (tmp_path / "s").exists()


def test_a_full_disk_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CapacityError, match="1000 bytes are available"):
        calibrate(TinyStore(moe_spec(2)), info_of(moe_spec(2)), WINDOWS, tmp_path / "s", threads=1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(invalid="ignore"):
        yield
