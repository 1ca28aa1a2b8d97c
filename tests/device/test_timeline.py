"""Timelines: what Perfetto needs of the file, and the sums of overlap."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.device.timeline import (
    Span,
    Timeline,
    busy_seconds,
    hidden_share,
    overlap_seconds,
    share_under,
)

MOMENTS = st.integers(0, 40)


def spans_of(pairs: list[tuple[int, int]]) -> list[Span]:
    return [Span("x", float(min(pair)), float(max(pair))) for pair in pairs]


@given(st.lists(st.tuples(MOMENTS, MOMENTS)), st.lists(st.tuples(MOMENTS, MOMENTS)))
def test_sums_equal_a_count_of_seconds(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = spans_of(first), spans_of(second)
    seconds_a = {t for span in a for t in range(int(span.start), int(span.end))}
    seconds_b = {t for span in b for t in range(int(span.start), int(span.end))}
    assert busy_seconds(a) == len(seconds_a)
    assert overlap_seconds(a, b) == overlap_seconds(b, a) == len(seconds_a & seconds_b)
    if seconds_a:
        assert share_under(a, b) == pytest.approx(len(seconds_a & seconds_b) / len(seconds_a))
    if seconds_a and seconds_b:
        shorter = min(len(seconds_a), len(seconds_b))
        assert hidden_share(a, b) == pytest.approx(len(seconds_a & seconds_b) / shorter)


def test_nothing_to_hide_is_not_hidden() -> None:
    busy = [Span("kernel", 0.0, 1.0)]
    with pytest.raises(ValueError, match="none of the spans"):
        hidden_share([], busy)
    with pytest.raises(ValueError, match="none of the spans"):
        share_under([Span("copy", 1.0, 1.0)], busy)


def test_a_span_does_not_end_before_it_starts() -> None:
    timeline = Timeline()
    for end in (0.5, float("nan")):
        with pytest.raises(ValueError, match="'copy' on lane 'h2d'"):
            timeline.add("h2d", "copy", 1.0, end)
    assert timeline.lanes == []


def test_spans_are_sorted_and_filtered() -> None:
    timeline = Timeline()
    timeline.add("h2d", "b", 2.0, 3.0, layer=1)
    timeline.add("h2d", "a", 0.0, 1.0, layer=0)
    assert [span.name for span in timeline.spans("h2d")] == ["a", "b"]
    assert [span.name for span in timeline.spans("h2d", lambda s: s.details["layer"] == 1)] == ["b"]
    assert timeline.spans("disk") == []


def test_the_file_is_a_trace_that_viewers_open(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add("compute", "kernel", 1e-3, 2e-3, macs=7)
    timeline.add("socket 1", "experts", 0.0, 1.5e-3)
    timeline.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in complete] == [
        ("kernel", "compute", 1000.0, 1000.0),
        ("experts", "socket 1", 0.0, 1500.0),
    ]
    assert complete[0]["args"] == {"macs": 7}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {threads[e["pid"], e["tid"]] for e in complete} == {"compute", "socket 1"}
    assert [processes[event["pid"]] for event in complete] == ["device", "host"]
    assert len({event["tid"] for event in complete}) == 2


@pytest.mark.parametrize("name", ["missing/trace.json", "file/trace.json", "", "/dev/full"])
def test_what_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        Timeline().write(tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_and_the_file_behind_it_is_new(tmp_path: Path) -> None:
    """A link in the place of /dev/stdout, whose output goes to a file."""
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "out", tmp_path / "stdout"
    file.touch()
    link.symlink_to(file)
    Timeline().write(link)
    assert link.is_symlink() and json.loads(file.read_text())["displayTimeUnit"] == "ms"
    assert list((tmp_path / "there").iterdir()) == [file]


def test_neighbours_do_not_overlap_after_rounding_to_nanoseconds() -> None:
    timeline = Timeline()
    moments = [index / 3e6 for index in range(200)]
    for start, end in itertools.pairwise(moments):
        timeline.add("h2d", "copy", start, end)
    spans = [event for event in timeline.to_chrome()["traceEvents"] if event["ph"] == "X"]
    for first, second in itertools.pairwise(spans):
        assert first["ts"] + first["dur"] <= second["ts"] + 1e-9
