"""When the ops of the emulated device really move their data: in a legal order, as nasty as its seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from strata.device.emulated_order import Op

# How often in a row a query may say no although the event is reached (adversarial order only).
MOST_DENIALS = 3
# Chance of a query that waits for an event not yet reached: the calling thread was held up that long.
HELD_UP = 0.1


class Schedule:
    """Ops that were issued but have not run.

    seed None: an op runs when it is issued, which is always legal. Otherwise ops wait until somebody must
    see their effect, and then run in a random order that keeps every stream's order and every wait; the
    seed also draws how unfair the order is, and how often ops run earlier than they must.
    """

    def __init__(self, seed: int | None) -> None:
        self.adversarial = seed is not None
        self._random = random.Random(seed)
        self._done = [0]
        self._queues: list[deque[Op]] = [deque()]
        self._weights = [0.0]
        self._eager = self._random.choice((0.0, 0.0, 0.1, 0.5))
        self._stray = self._random.choice((0.0, 0.2, 0.8))

    @property
    def pending(self) -> int:
        """Ops that have not run."""
        return sum(len(queue) for queue in self._queues)

    def add_stream(self) -> None:
        """Room for the next stream."""
        self._queues.append(deque())
        self._done.append(0)
        # Weights far apart starve a stream, equal ones mix them: both kinds of trouble are wanted.
        self._weights.append(self._random.choice((0.01, 1.0, 1.0, 100.0)))

    def add(self, op: Op) -> None:
        """Take an op that was just issued."""
        if not self.adversarial:
            self._run(op)
            return
        self._queues[op.stream.index].append(op)
        while self._eager and self._random.random() < self._eager and self.pending:
            self._run_one(range(1, len(self._queues)))

    def run_until(self, needed: Sequence[int]) -> None:
        """Run every op that the clock counts, and perhaps others before them."""
        done, everyone = self._done, range(1, len(self._queues))
        while behind := [index for index, count in enumerate(needed) if done[index] < count]:
            stray = self._stray and self._random.random() < self._stray
            self._run_one(everyone if stray else behind)

    def shuffle(self, moves: list[Callable[[], None]]) -> None:
        """The order inside a batch."""
        if self.adversarial:
            self._random.shuffle(moves)

    def denials(self) -> int:
        """How many queries of a new event are told no although it is reached: the news travels."""
        return self._random.randint(0, MOST_DENIALS) if self.adversarial else 0

    def held_up(self) -> bool:
        """Whether the calling thread loses its core until what it asked for is reached."""
        return self.adversarial and self._random.random() < HELD_UP

    def _run_one(self, streams: Sequence[int]) -> None:
        """One of the streams' next ops; a set closed under "comes before" always has one that is ready."""
        done, queues = self._done, self._queues
        ready = []
        for index in streams:
            if queues[index]:
                op = queues[index][0]
                if all(done[stream] >= count for stream, count in op.waits):
                    ready.append(index)
        chosen = ready[0]
        if len(ready) > 1:
            chosen = max(ready, key=lambda index: self._random.random() * self._weights[index])
        self._run(queues[chosen].popleft())

    def _run(self, op: Op) -> None:
        self._done[op.stream.index] = op.number
        run, op.run = op.run, None
        if run is not None:
            run()
