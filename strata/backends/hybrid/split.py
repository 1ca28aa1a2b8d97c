"""Which of a layer's missed experts are fetched, and which the CPU computes.

The first answer is the cost model's (`plan.cost`). What layers then really take corrects it: each lane has a
ratio of measured to predicted time, an exponentially weighted mean. And because a model can be wrong in ways
that no ratio mends, layers that fetched are compared with layers that did not, as they were measured: when
fetching turned out slower, it ends until a probe says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from strata.backends.hybrid.experts_host import expert_macs
from strata.backends.parts import ExpertBank
from strata.plan.cost import ACTIVATION_BYTES, LayerCost, Misses
from strata.plan.speeds import Speeds

WEIGHT = 0.1
"""Of a new sample in the running means."""
TRUSTED = 8
"""Samples before a mean decides anything."""
PROBE_EVERY = 64
"""Decisions of one kind in a row after which the other kind is tried with one expert..."""
PROBE_EVERY_AT_FIRST = 8
"""...and as long as the other lane's speed is hardly known."""
WORSE = 1.05
"""Measured times must differ by so much before a decision is taken back."""
MOST_OFF = 8.0
"""A sample of a trusted mean counts as this many times the mean at most: a stall is no news."""

Kind = Literal["cpu", "fetch"]


@dataclass
class Mean:
    """A running mean that starts from a guess, which the first sample replaces."""

    value: float = 1.0
    samples: int = 0

    def add(self, sample: float) -> None:
        """Move towards a sample; the first ones count alike."""
        if self.trusted:
            sample = min(MOST_OFF * self.value, max(self.value / MOST_OFF, sample))
        self.samples += 1
        self.value += max(WEIGHT, 1 / self.samples) * (sample - self.value)

    @property
    def trusted(self) -> bool:
        """Whether it says anything."""
        return self.samples >= TRUSTED


@dataclass(frozen=True)
class LayerMisses:
    """One layer's question. hits: experts on the device. missed: those that are not, ascending, and how many
    rows chose each. rows: of the batch.

    foreseen: the pass streams, so fetches need not wait for the router and cross during `base`, the seconds
    before it, in which the host has nothing to do. loaded: missed experts that were
    loaded ahead, in any case fetched. host: whether the host has the rows and may compute.
    """

    bank: ExpertBank
    rows: int
    top_k: int
    hits: int
    missed: Sequence[int]
    counts: Sequence[int]
    foreseen: bool = False
    base: float = 0.0
    loaded: frozenset[int] = frozenset()
    host: bool = True


@dataclass(frozen=True)
class Decision:
    """fetch: experts to be fetched, ascending; compute: those of the host. reason: one phrase for people.
    all_computed: seconds that the model predicts without fetching."""

    fetch: tuple[int, ...]
    compute: tuple[int, ...]
    reason: str
    all_computed: float = 0.0


@dataclass
class SplitMetrics:
    """What `experts.misses` came to. last_reason: of the latest decision with a choice. taken_back: layers
    where the model would have fetched and the measured times said no. probes: that tried the other way.
    """

    layers: int = 0
    taken_back: int = 0
    probes: int = 0
    last_reason: str = ""
    host_ratio: float = 1.0
    bus_ratio: float = 1.0


