"""Kernels take no more instructions than recorded: a regression shows whatever else the machine does."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import instruction_counts as counts
from instruction_counts import Change, Counts, compare, table


def counted(**instructions: int) -> Counts:
    return Counts("g++ 12.2.0", "3.19.0", instructions)


def test_three_percent_more_are_too_many() -> None:
    changes = compare(counted(a=1000, b=1000, gone=1), counted(a=1029, b=1031, new=5))
    assert [(one.case, one.worse) for one in changes] == [("a", False), ("b", True), ("new", True)]
    assert changes[1].share == pytest.approx(0.031)
    assert not Change("faster", 1000, 10).worse


def test_the_table_names_every_case() -> None:
    text = table(compare(counted(a=1000), counted(a=900, new=5)))
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["a", "1000", "900", "-10.0%"],
        ["new", "-", "5", "new"],
    ]


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "RECORD", tmp_path / "record.json")
    counted(a=1).write()
    assert Counts.read() == counted(a=1)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(counts.missing()), reason=f"{counts.missing()} is not installed")
def test_no_case_takes_more_instructions_than_recorded(tmp_path: Path) -> None:
    if not counts.RECORD.exists():
        pytest.skip("nothing is recorded: scripts/instruction_counts.py --update")
    record = Counts.read()
    major = record.compiler.partition(".")[0]
    if counts.compiler().partition(".")[0] != major:
        pytest.skip(f"recorded with {record.compiler}, here is {counts.compiler()}")
    changes = compare(record, counts.count_all(counts.build(tmp_path)))
    assert len(changes) == 7
    shown = f"\n{table(changes)}\nscripts/instruction_counts.py --profile CASE shows where they go"
    assert not [one.case for one in changes if one.worse], shown
    if any(one.share is not None and one.share < -counts.TOLERANCE for one in changes):
        warnings.warn(f"fewer than recorded: scripts/instruction_counts.py --update{shown}", stacklevel=1)
