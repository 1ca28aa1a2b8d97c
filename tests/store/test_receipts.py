"""receipts.json: written whole, read with distrust, and only for the conversion it was measured on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import StoreError
from strata.store.manifest import MANIFEST
from strata.store.receipts import MOST, RECEIPTS, LoadedReceipts, Receipt, add_receipt, read_receipts

RECEIPT = Receipt(
    date="2026-11-30",
    tool="strata 0.1.0",
    reference="tiny",
    reference_formats="bf16",
    text="prose.txt",
    text_xxh3="0123456789abcdef",
    predictions=8000,
    window=512,
    second_half=False,
    kv="int8",
    activations="int8",
    perplexity=27.5,
    reference_perplexity=27.0,
    change=27.5 / 27 - 1,
    change_error=0.001,
    kl_mean=0.012,
    kl_median=0.008,
    kl_p99=0.09,
    kl_max=1.0,
    top1=0.978,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_text("{}")
    return tmp_path


def test_what_was_written_is_read(store: Path) -> None:
    assert read_receipts(store) == LoadedReceipts((), ""), "a store without receipts is no fault"
    assert add_receipt(store, RECEIPT) == store / RECEIPTS
    other = dataclasses.replace(RECEIPT, kv="bf16", kl_mean=0.01)
    add_receipt(store, other)
    assert read_receipts(store) == LoadedReceipts((RECEIPT, other), "")
    assert sorted(path.name for path in store.iterdir()) == [MANIFEST, RECEIPTS], "no temporary file is left"


def test_the_same_measurement_again_replaces_the_old_one(store: Path) -> None:
    add_receipt(store, RECEIPT)
    add_receipt(store, dataclasses.replace(RECEIPT, date="2026-12-01", kl_mean=0.02))
    found = read_receipts(store).receipts
    assert [one.kl_mean for one in found] == [0.02]


def test_the_oldest_go_first(store: Path) -> None:
    for window in range(2, MOST + 5):
        add_receipt(store, dataclasses.replace(RECEIPT, window=window))
    assert [one.window for one in read_receipts(store).receipts] == list(range(5, MOST + 5))


def test_another_conversion_has_none(store: Path) -> None:
    add_receipt(store, RECEIPT)
    (store / MANIFEST).write_text("{ }")
    found = read_receipts(store)
    assert not found.receipts and "another conversion" in found.reason
    add_receipt(store, RECEIPT)
    assert read_receipts(store).receipts == (RECEIPT,), "what no longer counts is overwritten"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kl_mean", "0.1"),
        ("kl_mean", True),
        ("kl_mean", float("nan")),
        ("top1", None),
        ("window", 1.5),
        ("date", "yesterday"),
        ("reference", "x" * 400),
        ("surprise", 1),
    ],
)
def test_damage_is_no_receipt(store: Path, field: str, value: Any) -> None:
    add_receipt(store, RECEIPT)
    data = json.loads((store / RECEIPTS).read_text())
    data["receipts"][0][field] = value
    (store / RECEIPTS).write_text(json.dumps(data))
    found = read_receipts(store)
    assert not found.receipts and "is ignored" in found.reason


@given(st.binary(max_size=200))
def test_no_file_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("store")
    (folder / MANIFEST).write_text("{}")
    (folder / RECEIPTS).write_bytes(data)
    assert read_receipts(folder).receipts == ()


def test_a_folder_in_the_way_is_said(store: Path) -> None:
    (store / RECEIPTS).mkdir()
    with pytest.raises(StoreError, match="was not written"):
        add_receipt(store, RECEIPT)
