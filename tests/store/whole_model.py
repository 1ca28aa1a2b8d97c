"""A checkpoint in memory with every tensor of a ModelSpec, and statistics of it: for conversions that run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from fakes import FakeSource, SmallModel
from tiny_model import TinyStore

from strata.plan.spec import ModelSpec
from strata.store.calibration import CalibrationStats, StatsInfo, model_fingerprint
from strata.store.calibration_inputs import LinearInput, linear_inputs
from strata.store.calibration_writer import MemberStats, StatsWriter
from strata.store.names import EMBED, HEAD
from strata.store.source import SourceRows, TargetExpert, TargetTensor

PACKED = ("qkv", "out", "q", "q_a", "q_b", "kv_a", "k_b", "v_b", "down")


def whole_model(spec: ModelSpec, seed: int = 0) -> SmallModel:
    """BF16 matrices and F32 vectors of everything that the decoder asks for."""
    tiny = TinyStore(spec, seed)
    model = SmallModel(FakeSource({}), spec, [], [])

    def tensor(name: str, *shape: int) -> SourceRows:
        norm = tiny.has(name) and len(shape) == 1
        model.source.arrays[name] = tiny.plain(name) if norm else tiny.matrix(name, shape)
        model.source.dtypes[name] = "F32" if norm else "BF16"
        return SourceRows(name)

    mla = spec.attention.mla
    for name, shape in tiny._shapes().items():
        if mla is not None and mla.q_lora_rank and name.endswith("attn.q.weight"):
            continue
        part = name.removesuffix(".weight").rpartition(".")[2]
        kind = {EMBED: "embed", HEAD: "head"}.get(name, "shared" if part in PACKED else "plain")
        if part == "gate_up":
            width = spec.dense_width if "mlp" in name else spec.experts.shared_width if spec.experts else 0
            if width:
                pair = [tensor(f"{name}.{half}", width, spec.hidden) for half in ("gate", "up")]
                target = TargetTensor(name, tuple(pair), (2 * width, spec.hidden), "shared", interleave=True)
                model.targets.append(target)
        elif np.prod(shape):
            model.targets.append(TargetTensor(name, (tensor(name, *shape),), shape, kind))
    for layer in filter(spec.is_moe, range(spec.layers)):
        model.experts.extend(_experts(spec, layer, tensor))
    return model


def _experts(spec: ModelSpec, layer: int, tensor: object) -> Iterator[TargetExpert]:
    assert spec.experts is not None and callable(tensor)
    hidden, width = spec.hidden, spec.experts.width
    for index in range(spec.experts.router.experts):
        at = f"{layer}.{index}"
        parts = [tensor(f"{at}.{part}", width, hidden) for part in ("gate", "up")]
        parts.append(tensor(f"{at}.down", hidden, width))
        if spec.experts.biases:
            sizes = (("gate_b", width), ("up_b", width), ("down_b", hidden))
            parts += [tensor(f"{at}.{part}", 1, size) for part, size in sizes]
        yield TargetExpert(layer, index, *parts)


def make_stats(
    path: Path, model: SmallModel, *, moments: bool = True, seed: int = 0, tokens: int = 200
) -> CalibrationStats:
    """Statistics of random correlated inputs; expert 1 saw too few rows."""
    rng = np.random.default_rng(seed)
    fingerprint = model_fingerprint(model.spec, lambda name: model.source.arrays[name])
    info = StatsInfo(model.spec, fingerprint, tokens, 100, 50, moments, (), "test")
    members = (
        (
            entry.name,
            member,
            _member(rng, entry, 10 if entry.members > 1 and member == 1 else tokens, moments),
        )
        for entry in linear_inputs(model.spec)
        for member in range(entry.members)
    )
    write_stats(path, info, members)
    return CalibrationStats(path)


def write_stats(path: Path, info: StatsInfo, members: Iterable[tuple[str, int, MemberStats]]) -> None:
    """A whole file at once: (input's name, member, statistics) of every member of `linear_inputs`."""
    writer = StatsWriter(path, info)
    for name, member, stats in members:
        writer.write(name, member, stats)
    writer.sync()
    writer.close()


def _member(rng: np.random.Generator, entry: LinearInput, tokens: int, moments: bool) -> MemberStats:
    mix = rng.standard_normal((entry.cols, entry.cols)) * np.exp(rng.standard_normal(entry.cols))
    x = (rng.standard_normal((tokens, entry.cols)) @ mix).astype(np.float32)
    size = np.abs(x)
    vectors = np.stack([size.max(axis=0), size.max(axis=0), size.mean(axis=0), np.square(x).mean(axis=0)])
    return MemberStats(tokens, vectors.astype(np.float32), x.T @ x / np.float32(tokens) if moments else None)
