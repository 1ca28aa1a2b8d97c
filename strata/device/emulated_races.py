"""The race detector: who last touched which bytes of one allocation, and was that before this access?

Vector clocks with one epoch per access (Flanagan and Freund, "FastTrack: efficient and precise dynamic
race detection", PLDI 2009), over byte ranges. An access that passed its check comes after all it was
checked against, so a write replaces everything below it and a read replaces its stream's earlier read.
What the host knows to be finished precedes every later op, because the host issues those: such entries
are dropped, which keeps the lists as short as the work in flight.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from strata.device.buffers import RaceError
from strata.device.emulated_order import Op


class Segment:
    """Bytes `[start, end)` with one history: the op that wrote them last, and per stream its last reader."""

    __slots__ = ("end", "readers", "start", "writer")

    def __init__(self, start: int, end: int, writer: Op | None, readers: dict[int, Op]) -> None:
        self.start = start
        self.end = end
        self.writer = writer
        self.readers = readers


class Shadow:
    """The history of one allocation: disjoint segments by start; gaps have none that matters."""

    __slots__ = ("_name", "_segments", "_starts")

    def __init__(self, name: str) -> None:
        self._name = name
        self._segments: list[Segment] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._segments)

    def clear(self) -> None:
        """The host knows all work to be finished."""
        self._segments.clear()
        self._starts.clear()

    def read(self, start: int, end: int, op: Op, known: Sequence[int]) -> None:
        """A device op reads; RaceError when the last write is not ordered before it."""
        same = self._same(start, end)
        if same is not None:
            self._read_segment(same, op, known)
            return
        first, last = self._cut(start, end)
        found: list[Segment] = []
        position = start
        for segment in self._segments[first:last]:
            if position < segment.start:
                found.append(Segment(position, segment.start, None, {op.stream.index: op}))
            self._read_segment(segment, op, known)
            found.append(segment)
            position = segment.end
        if position < end:
            found.append(Segment(position, end, None, {op.stream.index: op}))
        self._replace(first, last, _joined(found))

    def write(self, start: int, end: int, op: Op) -> None:
        """A device op writes; RaceError when an earlier access is not ordered before it."""
        clock = op.stream.clock
        same = self._same(start, end)
        if same is not None:
            self._require_before(same, clock, "write", op)
            same.writer = op
            same.readers = {}
            return
        first, last = self._cut(start, end)
        for segment in self._segments[first:last]:
            self._require_before(segment, clock, "write", op)
        self._replace(first, last, [Segment(start, end, op, {})])

    def host_read(self, start: int, end: int, known: Sequence[int], what: str) -> None:
        """The host reads; RaceError when the last write is not known to be finished."""
        for segment in self._touched(start, end):
            writer = segment.writer
            if writer is not None and known[writer.stream.index] < writer.number:
                raise self._race("read", segment, what, "write", writer)

    def host_write(self, start: int, end: int, known: Sequence[int], what: str) -> None:
        """The host writes or frees; RaceError when an access is not known to be finished."""
        for segment in self._touched(start, end):
            self._require_before(segment, known, "write", what)

    def _require_before(self, segment: Segment, clock: Sequence[int], verb: str, what: object) -> None:
        writer = segment.writer
        if writer is not None and clock[writer.stream.index] < writer.number:
            raise self._race(verb, segment, what, "write", writer)
        for stream, reader in segment.readers.items():
            if clock[stream] < reader.number:
                raise self._race(verb, segment, what, "read", reader)

    def _read_segment(self, segment: Segment, op: Op, known: Sequence[int]) -> None:
        writer = segment.writer
        if writer is not None:
            if op.stream.clock[writer.stream.index] < writer.number:
                raise self._race("read", segment, op, "write", writer)
            if known[writer.stream.index] >= writer.number:
                segment.writer = None
        if len(segment.readers) > 1:
            segment.readers = {s: r for s, r in segment.readers.items() if known[s] < r.number}
        segment.readers[op.stream.index] = op

    def _same(self, start: int, end: int) -> Segment | None:
        """The segment that is exactly the range: slots, pages and tensors are used whole, again and again."""
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start:
            segment = self._segments[index]
            if segment.end == end:
                return segment
        return None

    def _touched(self, start: int, end: int) -> list[Segment]:
        """Segments that share a byte with the range, whole."""
        first = bisect_right(self._starts, start)
        if first and self._segments[first - 1].end > start:
            first -= 1
        return self._segments[first : bisect_left(self._starts, end)]

    def _cut(self, start: int, end: int) -> tuple[int, int]:
        """Split segments at both borders; the index range of those that lie inside."""
        first = bisect_right(self._starts, start) - 1
        if first >= 0 and self._starts[first] < start < self._segments[first].end:
            self._split(first, start)
        if first < 0 or self._starts[first] < start:
            first += 1
        last = bisect_left(self._starts, end)
        if last > first and self._segments[last - 1].end > end:
            self._split(last - 1, end)
        return first, last

    def _split(self, index: int, at: int) -> None:
        left = self._segments[index]
        right = Segment(at, left.end, left.writer, dict(left.readers))
        left.end = at
        self._segments.insert(index + 1, right)
        self._starts.insert(index + 1, at)

    def _replace(self, first: int, last: int, segments: list[Segment]) -> None:
        self._segments[first:last] = segments
        self._starts[first:last] = [segment.start for segment in segments]

    def _race(self, verb: str, segment: Segment, what: object, earlier: str, op: Op) -> RaceError:
        return RaceError(
            f"race on bytes [{segment.start}, {segment.end}) of '{self._name}': the {verb} by {what} "
            f"is not ordered after the {earlier} by {op}",
            remedy="record an event after the earlier one and wait for it",
        )


def _joined(segments: list[Segment]) -> list[Segment]:
    """Neighbours with nothing but the same single reader become one."""
    joined = [segments[0]]
    for segment in segments[1:]:
        last = joined[-1]
        alone = segment.writer is None and last.writer is None and len(segment.readers) == 1
        if alone and last.end == segment.start and last.readers == segment.readers:
            last.end = segment.end
        else:
            joined.append(segment)
    return joined
