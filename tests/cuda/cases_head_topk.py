"""head_topk: both of its launches against a sort."""

from __future__ import annotations

import numpy as np
from cases import Case, Prepared, call_of
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes

NONE = np.float32(-3e38)


def best(values: np.ndarray, ids: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest first, equal ones by id; what is lacking is NONE with id -1."""
    allowed = values > NONE
    order = np.lexsort((ids[allowed], -values[allowed]))[:top]
    lacking = top - len(order)
    chosen = np.concatenate([values[allowed][order], np.full(lacking, NONE)])
    return chosen, np.concatenate([ids[allowed][order], np.full(lacking, -1)])


LARGEST = np.finfo(np.float32).max


def prepare(
    rows: int, columns: int, span: int, top: int, second: bool = False, beside: int = 0, nan: bool = False
) -> Prepared:
    """beside: columns behind the others that are better than all and must not be looked at."""
    rng = np.random.default_rng(columns)
    logits = np.round(rng.standard_normal((rows, columns)).astype(np.float32), 1)  # many are equal
    logits[0, : columns // 2] = -np.inf
    ids = np.broadcast_to(np.arange(columns, dtype=np.int32), logits.shape)
    if second:
        ids = np.stack([rng.permutation(columns * 9)[:columns] for _ in range(rows)]).astype(np.int32)
        logits[0, -3:], ids[0, -3:] = NONE, -1
    spans = -(-columns // span)
    values, found = unwritten((rows, spans, top)), unwritten((rows, spans, top), np.int32)
    given = read_only(ids) if second else None
    shape = launch_shapes.head_topk(rows, columns, span)
    whole = np.concatenate([logits, np.full((rows, beside), 1e30, np.float32)], axis=1)
    if nan:
        whole[-1, columns - 2], logits[-1, columns - 2] = np.nan, LARGEST
    numbers = (columns, columns + beside, span, top)
    call = call_of(shape, (read_only(whole), given, values, found, *numbers))

    def check() -> None:
        for row in range(rows):
            for i in range(spans):
                part = slice(i * span, (i + 1) * span)
                wanted, wanted_ids = best(logits[row, part], ids[row, part], top)
                np.testing.assert_array_equal(values[row, i], wanted)
                np.testing.assert_array_equal(found[row, i], wanted_ids)

    return Prepared(call, check, {(0,): logits.nbytes})


CASES = [
    Case("spans", "head_topk", lambda: prepare(2, 1000, 320, 9), True),
    Case("argmax", "head_topk", lambda: prepare(1, 3000, 1024, 1), True),
    Case("padded", "head_topk", lambda: prepare(3, 500, 256, 5, beside=12)),
    Case("nan", "head_topk", lambda: prepare(2, 300, 320, 3, nan=True)),
    Case("lacking", "head_topk", lambda: prepare(1, 40, 64, 30)),
    Case("second-launch", "head_topk", lambda: prepare(2, 320, 320, 12, second=True), True),
]
