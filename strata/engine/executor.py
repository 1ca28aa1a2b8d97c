"""From scheduled work to logits: builds the Batch and runs the decoder."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import Verified
from strata.core import Batch, Sequence
from strata.engine.best_rows import Rows
from strata.engine.logit_reader import LogitReader, Needs
from strata.engine.scheduler import Work
from strata.model.decoder import Decoder


class Executor:
    """Runs one decoder over one KV cache (the backend's, as `Backend.kv_cache` made it).

    needs: what those who sample need of the next logits, None: all.
    """

    def __init__(self, decoder: Decoder, cache: Any) -> None:
        self.decoder = decoder
        self.cache = cache
        self.needs: Needs | None = None
        self._reader = LogitReader(decoder.backend)

    @property
    def logit_bytes(self) -> int:
        """Of logits that were taken from the backend so far: with a device, what its bus carried."""
        return self._reader.nbytes

    def run(self, works: List[Work]) -> list[Rows | Verified]:
        """Compute the works' tokens. Of each work the logits of its `logit_count` rows: f32 `[n, vocab]`, or
        what `needs` says is enough, where the backend can choose it and all are finite.

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
        return self._reader.read(logits, works, self.needs)


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
