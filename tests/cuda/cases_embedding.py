"""embedding: rows of packed matrices in every format, against what they mean."""

from __future__ import annotations

import numpy as np
from cases import Case, Prepared, assert_close, call_of
from packed_weights import random_matrix
from runners import read_only, unwritten

from strata.backends.cuda import launch_shapes
from strata.backends.cuda.launch_shapes import VALUE_KINDS
from strata.store.formats import FORMATS


def prepare(fmt: str, columns: int) -> Prepared:
    tensor, matrix = random_matrix(fmt, 37, columns, columns)
    ids = np.array([36, 0, 31, 36], np.int32)
    y = unwritten((len(ids), columns))
    kind = FORMATS[fmt]
    numbers = (VALUE_KINDS[kind.values], kind.group, kind.scale_bytes, int(kind.minimum), 1.5)
    arrays = (read_only(tensor.data), read_only(ids), y)
    call = call_of(launch_shapes.embedding(len(ids)), (*arrays, columns, tensor.shape.padded_cols, *numbers))
    return Prepared(call, lambda: assert_close(y, 1.5 * matrix[ids], 1e-6))


SIMULATED = ("w4g64", "w8", "mxfp4", "w4g32m", "f16")
CASES = [Case(fmt, "embedding", lambda f=fmt: prepare(f, 200), fmt in SIMULATED) for fmt in FORMATS]
