"""What of a step's logits is taken from the backend: as little as those who sample need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from strata.backends.base import Backend, DraftRows, Drawing, Verified
from strata.engine.best_rows import BestRows, Rows
from strata.engine.scheduler import Work

_NO_ROWS = np.empty((0, 0), np.float32)


class Need(NamedTuple):
    """Of one work's rows. best: how many logits of each do, None: all. drawing: by which a device may choose
    the tokens in the sampler's stead, None: it may not."""

    best: int | None = None
    drawing: Drawing | None = None


class Needs(NamedTuple):
    """Of each work of a step; only the first `columns` logits of a row count."""

    columns: int
    works: Sequence[Need]


class LogitReader:
    """nbytes: taken from the backend so far: with a device, what its bus carried."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.nbytes = 0

    def read(self, logits: Any, works: Sequence[Work], needs: Needs | None) -> list[Rows | Verified]:
        """Of each work all logits of its rows, the best of them, or what the device drew. needs None: all."""
        counts = [work.logit_count for work in works]
        needs = needs or Needs(0, [Need()] * len(works))
        wanted = [self._wanted(need) for need in needs.works]
        if len(works) == 1 and counts[0] and needs.works[0].drawing is None:  # most steps are
            return [self._rows(logits, wanted[0], needs.columns)]
        firsts = [0, *accumulate(counts)]
        found: list[Rows | Verified] = [_NO_ROWS] * len(works)
        drawn = self._drawn(logits, works, needs, firsts)
        for place, verified in drawn.items():
            found[place] = verified
        # Neighbours with the same need are read at once.
        left = (place for place, count in enumerate(counts) if count)
        for some, run in groupby(left, lambda place: None if place in drawn else wanted[place] > 0):
            if some is None:
                continue
            places = list(run)
            begin, end = firsts[places[0]], firsts[places[-1] + 1]
            most = max(wanted[place] for place in places)
            rows = self._rows(self._backend.some_rows(logits, begin, end - begin), most, needs.columns)
            for place in places:
                found[place] = rows[firsts[place] - begin : firsts[place + 1] - begin]
        return found

    def _wanted(self, need: Need) -> int:
        """How many logits of each row are enough, and the backend can choose; 0: all are read."""
        best = need.best or 0
        return best if best <= self._backend.most_best else 0

    def _drawn(
        self, logits: Any, works: Sequence[Work], needs: Needs, firsts: Sequence[int]
    ) -> dict[int, Verified]:
        """By place: what the device is certain of."""
        asked, most = dict[int, DraftRows](), 0
        for place, (work, need) in enumerate(zip(works, needs.works, strict=True)):
            if need.drawing is not None and work.logit_count and self._wanted(need):
                asked[place] = DraftRows(firsts[place], work.draft, need.drawing)
                most = max(most, need.best or 0)
        if not asked:
            return {}
        drawn = self._backend.verify_drafts(logits, list(asked.values()), most, needs.columns)
        self.nbytes += 8 * len(drawn)
        return {place: one for place, one in zip(asked, drawn, strict=True) if one.token >= 0}

    def _rows(self, part: Any, best: int, columns: int) -> Rows:
        """The `best` logits of each row; all of them for 0, or where a row is not sound."""
        chosen = self._backend.best_logits(part, best, columns) if best else None
        if chosen is not None:
            self.nbytes += chosen.values.nbytes + chosen.ids.nbytes
            return BestRows(*chosen)
        found = self._backend.to_numpy(part)
        self.nbytes += found.nbytes
        return found
