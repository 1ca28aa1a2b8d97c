"""The border of the extension: numbers that no caller of ours gives, but that C++ would index with."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.backends.base import PAGE_ALIGNMENT, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.isa import extension
from strata.plan.spec import RouterSpec
from strata.store.formats import FORMATS, ExpertLayout

EXTENSION = extension()
LAYOUT = ExpertLayout(FORMATS["w4g64"], FORMATS["w4g64"], 64, 128, 2, False)


def numbers(**changed: int) -> dict[str, Any]:
    """The arguments of RecordShape for LAYOUT."""
    return {
        "gate_up_code": LAYOUT.gate_up_format.code,
        "down_code": LAYOUT.down_format.code,
        "hidden": LAYOUT.hidden,
        "slice_width": LAYOUT.slice_width,
        "slices": LAYOUT.slices,
        "slice_bytes": LAYOUT.slice_bytes,
        "down_offset": LAYOUT.down_offset(0),
        "gate_up_bias_offset": LAYOUT.gate_up_bias_offset,
        "down_bias_offset": LAYOUT.down_bias_offset,
        "record_bytes": LAYOUT.record_bytes,
        "biases": LAYOUT.biases,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate_up_code": -1}, "no weight format has code -1"),
        ({"down_code": len(FORMATS)}, f"no weight format has code {len(FORMATS)}"),
        ({"down_code": 1 << 30}, "no weight format has code"),
        ({"hidden": 0}, "the hidden size of an expert record is 0, allowed are 1 to"),
        ({"slice_width": -64}, "the slice width of an expert record is -64"),
        ({"slices": 0}, "slices of an expert record are 0"),
        ({"hidden": 65}, "the layout says|down begins at"),
        ({"slices": 1 << 30}, "slices of an expert record are"),
        ({"slices": 1 << 23}, "do not fit"),
        ({"record_bytes": LAYOUT.payload_bytes - 1}, "do not fit"),
    ],
    ids=str,
)
def test_record_shapes_that_cannot_be_are_refused(changed: dict[str, int], message: str) -> None:
    EXTENSION.RecordShape(**numbers())
    with pytest.raises(ValueError, match=message):
        EXTENSION.RecordShape(**numbers(**changed))


def experts(ids: list[int], active: list[int] | None = None, experts: int = 2) -> Any:
    """One token routed to `ids`, with a table of empty records."""
    table = EXTENSION.ExpertTable(
        EXTENSION.RecordShape(**numbers()), experts, lambda index: np.zeros(LAYOUT.record_bytes, np.uint8)
    )
    x, gating = np.ones((1, 64), np.float32), EXTENSION.Gating("silu", 1.0, 1.0)
    weights = np.ones((1, len(ids)), np.float32)
    cpu = CpuBackend(threads=1).cpu
    return EXTENSION.experts(cpu, x, np.array([ids], np.int32), weights, table, gating, False, active)


@pytest.mark.parametrize(
    ("ids", "active", "message"),
    [
        ([0, 1], [1, 0], "do not ascend"),
        ([0, 1], [0, 0], "do not ascend"),
        ([0, 1], [1, 2], "expert 2 was routed to, the layer has 2"),
        ([0, 2], None, "expert 2 was routed to, the layer has 2"),
        ([0, 2], [0], "expert 2 was routed to, the layer has 2"),
        ([-1, 0], None, "expert -1 was routed to"),
    ],
    ids=str,
)
def test_experts_that_are_not_there_are_refused(
    ids: list[int], active: list[int] | None, message: str
) -> None:
    experts([0, 1], [0, 1])
    with pytest.raises(ValueError, match=message):
        experts(ids, active)


def cache_lines(nbytes: int) -> Any:
    """Zero bytes that begin at a multiple of 64."""
    memory = np.zeros(nbytes + PAGE_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % PAGE_ALIGNMENT
    return memory[start : start + nbytes]


KV = {"layers": 2, "kv_heads": 2, "key_dim": 16, "value_dim": 8, "page_tokens": 8}
LAYER_BYTES = KvSpec(**KV, dtype="f32").layer_bytes  # type: ignore[arg-type]
MEMORY = cache_lines(4 * 2 * LAYER_BYTES)
OFFSETS = np.arange(4) * 2 * LAYER_BYTES


def kv_cache(**changed: Any) -> Any:
    """An f32 KvCache of KV's geometry: four pages."""
    given = {**KV, "value_in_key": False, "layer_bytes": LAYER_BYTES, "memory": MEMORY, "offsets": OFFSETS}
    given = {**given, "group": 0, "steps": np.zeros(0, np.float32)}
    return EXTENSION.KvCache(**{"dtype": "f32", **given, **changed})


