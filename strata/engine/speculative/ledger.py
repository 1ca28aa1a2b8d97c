"""What speculation has cost a request, so that it can be forbidden to cost more."""

from __future__ import annotations

from collections import deque
from typing import Literal

Promise = Literal["request", "window"]
"""Over what a request is never slower than PROMISE of plain decoding."""

WINDOW = 64
"""Steps, a few of which always may be lost: the promise holds from there on."""
PROMISE = 0.97
"""Of the speed of plain decoding, at least."""
LOSS = 1 / PROMISE - 1
"""Plain steps that a token may take more than one: 0.031."""
BUDGET = WINDOW * LOSS
"""Plain steps that WINDOW steps may lose if none of them brings more than a token: 1.98."""
WINDOW_FLOOR = 0.94
"""Of the speed of plain decoding over any WINDOW steps, where the promise is over the request: what somebody
who is right until he is trusted can make of one. A step of 16 drafted tokens that are all wrong takes 4.4
plain steps (docs/speculation.md): at 0.95 long drafts would be out of the question, however much they win.
"""
_WIDE = WINDOW / WINDOW_FLOOR - WINDOW


class Ledger:
    """Losses of a request, in plain steps.

    A step that takes c plain steps and brings t tokens has the promised speed when c <= t / PROMISE. A
    plain one is LOSS better than that; what another one is worse than a plain one, c - 1 - (t - 1) / PROMISE,
    is its loss (a negative one: a gain). Over the whole request losses add up to LOSS of its steps at most,
    and of WINDOW ones before that many; what was won earlier may be lost. In a window that may not: it may
    begin anywhere, so what matters there is the largest loss of all windows that end now.
    """

    __slots__ = ("_losses", "_most", "_step", "_whole", "_worst")

    def __init__(self, promise: Promise = "request") -> None:
        self._most = BUDGET if promise == "window" else _WIDE
        self._step = 0
        self._whole = self._worst = 0.0
        self._losses: deque[tuple[int, float]] = (
            deque()
        )  # of steps that were not plain, of the last WINDOW - 1

    @property
    def left(self) -> float:
        """Plain steps that the next step may take beyond one, if it brings no more than a token."""
        return min(self._most - self._worst, LOSS * max(WINDOW, self._step + 1) - self._whole)

    def add(self, steps: float, tokens: int) -> None:
        """One step: what it took, in plain steps, and what it brought."""
        self._step += 1
        self.charge(steps - 1 - (tokens - 1) / PROMISE)

    def wait(self, steps: int) -> None:
        """So many plain steps."""
        self._step += steps
        self.charge(0.0)

    def charge(self, loss: float) -> None:
        """What was lost beside the steps, or by the last one."""
        losses = self._losses
        if not loss and not losses:
            return
        if loss:
            losses.append((self._step, loss))
            self._whole += loss
        while losses and losses[0][0] <= self._step - (WINDOW - 1):
            losses.popleft()
        total = worst = 0.0
        for _, each in reversed(losses):
            total += each
            if total > worst:
                worst = total
        self._worst = worst
