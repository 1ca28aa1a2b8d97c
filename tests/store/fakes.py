"""A checkpoint of arrays in memory, and a small MoE model to convert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.plan.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, RouterSpec
from strata.store.names import EMBED, FINAL_NORM, layer
from strata.store.source import QuantizedRows, SourceRows, TargetExpert, TargetTensor, TensorInfo

SIZES = {"F32": 4, "BF16": 2, "F16": 2}


def bf16_values(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut to what a BF16 file would hold."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass
class FakeSource:
    """CheckpointSource over a dict; `kept` gives whole tensors in a kept quantization ."""

    arrays: dict[str, NDArray[np.float32]]
    dtypes: dict[str, str] = field(default_factory=dict)
    kept: dict[str, QuantizedRows] = field(default_factory=dict)
    path: Path = Path("fake-model")
    kind: str = "safetensors"
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: self._info(name, values) for name, values in self.arrays.items()}

    def _info(self, name: str, values: NDArray[np.float32]) -> TensorInfo:
        dtype = self.dtypes.get(name, "F32")
        nbytes = values.size * SIZES.get(dtype, 1)
        return TensorInfo(name, dtype, values.shape, nbytes, self.path, 0)

    def raw(self, name: str) -> NDArray[np.uint8]:
        return self.arrays[name].reshape(-1).view(np.uint8)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        values = self.arrays[name]
        values = values.reshape(1, -1) if values.ndim == 1 else values.reshape(-1, values.shape[-1])
        assert 0 <= start < stop <= len(values)
        out = values[start:stop].view()
        out.flags.writeable = False
        return out

    def quantized(self, name: str, start: int, stop: int) -> QuantizedRows | None:
        if name not in self.kept:
            return None
        whole = self.kept[name]
        minimums = None if whole.minimums is None else whole.minimums[start:stop]
        return QuantizedRows(
            whole.format, whole.codes[start:stop], whole.scales[start:stop], minimums, whole.exact
        )

    def files(self) -> list[Path]:
        return []


def small_spec(
    layers: int = 2,
    experts: int = 4,
    hidden: int = 96,
    width: int = 128,
    vocab: int = 70,
    biases: bool = False,
) -> ModelSpec:
    """A Qwen3-MoE-like spec whose layer 0 is dense."""
    attention = AttentionSpec(2, 1, 32, 32**-0.5, RopeSpec("default", 1e4, 32))
    return ModelSpec(
        architecture="qwen3_moe",
        name="small",
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        context=128,
        norm_eps=1e-6,
        attention=attention,
        dense_width=100,
        moe_layers=tuple(i > 0 for i in range(layers)),
        experts=ExpertSpec(RouterSpec(experts, 2), width, biases=biases),
        tied_head=True,
    )


@dataclass
class SmallModel:
    """Source, spec and targets of a small random model, ready for `convert`."""

    source: FakeSource
    spec: ModelSpec
    targets: list[TargetTensor]
    experts: list[TargetExpert]


def small_model(seed: int = 0, **sizes: Any) -> SmallModel:
    """Random weights in BF16 precision for `small_spec(**sizes)`."""
    rng = np.random.default_rng(seed)
    spec = small_spec(**sizes)
    assert spec.experts is not None
    model = SmallModel(FakeSource({}), spec, [], [])

    def tensor(name: str, *shape: int) -> SourceRows:
        model.source.arrays[name] = bf16_values(
            rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
        )
        model.source.dtypes[name] = "BF16"
        return SourceRows(name)

    def target(
        name: str, kind: str, shape: tuple[int, ...], *blocks: SourceRows, interleave: bool = False
    ) -> None:
        model.targets.append(TargetTensor(name, blocks, shape, kind, interleave))

    hidden, width = spec.hidden, spec.experts.width
    target(EMBED, "embed", (spec.vocab, hidden), tensor("emb", spec.vocab, hidden))
    target(FINAL_NORM, "plain", (hidden,), tensor("norm", hidden))
    for i in range(spec.layers):
        qkv = [tensor(f"{i}.{part}", rows, hidden) for part, rows in (("q", 64), ("k", 32), ("v", 32))]
        target(layer(i, "attn.qkv.weight"), "shared", (128, hidden), *qkv)
        if not spec.is_moe(i):
            gate_up = [tensor(f"{i}.{part}", spec.dense_width, hidden) for part in ("gate", "up")]
            target(layer(i, "mlp.gate_up.weight"), "shared", (208, hidden), *gate_up, interleave=True)
            continue
        count = spec.experts.router.experts
        target(layer(i, "router.weight"), "plain", (count, hidden), tensor(f"{i}.router", count, hidden))
        for e in range(count):
            parts = [tensor(f"{i}.{e}.{part}", width, hidden) for part in ("gate", "up")]
            parts.append(tensor(f"{i}.{e}.down", hidden, width))
            if spec.experts.biases:
                sizes_of = (("gate_b", width), ("up_b", width), ("down_b", hidden))
                parts += [tensor(f"{i}.{e}.{part}", size) for part, size in sizes_of]
            model.experts.append(TargetExpert(i, e, *parts))
    return model
