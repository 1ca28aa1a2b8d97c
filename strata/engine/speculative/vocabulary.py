"""Ids of one vocabulary among those of another that spells the same tokens under other ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class IdMap:
    """From a model's ids to its draft's.

    drafted: i64, the draft's id for each of the model's, -1 where it has none. filler: the draft's id that it
    reads instead: what it guesses then is worse, and still only a guess.
    """

    drafted: NDArray[np.int64]
    filler: int

    @property
    def most(self) -> int:
        """The highest id of the draft that is used."""
        return int(self.drafted.max())

    def ids(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of the model's tokens; ids past the model's vocabulary are fillers, too."""
        wanted = np.asarray(tokens, dtype=np.int64)
        known = wanted < len(self.drafted)
        found = np.where(known, self.drafted[np.where(known, wanted, 0)], -1)
        ids: list[int] = np.where(found < 0, self.filler, found).tolist()
        return ids

    def logits(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The draft's logits by the model's ids, f32; -inf for those that it does not have."""
        found = row[self.drafted]  # -1 reads the last one, which is overwritten
        found[self.drafted < 0] = -np.inf
        return found


def map_ids(model: Mapping[int, str], draft: Mapping[int, str], vocabulary: int) -> IdMap | None:
    """By spelling: every id with its text. None: every id of the model means the same to the draft.

    vocabulary: the model's ids are below it. Of ids that are spelled alike the draft's lowest is taken.
    """
    if all(draft.get(index) == text for index, text in model.items()):
        return None
    by_text: dict[str, int] = {}
    for index, text in sorted(draft.items()):
        by_text.setdefault(text, index)
    drafted = np.full(vocabulary, -1, dtype=np.int64)
    for index, text in model.items():
        drafted[index] = by_text.get(text, -1)
    return IdMap(drafted, min(by_text.values(), default=0))
