"""What layers really took, for the split decision: by the device's events and by its clock."""

from __future__ import annotations

from strata.backends.hybrid.split import Decision, Split
from strata.device.base import Device, Stream

EXPOSED = 0.1
"""When the device waited for fetches for at least this share of their time, they were what took so long."""


class LayerClock:
    """Times of one layer at a time. `read` is called when the host knows that the layer is done."""

    def __init__(self, device: Device, compute: Stream, split: Split) -> None:
        self._device = device
        self._compute = compute
        self._split = split
        self._start, self._hits, self._fetched = (device.event(timing=True) for _ in range(3))
        self._decision: Decision | None = None
        self._began = 0.0
        self._nbytes = 0

    def start(self, decision: Decision, alone: bool) -> None:
        """The choice is known and the fetches are queued. alone: the layer shares its time with no other one:
        a pass that streams says nothing of what a layer takes."""
        self._decision, self._began, self._nbytes = decision if alone else None, self._device.now(), 0
        if self._fetches:
            self._device.record(self._start, self._compute)

    def hits_done(self) -> None:
        """Hits were launched."""
        if self._fetches:
            self._device.record(self._hits, self._compute)

    def fetched(self, nbytes: int) -> None:
        """The stream has waited for the last fetch."""
        if self._fetches:
            self._device.record(self._fetched, self._compute)
            self._nbytes = nbytes

    @property
    def _fetches(self) -> bool:
        return self._decision is not None and bool(self._decision.fetch)

    def read(self) -> None:
        """Tell the split decision. Harmless when nothing was timed since."""
        decision, self._decision = self._decision, None
        if decision is None:
            return
        self._split.layer_took(decision, self._device.now() - self._began)
        if self._nbytes:
            waited = self._device.elapsed_ms(self._hits, self._fetched) / 1e3
            whole = self._device.elapsed_ms(self._start, self._fetched) / 1e3
            self._split.bus_took(self._nbytes, whole, exposed=waited >= EXPOSED * whole)
