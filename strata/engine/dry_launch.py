"""A model's steps through the hybrid backend and the CUDA kernels' launches, without computing anything: how
often the host calls the driver, and what that would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from strata.core import Request, SamplingParams
from strata.device.base import Kernel, Launch
from strata.device.buffers import Buffer, Bytes
from strata.device.counting import Calls, CountingDevice
from strata.engine.engine import Engine
from strata.plan.spec import ModelSpec

WARM_STEPS, STEPS = 3, 4
PROMPT = 8
_IDS, _WEIGHTS = "expert ids", "expert weights"


@dataclass(frozen=True)
class NoKernel:
    """Computes nothing: its device has no data."""

    name: str

    def run(self, launch: Launch, stream: int) -> None:
        """Never called on a device without data."""
        raise AssertionError(f"{self.name} was run without data")


class NoLoader:
    """Kernels by name alone: neither a compiler nor a card is needed."""

    def kernel(self, file: str, entry: str) -> Kernel:
        """Every entry exists."""
        return NoKernel(entry)


@dataclass
class MadeUpRoutes:
    """What the routers "choose": the same experts in every step, but for the last `fresh` of each row, which
    no step has chosen lately."""

    spec: ModelSpec
    fresh: int = 0
    _turn: int = field(default=0, init=False)

    def __call__(self, buffer: Buffer) -> Bytes | None:
        """For `CountingDevice`."""
        experts = self.spec.experts
        if experts is None or buffer.allocation.name not in (_IDS, _WEIGHTS):
            return None
        top_k, count = experts.router.top_k, experts.router.experts
        rows = buffer.nbytes // 4 // top_k
        if buffer.allocation.name == _WEIGHTS:
            return np.full(rows * top_k, 1 / top_k, np.float32).view(np.uint8)
        kept = top_k - self.fresh
        ids = np.tile(np.arange(top_k, dtype=np.int32), (rows, 1))
        if self.fresh and count > kept:
            self._turn += self.fresh
            ids[:, kept:] = kept + (self._turn + np.arange(self.fresh)) % (count - kept)
        return ids.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class StepCount:
    """Calls of one step of `rows` requests that decode: `calls` of `steps` steps together."""

    rows: int
    calls: Calls
    steps: int
    layers: int

    @property
    def launches(self) -> float:
        """Per step."""
        return self.calls.launches.total() / self.steps

    def by_kernel(self, layer: int | None) -> dict[str, float]:
        """Launches of one layer per step, in no order; None: of what is outside of layers."""
        found: Counter[str] = Counter()
        for (label, kernel), count in self.calls.launches.items():
            if _layer(label, self.layers) == layer:
                found[kernel] += count
        return {kernel: count / self.steps for kernel, count in found.items()}

    def of_layer(self, layer: int | None) -> float:
        """Launches of one layer per step."""
        return sum(self.by_kernel(layer).values())

    @property
    def most_per_layer(self) -> float:
        """Of the layer with the most."""
        return max(self.of_layer(layer) for layer in range(self.layers))

    def per_step(self, count: float) -> float:
        """A count over all steps, per step."""
        return count / self.steps


def _layer(label: str, layers: int) -> int | None:
    """The layer of a launch's label, which counts layers over all steps."""
    word, _, number = label.partition(" ")
    return int(number) % layers if word == "layer" else None


class DryLaunch:
    """Counts the steps of an engine over a `CountingDevice`, which is used up afterwards."""

    def __init__(self, engine: Engine, device: CountingDevice, routes: MadeUpRoutes) -> None:
        self._engine = engine
        self._device = device
        self._routes = routes
        self._made = 0

    def decode(self, rows: int, fresh: int = 0) -> StepCount:
        """Steps in which `rows` requests decode. fresh: experts of each layer and row that are not there."""
        requests = list(self._requests(rows))
        engine, self._routes.fresh = self._engine, 0
        for request in requests:
            engine.add(request)
        while not all(request.generated for request in requests):
            engine.step()
        self._routes.fresh = fresh
        for _ in range(WARM_STEPS):
            engine.step()
        calls = self._device.calls = Calls()
        for _ in range(STEPS):
            engine.step()
        self._device.calls = Calls()
        for request in requests:
            engine.abort(request.request_id)
        return StepCount(rows, calls, STEPS, engine.decoder.spec.layers)

    def _requests(self, rows: int) -> Iterator[Request]:
        for _ in range(rows):
            self._made += 1
            most = SamplingParams(temperature=0.0, max_tokens=PROMPT + WARM_STEPS + STEPS + rows)
            prompt = [(self._made + i) % self._engine.options.valid_tokens for i in range(PROMPT)]
            yield Request(f"dry-{self._made}", prompt, most)