@dataclass
class Split:
    """Decides layer by layer. Belongs to one backend."""

    mode: Misses
    speeds: Speeds
    metrics: SplitMetrics = field(default_factory=SplitMetrics)

    def __post_init__(self) -> None:
        self.host, self.bus = Mean(), Mean()
        # Measured time of a layer by what it did, relative to the predicted time without fetching.
        self._layers: dict[Kind, Mean] = {"cpu": Mean(), "fetch": Mean()}
        self._alike = 0
        self._last_kind: Kind = "cpu"

    def decide(self, layer: LayerMisses) -> Decision:
        """The split of one layer's misses."""
        missed = len(layer.missed)
        if missed == 0:
            return Decision((), (), "")
        cost, count = self.cost(layer), self.count(layer)
        computed, best = cost.seconds(layer.hits, missed, 0), cost.seconds(layer.hits, missed, count)
        reason = f"{count} of {missed} fetched: {best * 1e6:.0f} us, {computed * 1e6:.0f} us without"
        if self.mode != "auto":
            reason = f"experts.misses is {self.mode}"
        elif not layer.foreseen:
            count, reason = self._corrected(count, 0 if computed <= 2 * best else count - 1, reason)
        return self._chosen(layer, count, reason, computed)

    def count(self, layer: LayerMisses) -> int:
        """How many experts to fetch so that the layer ends first, as far as the model knows."""
        if not layer.host:
            return len(layer.missed)
        return max(len(layer.loaded), self.cost(layer).split(layer.hits, len(layer.missed), self.mode))

    def cost(self, layer: LayerMisses) -> LayerCost:
        """The layer's costs by plan, corrected by what was measured."""
        bank, speeds = layer.bank, self.speeds
        distinct = layer.hits + len(layer.missed)
        size, macs = bank.layout.record_bytes, expert_macs(bank) * layer.rows * layer.top_k / max(distinct, 1)
        cross = layer.rows * bank.layout.hidden * ACTIVATION_BYTES
        return LayerCost(
            base=layer.base,
            kv_in=0.0,
            kv_out=0.0,
            on_device=max(size / speeds.device_read, macs / speeds.device_macs),
            on_host=max(size / speeds.host_read, macs / speeds.host_macs) * self.host.value,
            on_bus=size / speeds.to_device * self.bus.value,
            on_disk=0.0,
            inputs=cross / speeds.to_host,
            outputs=cross / speeds.to_device,
            foreseen=layer.foreseen,
        )

    def host_took(self, predicted: float, seconds: float) -> None:
        """The host's share of a layer. predicted: by plan, without the ratio."""
        if predicted > 0.0:
            self.host.add(seconds / predicted)
            self.metrics.host_ratio = self.host.value

    def bus_took(self, nbytes: int, seconds: float, exposed: bool) -> None:
        """Fetches of a layer. exposed: the device waited for them; else they took no more than `seconds`."""
        ratio = seconds * self.speeds.to_device / nbytes
        if exposed or ratio < self.bus.value:
            self.bus.add(ratio)
            self.metrics.bus_ratio = self.bus.value

    def layer_took(self, decision: Decision, seconds: float) -> None:
        """From the decision to the next router's result."""
        if decision.all_computed > 0.0:
            kind: Kind = "fetch" if decision.fetch else "cpu"
            self._layers[kind].add(seconds / decision.all_computed)

    def _corrected(self, count: int, fewer: int, reason: str) -> tuple[int, str]:
        """What measured times make of the model's answer. fewer: what a probe fetches instead."""
        means = self._layers
        known = means["cpu"].trusted and means["fetch"].trusted
        if count and known and means["fetch"].value > WORSE * means["cpu"].value:
            self.metrics.taken_back += 1
            slower = means["fetch"].value / means["cpu"].value
            count, reason = 0, f"fetching made layers {slower:.2f} times as slow"
        kind: Kind = "fetch" if count else "cpu"
        self._alike = self._alike + 1 if kind == self._last_kind else 1
        self._last_kind = kind
        other = self.host if count else self.bus
        every = PROBE_EVERY if other.trusted else PROBE_EVERY_AT_FIRST
        if self._alike < every:
            return count, reason
        self._alike = 0
        self.metrics.probes += 1
        return (fewer if count else 1), f"a probe, once in {every} layers"

    def _chosen(self, layer: LayerMisses, count: int, reason: str, computed: float) -> Decision:
        """Fetch the experts with the most rows: the host's time grows with them, the bus's does not."""
        rows = dict(zip(layer.missed, layer.counts, strict=True))
        order = sorted(rows, key=lambda expert: (expert not in layer.loaded, -rows[expert], expert))
        fetch, compute = tuple(sorted(order[:count])), tuple(sorted(order[count:]))
        metrics = self.metrics
        metrics.layers += 1
        metrics.last_reason = reason
        return Decision(fetch, compute, reason, computed)
