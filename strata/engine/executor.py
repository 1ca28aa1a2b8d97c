"""From scheduled work to logits: builds the Batch and runs the decoder."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.core import Batch, Sequence
from strata.engine.best_rows import BestRows, Rows
from strata.engine.scheduler import Work
from strata.model.decoder import Decoder


class Enough(NamedTuple):
    """The `best` ones of the first `columns` logits."""

    best: int
    columns: int


class Executor:
    """Runs one decoder over one KV cache (the backend's, as `Backend.kv_cache` made it).

    enough: what those who sample need of the next logits, None: all. logit_bytes: of logits that were taken
    from the backend so far: with a device, what its bus carried.
    """

    def __init__(self, decoder: Decoder, cache: Any) -> None:
        self.decoder = decoder
        self.cache = cache
        self.enough: Enough | None = None
        self.logit_bytes = 0

    def run(self, works: List[Work]) -> Rows:
        """Compute the works' tokens; logits f32 `[n, vocab]`: `logit_count` rows of each work, in order; only
        the best of them where `enough` says so, the backend can choose them, and all are finite.

        Afterwards the tokens are in the KV pages and `computed` of each request says so, drafts apart: those
        that are accepted become computed when they become tokens.
        """
        batch = build_batch(works)
        copies = [work.copy for work in works if work.copy is not None]
        if copies:
            self.decoder.backend.copy_pages(self.cache, copies)
        logits = self.decoder.forward(batch, self.cache)
        for work in works:
            work.request.computed += work.count - len(work.draft)
        if logits is None:
            return np.empty((0, self.decoder.spec.vocab), dtype=np.float32)
        return self._read(logits)

    def _read(self, logits: Any) -> Rows:
        backend, enough = self.decoder.backend, self.enough
        best = None if enough is None else backend.best_logits(logits, *enough)
        if best is not None:
            self.logit_bytes += best.values.nbytes + best.ids.nbytes
            return BestRows(*best)
        found = backend.to_numpy(logits)
        self.logit_bytes += found.nbytes
        return found


def build_batch(works: List[Work]) -> Batch:
    """Pack the works' tokens row after row."""
    token_ids: list[int] = []
    positions: list[int] = []
    sequences: list[Sequence] = []
    logit_rows: list[int] = []
    for work in works:
        stop = work.start + work.count
        sequences.append(Sequence(len(token_ids), work.count, work.start, _int32(work.table)))
        token_ids += work.token_ids
        positions += range(work.start, stop)
        logit_rows += range(len(token_ids) - work.logit_count, len(token_ids))
    return Batch(_int32(token_ids), _int32(positions), tuple(sequences), _int32(logit_rows))


def _int32(values: List[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
