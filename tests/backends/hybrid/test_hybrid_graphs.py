"""Graphs of layers on a device that computes nothing: what is captured and replayed, and that a replay whose
arguments are no longer those of the step is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hybrids import Hybrid, make_hybrid, tokens
from test_cuda_scratch import FIGURES, GROUPED
from tiny_model import TinyStore, moe_spec

from strata.backends.cpu import CpuBackend
from strata.backends.cuda.kernel_set import CudaKernels
from strata.backends.hybrid.graphs import SHAPES
from strata.device.base import Graph, Launch, StaleGraphError
from strata.device.counting import CountingDevice
from strata.engine.dry_launch import MadeUpRoutes, NoLoader
from strata.memory.regions import Arena

LAYERS = 3
SPEC = moe_spec(LAYERS, hidden=64, attention=GROUPED)
Change = Callable[[Launch, int], Launch]


class Device(CountingDevice):
    """Knows the graphs that are held."""

    held = 0

    def capture(self, *arguments: Any) -> Graph:
        self.held += 1
        return super().capture(*arguments)

    def free_graph(self, graph: Graph) -> None:
        self.held -= 1
        super().free_graph(graph)


class Changed(CudaKernels):
    """Attention's first launch in `layer` is changed: from pass to pass by another number."""

    def __init__(self, layer: int, change: Change) -> None:
        super().__init__(NoLoader())
        self._layer, self._change, self.passes = layer, change, 0

    def attention_of(self, projections: Any, places: Any, call: Any, *rest: Any) -> Iterator[Launch]:
        first, *others = super().attention_of(projections, places, call, *rest)
        yield self._change(first, self.passes) if call.layer == self._layer else first
        yield from others


def hybrid(kernels: CudaKernels | None = None, **changes: Any) -> Hybrid:
    cpu = CpuBackend(threads=1, activations="f32")
    device: Any = Device(replace(FIGURES, memory_bytes=1 << 30), MadeUpRoutes(SPEC))
    return make_hybrid(
        cpu,
        TinyStore(SPEC),
        SPEC,
        device=device,
        kernels=kernels or CudaKernels(NoLoader()),
        kv_dtype="int8",
        pages=64,
        page_tokens=32,
        policy="lru",
        slots=LAYERS * 8,
        **{"graphs": True, "prefetch": 2.0, **changes},
    )


def feed(made: Hybrid, counts: list[int]) -> None:
    for count in counts:
        made.feed(tokens(count, vocab=SPEC.vocab), logits=False)


def test_layers_are_captured_once_and_replayed_in_every_step() -> None:
    made = hybrid()
    feed(made, [20, 1, 1, 1, 1])
    graphs = made.backend.graphs
    assert (graphs.captured, graphs.replayed) == (LAYERS, 3 * LAYERS), "the prompt has none"
    launches = made.device.calls.launches.items()
    assert sum(count for (_, name), count in launches if name.startswith("graph of")) == 3 * LAYERS
    made.close()


@pytest.mark.parametrize("depth", [0, 1500])
def test_a_layer_takes_as_many_launches_at_any_depth(depth: int) -> None:
    """Splits of attention are joined by its own kernel; without graphs here, and without a guess."""
    made = hybrid(graphs=False)
    made.done = depth
    feed(made, [1] * 5)
    launches, label = made.device.calls.launches.elements(), f"layer {5 * LAYERS - 1}"
    last = [name for found, name in launches if found == label]
    assert len(last) == 7 and not any("combine" in name for name in last)
    made.close()


def test_without_them_nothing_is_captured() -> None:
    made = hybrid(graphs=False)
    feed(made, [20, 1, 1])
    assert (made.backend.graphs.captured, made.backend.graphs.replayed) == (0, 0)
    made.close()


def test_a_longer_context_is_captured_anew_when_its_grid_changes() -> None:
    """From 256 tokens on, attention splits them once more (every 256 tokens, until blocks are many)."""
    made = hybrid(rows=600)
    feed(made, [250, *[1] * 12])
    assert made.backend.graphs.captured == 2 * LAYERS
    made.close()


def test_few_shapes_are_kept() -> None:
    made = hybrid()
    feed(made, [*range(1, SHAPES + 4), 1])
    assert made.device.held == SHAPES * LAYERS
    assert made.backend.graphs.captured == (SHAPES + 4) * LAYERS, "the first was forgotten"
    made.close()


def argument(launch: Launch, index: int, value: Any) -> Launch:
    return replace(launch, arguments=(*launch.arguments[:index], value, *launch.arguments[index + 1 :]))


CHANGES: dict[str, tuple[Change, str]] = {
    "a number": (
        lambda launch, n: argument(launch, -2, float(n)),
        r"prepare_qkv: argument \d+ was 0.0, now it is 1.0",
    ),
    "a pointer": (
        lambda launch, n: argument(launch, 0, launch.arguments[0].slice(16 * n, 16)),  # type: ignore[union-attr]
        r"prepare_qkv: argument 0 was device buffer .*\[\d+:\d+\), now it is",
    ),
    "the grid": (
        lambda launch, n: replace(launch, grid=(1 + n, 1, 1)),
        r"grid was \(1, 1, 1\), now it is \(2,",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_stale_argument_is_found(what: str, layer: int) -> None:
    change, message = CHANGES[what]
    kernels = Changed(layer, lambda launch, n: change(replace(launch, arguments=launch.arguments), n))
    made = hybrid(kernels)
    feed(made, [20, 1])
    kernels.passes = 1
    with pytest.raises(StaleGraphError, match=message):
        feed(made, [1])


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_first_layer_shows_is_captured_anew(what: str) -> None:
    kernels = Changed(0, CHANGES[what][0])
    made = hybrid(kernels)
    for step in range(3):
        kernels.passes = step
        feed(made, [1])
    assert made.backend.graphs.captured == 3 * LAYERS and made.device.held == LAYERS
    made.close()


def test_room_that_graphs_results_take_is_given_back() -> None:
    made = hybrid()
    workspace: Arena = made.backend.memory.workspace
    feed(made, [20, 1])
    before = workspace.peak
    feed(made, [1] * 5)
    assert workspace.peak == before
    made.close()
