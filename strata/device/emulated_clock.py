"""Virtual time: engines that serve one op at a time, the host's clock and the lanes of the CPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from strata.device.timeline import HOST, Timeline


class Engine:
    """A copy engine, or all multiprocessors together: one op at a time, never interrupted.

    An op takes the first gap after it is ready that is long enough, so an op that waits for an event does
    not hold up ops of other streams that were issued later. Ops already placed never move.
    """

    def __init__(self) -> None:
        # Sorted and disjoint; what touches is one interval, so a saturated engine has a single one.
        self._starts: list[float] = []
        self._ends: list[float] = []

    def place(self, ready: float, seconds: float, now: float) -> float:
        """Reserve the engine for one op; the start time. Nothing is ever ready before `now`."""
        self._forget(now)
        index = bisect_right(self._ends, ready)
        start = ready
        while index < len(self._starts) and start + seconds > self._starts[index]:
            start = max(start, self._ends[index])
            index += 1
        if seconds > 0.0:
            self._insert(index, start, start + seconds)
        return start

    def _insert(self, index: int, start: float, end: float) -> None:
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            del self._ends[index - 1], self._starts[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def _forget(self, now: float) -> None:
        past = bisect_right(self._ends, now)
        if past:
            del self._starts[:past], self._ends[:past]


class HostClock:
    """What time it is for the calling thread, and until when each CPU lane is busy."""

    def __init__(self, timeline: Timeline | None) -> None:
        self.now = 0.0
        self._timeline = timeline
        self._busy_until: dict[str, float] = {}

    def watch(self, timeline: Timeline | None) -> None:
        """Where spans go from now on."""
        self._timeline = timeline

    def advance(self, seconds: float) -> None:
        """Time of a call, too short for a span."""
        self.now += seconds

    def wait_until(self, time: float, label: str) -> None:
        """The thread does nothing until then; no effect on the past."""
        if time > self.now:
            self._span(HOST, label, self.now, time)
            self.now = time

    def begin(self, lane: str, seconds: float, label: str) -> float:
        """Start work on a lane, after what that lane still does; the time of its end."""
        if seconds < 0:
            raise ValueError(f"'{label}' takes {seconds} s on lane '{lane}'")
        start = max(self.now, self._busy_until.get(lane, 0.0))
        self._busy_until[lane] = start + seconds
        self._span(lane, label, start, start + seconds)
        return start + seconds

    def work(self, seconds: Mapping[str, float], label: str) -> None:
        """Work on several lanes side by side; the thread goes on after the last of them."""
        self.now = max([self.now, *(self.begin(lane, time, label) for lane, time in seconds.items())])

    def _span(self, lane: str, label: str, start: float, end: float) -> None:
        if self._timeline is not None and end > start:
            self._timeline.add(lane, label, start, end)
