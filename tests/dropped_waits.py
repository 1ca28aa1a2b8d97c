"""A device that leaves out one of the waits that its caller asks for, to see whether somebody notices."""

from __future__ import annotations

from typing import Any

from strata.device.base import Event, Stream
from strata.device.emulated import EmulatedDevice
from strata.device.emulated_order import own_event, own_stream


class DroppingDevice:
    """Everything goes to the device beneath, except that call number `dropped` of `kinds` does nothing.

    kinds: of "wait", "sync" and "query" (a query that is left out says yes). Calls count from 0: `calls` says
    how many there were, `useful` which of them ordered something that was not ordered before. Only those can
    be missed: whether an event is known already when it is waited for depends on the schedule.
    """

    def __init__(self, device: EmulatedDevice, dropped: int | None, kinds: tuple[str, ...]) -> None:
        self._device = device
        self._dropped = dropped
        self._kinds = kinds
        self.calls = 0
        self.useful: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, stream: Stream, event: Event) -> None:
        known = list(map(max, own_stream(stream).clock, self._device.order.known))
        if self._keeps("wait", any(map(int.__gt__, own_event(event).clock, known))):
            self._device.wait(stream, event)

    def sync(self, target: Stream | Event | None = None) -> None:
        assert target is not None, "a synchronisation of the whole device is no wait to be proud of"
        clock = own_event(target).clock if isinstance(target, Event) else own_stream(target).clock
        if self._keeps("sync", not self._device.order.knows(clock)):
            self._device.sync(target)

    def query(self, target: Stream | Event) -> bool:
        return self._device.query(target) if self._keeps("query", True) else True

    def _keeps(self, kind: str, useful: bool) -> bool:
        if kind not in self._kinds:
            return True
        if useful:
            self.useful.append(self.calls)
        self.calls += 1
        return self.calls - 1 != self._dropped
