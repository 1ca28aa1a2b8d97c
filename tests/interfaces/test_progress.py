"""How far a long command is: what a log shows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.interfaces.progress import LINE_SECONDS, ProgressLines, progress_bar


class Clock:
    """Time that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_log_gets_a_line_now_and_then(clock: Clock, capsys: Any) -> None:
    show = ProgressLines("calibrating", "rows", clock)
    for step in range(100):
        clock.now += 1
        show(100 + 10 * step, 10_100, f"layer {step // 10}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 // LINE_SECONDS
    assert lines[0] == "calibrating: 2 %, 190 rows of 10,100 rows, layer 0, 17 min left"


def test_sizes_have_units_and_the_time_counts_from_where_this_run_began(clock: Clock, capsys: Any) -> None:
    show = ProgressLines("converting", "bytes", clock)
    show(3 << 30, 4 << 30, "")  # what an earlier run did
    clock.now += LINE_SECONDS
    show(3 << 30, 4 << 30, "")
    clock.now += LINE_SECONDS
    show((3 << 30) + (1 << 29), 4 << 30, "experts.\x1b[2J")
    assert capsys.readouterr().err.splitlines() == [
        "converting: 75 %, 3 GiB of 4 GiB",
        "converting: 88 %, 3.5 GiB of 4 GiB, experts.\\x1b[2J, 20 s left",
    ]


def test_the_time_that_is_left_goes_by_the_recent_speed(clock: Clock, capsys: Any) -> None:
    """A model's first part may be ten times as fast as what follows."""
    show = ProgressLines("converting", "rows", clock)
    for step in range(300):
        clock.now += 1
        show(min(1000 * step, 100_000) + max(0, 10 * (step - 100)), 110_000, "")
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith(f"{(110_000 - 100_000 - 1_990) / 10 / 60:.0f} min left")


def test_what_takes_no_time_prints_nothing(capsys: Any) -> None:
    with progress_bar("verifying") as progress:
        assert progress is not None
        progress(0, 0, "")
        progress(5, 5, "done")
    assert not capsys.readouterr().err


def test_a_closed_stderr_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with progress_bar("verifying") as progress:
        shown: Callable[..., object] | None = progress
    assert shown is None