def read_only(values: Any) -> Any:
    view = values.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "fp8"}, "kv dtype 'fp8'"),
        ({"group": 32}, "group of a dtype without scales is 32, expected 0"),
        ({"dtype": "int8", "group": 24}, "elements of a group is 24, expected 16"),
        ({"dtype": "int8", "steps": np.zeros(3, np.float32)}, "steps is 3, expected 4"),
        ({"steps": np.zeros(4, np.float32)}, "scales of a tensor without any is 1, expected 0"),
        ({"kv_heads": 0}, "smallest size is 0, expected 1"),
        ({"key_dim": 0}, "smallest size is 0, expected 1"),
        ({"page_tokens": 12}, "page_tokens is 12, expected 8"),
        ({"value_in_key": True, "value_dim": 17}, "value_dim is 17, expected 16"),
        ({"layers": 1 << 62}, "beyond 64 bits"),
        ({"key_dim": 1 << 61, "kv_heads": 8}, "beyond 64 bits"),
        ({"layer_bytes": LAYER_BYTES - 64}, "bytes of a layer"),
        ({"layers": 3}, "offset of a page"),
        ({"offsets": OFFSETS + 64}, "offset of a page"),
        ({"offsets": OFFSETS - 64}, "offset of a page"),
        ({"offsets": np.array([(1 << 63) - 1])}, "offset of a page"),
        ({"offsets": OFFSETS[:1] + 32}, "bytes from a multiple of 64 to a page is 32, expected 0"),
        ({"memory": np.zeros((4, 4 * LAYER_BYTES), np.uint8)[:, ::2]}, "not one piece of bytes"),
        ({"memory": np.zeros(8 * LAYER_BYTES, np.uint16)}, "not one piece of bytes"),
        ({"memory": read_only(MEMORY)}, "the memory is read-only"),
    ],
    ids=str,
)
def test_kv_caches_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    """Zero heads ended the process with a division by zero; products that wrapped to 0 passed the check."""
    kv_cache()
    with pytest.raises(ValueError, match=message):
        kv_cache(**changed)


def attend(sequence: tuple[int, int, int], pages: list[int], **changed: Any) -> None:
    """One op on three rows."""
    call: dict[str, Any] = {"layer": 0, "heads": 4, "scale": 1.0, "window": 0, "sinks": None, **changed}
    rows = {name: np.ones((3, width), np.float32) for name, width in (("q", 64), ("k", 32), ("v", 16))}
    cut = EXTENSION.Sequence(*sequence, np.array(pages, np.int32))
    cpu = CpuBackend(threads=1).cpu
    EXTENSION.attention(
        cpu=cpu, cache=kv_cache(), sequences=[cut], **rows, out=np.empty((3, 32), np.float32), **call
    )


@pytest.mark.parametrize(
    ("sequence", "pages", "changed", "message"),
    [
        ((1, 3, 0), [0], {}, "first row of a sequence is 1"),
        (((1 << 64) - 1, 3, 0), [0], {}, "first row of a sequence"),
        ((0, 3, 6), [0], {}, "start of a sequence in the tokens of its pages is 6, expected 8"),
        ((0, 3, (1 << 64) - 2), [0], {}, "start of a sequence"),
        ((0, 3, 0), [4], {}, "page id is 4, expected 4"),
        ((0, 3, 0), [-1], {}, "page id"),
        ((0, 3, 0), [0], {"heads": 3}, "heads is 3"),
        ((0, 3, 0), [0], {"heads": 1 << 60}, "beyond 64 bits"),
        ((0, 3, 0), [0], {"layer": 2}, "layer is 2, expected 2"),
    ],
    ids=str,
)
def test_attention_stays_inside_its_arrays(
    sequence: tuple[int, int, int], pages: list[int], changed: dict[str, Any], message: str
) -> None:
    """Rows and tokens near 2**64 wrapped around and passed for small ones."""
    attend((0, 3, 5), [2])
    with pytest.raises(ValueError, match=message):
        attend(sequence, pages, **changed)


@pytest.mark.parametrize("name", ["experts", "top_k", "groups", "top_groups"])
@pytest.mark.parametrize("value", [-1, 0, 1 << 70])
def test_router_sizes_that_cannot_be_are_refused(name: str, value: int) -> None:
    """A size that C++ cannot hold was a RuntimeError about casts."""
    spec = SimpleNamespace(**{**asdict(RouterSpec(8, 2)), name: value})
    logits, ids, weights = (
        np.ones((1, 8), np.float32),
        np.zeros((1, 2), np.int32),
        np.zeros((1, 2), np.float32),
    )
    with pytest.raises(ValueError, match=f"route: .* {value}"):
        EXTENSION.route(CpuBackend(threads=1).cpu, logits, spec, None, ids, weights)


@pytest.mark.parametrize(("rows", "cols"), [(0, 64), (64, -1), ((1 << 31) - 1, 64), (64, 1 << 30)])
def test_packed_matrices_that_cannot_be_are_refused(rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match="allowed are 1 to"):
        EXTENSION.PackedMatrix(np.zeros(64, np.uint8), 0, rows, cols)
