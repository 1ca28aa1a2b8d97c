"""Where the routed experts of one layer are: the layouts of checkpoints, chosen by the tensors present."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strata.errors import IncompleteError
from strata.model.architectures.lookup import Lookup
from strata.model.architectures.names import Names
from strata.plan.spec import ExpertSpec, ModelSpec
from strata.store.source import SourceRows, TargetExpert


@dataclass(frozen=True)
class _Layer:
    """What a layout needs to know to find an expert."""

    names: Names
    lookup: Lookup
    index: int
    hidden: int
    experts: ExpertSpec

    def name(self, part: str, expert: int = 0, suffix: str = ".weight") -> str:
        """Tensor name of a part; Hugging Face's fused tensors have no suffix in their names."""
        return self.names[part].format(i=self.index, e=expert) + suffix

    def has(self, part: str, suffix: str = ".weight") -> bool:
        return part in self.names and self.lookup.has(self.name(part, 0, suffix))


def expert_sources(spec: ModelSpec, names: Names, lookup: Lookup, index: int) -> Iterator[TargetExpert]:
    """The experts of layer `index`; IncompleteError when no known layout is there."""
    assert spec.experts is not None
    layer = _Layer(names, lookup, index, spec.hidden, spec.experts)
    layout = _choose(layer)
    for expert in range(spec.experts.router.experts):
        gate, up, down, biases = layout(layer, expert)
        yield TargetExpert(index, expert, gate, up, down, *biases)


_Parts = tuple[SourceRows, SourceRows, SourceRows, tuple[SourceRows, ...]]


def _choose(layer: _Layer) -> Callable[[_Layer, int], _Parts]:
    if layer.has("experts.gate"):
        return _stacked
    if layer.has("experts.gate_up", ""):
        if not layer.experts.biases:
            return _fused
        packed = layer.lookup.dtype(layer.name("experts.gate_up", 0, "")) == "MXFP4"
        return _interleaved_mxfp4 if packed else _interleaved
    if layer.has("expert.gate"):
        return _separate
    wanted = [layer.name(part) for part in ("expert.gate", "experts.gate") if part in layer.names]
    raise IncompleteError(
        f"{layer.lookup.source}: layer {layer.index} has no experts (looked for {' and '.join(wanted)})",
        remedy="the download may be incomplete: fetch it again",
    )


def _separate(layer: _Layer, e: int) -> _Parts:
    """One tensor per expert and matrix."""
    wide, tall = (layer.experts.width, layer.hidden), (layer.hidden, layer.experts.width)
    gate, up = (layer.lookup.take(layer.name(f"expert.{p}", e), wide) for p in ("gate", "up"))
    return gate, up, layer.lookup.take(layer.name("expert.down", e), tall), ()


def _stacked(layer: _Layer, e: int) -> _Parts:
    """GGUF: one tensor [experts, rows, cols] per matrix, and [experts, rows] per bias."""
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    take, name = layer.lookup.take, layer.name
    rows = {"gate": width, "up": width, "down": hidden}
    gate, up, down = (
        take(name(f"experts.{p}"), (count, n, hidden + width - n), start=e * n, stop=(e + 1) * n)
        for p, n in rows.items()
    )
    if not layer.experts.biases:
        return gate, up, down, ()
    bias = (take(name(f"experts.{p}", 0, ".bias"), (count, n), start=e, stop=e + 1) for p, n in rows.items())
    return gate, up, down, tuple(bias)


def _fused(layer: _Layer, e: int) -> _Parts:
    """transformers 5 in memory, granitemoe on disk: gate rows and then up rows of each expert."""
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    name, shape, start = layer.name("experts.gate_up", 0, ""), (count, 2 * width, hidden), e * 2 * width
    gate = layer.lookup.take(name, shape, start=start, stop=start + width)
    up = layer.lookup.take(name, shape, start=start + width, stop=start + 2 * width)
    return gate, up, _down(layer, e), ()


def _down(layer: _Layer, e: int) -> SourceRows:
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    name = layer.name("experts.down", 0, "")
    return layer.lookup.take(name, (count, hidden, width), start=e * hidden, stop=(e + 1) * hidden)


def _interleaved(layer: _Layer, e: int) -> _Parts:
    """gpt-oss in BF16, all transposed: [experts, hidden, 2 * width], gate in even and up in odd columns."""
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    name, shape = layer.name("experts.gate_up", 0, ""), (count, hidden, 2 * width)
    gate, up = (
        layer.lookup.take(
            name, shape, start=e * hidden, stop=(e + 1) * hidden, col_start=odd, col_stride=2, transposed=True
        )
        for odd in (0, 1)
    )
    down = layer.lookup.take(
        layer.name("experts.down", 0, ""),
        (count, width, hidden),
        start=e * width,
        stop=(e + 1) * width,
        transposed=True,
    )
    return gate, up, down, _interleaved_biases(layer, e)


def _interleaved_mxfp4(layer: _Layer, e: int) -> _Parts:
    """gpt-oss in MXFP4: [experts, 2 * width, hidden] with gate in even and up in odd rows."""
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    name, shape, start = layer.name("experts.gate_up", 0, ""), (count, 2 * width, hidden), e * 2 * width
    gate, up = (
        layer.lookup.take(name, shape, start=start + odd, stop=start + 2 * width, stride=2) for odd in (0, 1)
    )
    return gate, up, _down(layer, e), _interleaved_biases(layer, e)


def _interleaved_biases(layer: _Layer, e: int) -> tuple[SourceRows, ...]:
    count, width, hidden = layer.experts.router.experts, layer.experts.width, layer.hidden
    gate_up, down = (layer.name(part, 0, "_bias") for part in ("experts.gate_up", "experts.down"))
    take = layer.lookup.take
    gate, up = (
        take(gate_up, (count, 2 * width), start=e, stop=e + 1, col_start=odd, col_stride=2) for odd in (0, 1)
    )
    return gate, up, take(down, (count, hidden), start=e, stop=e + 1)
