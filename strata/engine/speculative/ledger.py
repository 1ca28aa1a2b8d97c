"""What speculation has cost a request of late, so that it can be forbidden to cost more."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Steps over which the promise holds."""
PROMISE = 0.97
"""Of the speed of plain decoding, at least, over any WINDOW steps."""
BUDGET = WINDOW * (1 / PROMISE - 1)
"""Plain steps that WINDOW steps may lose: 1.98. Each brings a token at least, so the promise holds then."""


class Ledger:
    """Losses of the last WINDOW steps, in plain steps: the time a step took less the tokens it brought.

    A window may begin anywhere, so what was gained before it does not count: what matters is the largest loss
    of all windows that end now.
    """

    def __init__(self) -> None:
        self._step = 0
        self._losses: deque[tuple[int, float]] = deque()  # steps that were not plain

    @property
    def left(self) -> float:
        """Plain steps that may still be lost."""
        loss = worst = 0.0
        for step, each in reversed(self._losses):
            if step <= self._step - (WINDOW - 1):
                break
            loss += each
            worst = max(worst, loss)
        return BUDGET - worst

    def add(self, loss: float) -> None:
        """One step; a plain one loses 0."""
        self._step += 1
        if loss:
            self._losses.append((self._step, loss))
        while self._losses and self._losses[0][0] <= self._step - WINDOW:
            self._losses.popleft()
