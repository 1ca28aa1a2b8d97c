"""Logits on their way to the host: all, the best of each row, or what was drawn of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.backends.base import DraftRows
from strata.backends.hybrid.arrays import DraftTables, Matrix
from strata.backends.hybrid.uploads import Uploads
from strata.device.base import Copy, Device, Stream
from strata.memory.regions import Arena


class Results:
    """Pinned memory of `elements` numbers, and the wait for what is copied there."""

    def __init__(self, device: Device, compute: Stream, elements: int) -> None:
        self._device = device
        self._compute = compute
        self._pinned = device.host_alloc(elements * 4, "results")
        self._arrived = device.event()

    def read(self, matrices: Sequence[Matrix], what: str) -> list[NDArray[np.float32]]:
        """Copies in host memory, when the device has computed them; i32 ones are to be viewed as such."""
        places, used = [], 0
        for matrix in matrices:
            places.append(self._pinned.slice(used, matrix.buffer.nbytes))
            used += matrix.buffer.nbytes
        copies = [Copy(place, matrix.buffer) for place, matrix in zip(places, matrices, strict=True)]
        self._device.copy_batch(copies, self._compute, what)
        self._device.record(self._arrived, self._compute)
        self._device.sync(self._arrived)
        return [
            self._device.host_read(place).view(np.float32).reshape(matrix.shape).copy()
            for place, matrix in zip(places, matrices, strict=True)
        ]


NOTHING = -2
"""Proposed behind a sequence's last row, and in rows that are nobody's: no token is that."""


def draft_tables(drafts: Sequence[DraftRows], rows: int, uploads: Uploads, room: Arena) -> DraftTables:
    """On the device, in one copy. rows: of the logits, among them the drafts', one after the other."""
    settings = np.array([draft.drawing[:4] for draft in drafts], np.float32)
    proposed, numbers = np.full(rows, NOTHING, np.int32), np.zeros(rows, np.float32)
    for draft in drafts:
        proposed[draft.first : draft.first + len(draft.draft)] = draft.draft
        numbers[draft.first : draft.first + len(draft.drawing.numbers)] = draft.drawing.numbers
    first_row = np.array([*(draft.first for draft in drafts), rows], np.int32)
    parts = [part.reshape(-1).view(np.int32) for part in (settings, proposed, numbers, first_row)]
    words = uploads.matrix(np.concatenate(parts)[None, :], room, "drafts").buffer
    shapes = [settings.shape, (1, rows), (1, rows), (1, len(drafts) + 1)]
    tables, at = [], 0
    for height, width in shapes:
        tables.append(Matrix(words.slice(at, 4 * height * width), height, width))
        at += 4 * height * width
    return DraftTables(*tables)
