"""What speculation has cost a request of late, so that it can be forbidden to cost more."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Steps over which the promise holds."""
PROMISE = 0.97
"""Of the speed of plain decoding, at least, over any WINDOW steps, and over the whole request."""
LOSS = 1 / PROMISE - 1
"""Plain steps that a token may take more than one: 0.031."""
BUDGET = WINDOW * LOSS
"""Plain steps that WINDOW steps may lose if none of them brings more than a token: 1.98."""


class Ledger:
    """Losses of the last WINDOW steps, in plain steps.

    A step that takes c plain steps and brings t tokens has the promised speed when c <= t / PROMISE. A
    plain one is LOSS better than that; what another one is worse than a plain one, c - 1 - (t - 1) / PROMISE,
    is its loss. WINDOW steps keep the promise when their losses add up to no more than BUDGET. A window may
    begin anywhere: what was won in it can be lost again, what was won before it can not. So what matters is
    the largest loss of all windows that end now; and that of the whole request, which many windows, each
    with a loss, make up.
    """

    def __init__(self) -> None:
        self._step = 0
        self._whole = 0.0
        self._losses: deque[tuple[int, float]] = deque()  # steps that were not plain

    @property
    def left(self) -> float:
        """Plain steps that the next step may take beyond one, if it brings no more than a token."""
        loss = worst = 0.0
        for step, each in reversed(self._losses):
            if step <= self._step - (WINDOW - 1):
                break
            loss += each
            worst = max(worst, loss)
        return min(BUDGET - worst, LOSS * max(WINDOW, self._step + 1) - self._whole)

    def add(self, seconds: float, tokens: int) -> None:
        """One step: what it took, in plain steps, and what it brought."""
        self._step += 1
        loss = seconds - 1 - (tokens - 1) / PROMISE
        if loss:
            self._losses.append((self._step, loss))
            self._whole += loss
        while self._losses and self._losses[0][0] <= self._step - WINDOW:
            self._losses.popleft()
