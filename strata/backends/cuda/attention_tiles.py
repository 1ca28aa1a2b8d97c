"""Which rows of a batch a block of an attention kernel treats: csrc/cuda/attention_common.cuh's RowTile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core import Batch
from strata.device.base import Buffer

SINGLE_TOKENS = 16
"""A sequence with at most as many new tokens has its KV length split over blocks; others go by tiles. One
that decodes or is verified is the former: its one tile would leave most of a GPU without work."""


FEW_TILES = 82
"""With more tiles every SM of an RTX 3090 has one, whatever the number of KV heads."""


def row_tiles(sequences: Iterable[tuple[int, int, int, int]], most: int) -> NDArray[np.int32]:
    """i32 `[tiles, 4]`: first row, tokens, the first token's position, first page of its sequence.

    sequences: (first row, position of the first token, tokens, first page); most: tokens of a tile.
    """
    tiles = [
        (row + at, min(most, count - at), start + at, page)
        for row, start, count, page in sequences
        for at in range(0, count, most)
    ]
    return np.array(tiles, np.int32).reshape(-1, 4)


@dataclass(frozen=True)
class Tiles:
    """`count` RowTiles, i32 in pinned memory, and the batch's sequences that they are of."""

    table: Buffer
    count: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class BatchTables:
    """Of one pass, in pinned memory. first_page, positions: i32 of every row.

    singles: one row per tile; prompts: as many tokens as a block takes. None: there are none. prompt_rows:
    rows one by one of a prompt that is alone and has so few tiles that its KV length may be split.
    """

    first_page: Buffer
    positions: Buffer
    singles: Tiles | None
    prompts: Tiles | None
    prompt_rows: Tiles | None


Pinned = Callable[[NDArray[Any], str], Buffer]


def batch_tables(batch: Batch, pages: list[int], most: int, pinned: Pinned) -> BatchTables:
    """pages: of each sequence, in the order of the table of pages; most: tokens of a tile."""
    first = np.cumsum([0, *pages[:-1]], dtype=np.int32)
    counts = [sequence.count for sequence in batch.sequences]

    def tiles(chosen: list[int], tokens: int, what: str) -> Tiles | None:
        if not chosen:
            return None
        places = [(batch.sequences[i], int(first[i])) for i in chosen]
        table = row_tiles(((s.first_row, s.start, s.count, page) for s, page in places), tokens)
        return Tiles(pinned(table, what), len(table), tuple(chosen))

    short = [i for i, count in enumerate(counts) if count <= SINGLE_TOKENS]
    long = [i for i, count in enumerate(counts) if count > SINGLE_TOKENS]
    few = len(counts) == 1 and long == [0] and counts[long[0]] <= FEW_TILES * most
    return BatchTables(
        pinned(np.repeat(first, counts), "first pages of rows"),
        pinned(np.ascontiguousarray(batch.positions, np.int32), "positions of rows"),
        tiles(short, 1, "rows of single tokens"),
        tiles(long, most, "tiles of prompts"),
        tiles(long, 1, "rows of a prompt") if few else None,
    )
