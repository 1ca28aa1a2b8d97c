"""Traces: what is written comes back, what is damaged is refused or cut, memory stays bounded."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.errors import FileFormatError
from strata.memory import trace_format as form
from strata.memory.experts import ExpertSpace
from strata.memory.routes_csv import read_routes
from strata.memory.trace import TraceFile, TraceWriter
from strata.memory.trace_format import Access, Outcome, TraceHeader

SPACE = ExpertSpace((4, 0, 300))
HEADER = TraceHeader("toy", SPACE, (100, 0, 1 << 40))
number = st.integers(0, form.MAX_NUMBER)
same_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    layer = draw(st.sampled_from([0, 2]))
    experts = tuple(draw(st.lists(st.integers(0, SPACE.per_layer[layer] - 1), unique=True, max_size=6)))
    measured = bool(experts) and draw(st.booleans())

    def column(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(values) for _ in experts) if measured else ()

    outcomes = column(st.sampled_from([Outcome.HIT, Outcome.FETCH, Outcome.CPU]))
    return Access(
        *(draw(number), draw(number), layer, experts, draw(number), draw(st.booleans())),
        outcomes=tuple(Outcome(value) for value in outcomes),
        bytes=column(st.integers(0, form.MAX_BYTES)),
        microseconds=column(number),
    )


def write(path: Path, recorded: list[Access]) -> Path:
    path.unlink(missing_ok=True)
    with TraceWriter(path, HEADER) as writer:
        for access in recorded:
            writer.add(access)
    return path


@given(recorded=st.lists(accesses(), max_size=30))
@same_folder
def test_what_is_written_comes_back(tmp_path: Path, recorded: list[Access]) -> None:
    trace = TraceFile(write(tmp_path / "a.trace", recorded))
    assert trace.header == HEADER
    assert list(trace) == recorded
    assert list(trace) == recorded, "a trace can be read again"
    assert not trace.torn


@given(recorded=st.lists(accesses(), min_size=1, max_size=8), data=st.data())
@same_folder
def test_damage_is_refused_or_cut_off(tmp_path: Path, recorded: list[Access], data: st.DataObject) -> None:
    """One changed byte anywhere: an error, never other accesses than were written."""
    path = write(tmp_path / "a.trace", recorded)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        trace = TraceFile(path)
        found = list(trace)
    except FileFormatError:
        return
    assert found == recorded[: len(found)]
    assert trace.torn


@given(recorded=st.lists(accesses(), max_size=8), data=st.data())
@same_folder
def test_a_killed_recording_can_be_read_up_to_the_cut(
    tmp_path: Path, recorded: list[Access], data: st.DataObject
) -> None:
    path = write(tmp_path / "a.trace", recorded)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    try:
        trace = TraceFile(path)
    except FileFormatError as error:
        assert "header" in error.cause or "is no trace" in error.cause
        return
    assert list(trace) in ([], recorded)
    assert trace.torn


@given(content=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_as_a_block_are_refused_or_valid(content: bytes) -> None:
    try:
        found = form.decode(content, SPACE, "here")
    except FileFormatError:
        return
    assert form.encode(found) == content


@given(data=st.data(), recorded=st.lists(accesses(), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_block_with_any_change_is_refused_or_valid(data: st.DataObject, recorded: list[Access]) -> None:
    """As by somebody who also corrects the checksum."""
    content = bytearray(form.encode(recorded))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = form.decode(bytes(content), SPACE, "here")
    except FileFormatError:
        return
    for access in found:
        assert all(index < SPACE.per_layer[access.layer] for index in access.experts)


def test_memory_is_bounded_by_a_block(tmp_path: Path) -> None:
    path = tmp_path / "long.trace"
    tracemalloc.start()
    with TraceWriter(path, HEADER) as writer:
        for step in range(60_000):
            writer.add(Access(0, step, 2, (step % 300, (step + 1) % 300)))
    count = sum(1 for _ in TraceFile(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 60_000
    assert peak < 12 << 20  # 60,000 accesses as objects take more than 20 MB
    assert path.stat().st_size < 5 * 60_000  # 21 bytes each before deflating


def test_a_block_that_would_fill_the_memory_is_not_inflated(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(1 << 28), 9)
    path = write(tmp_path / "a.trace", [])
    head = path.read_bytes()[: -len(form.end_frame(0, 0))]
    for claimed in (8, 1 << 28):
        sizes = form._FRAME.pack(form.DATA, len(bomb), claimed, form.xxhash.xxh3_64_intdigest(bomb))
        path.write_bytes(head + sizes + bomb)
        tracemalloc.start()
        with pytest.raises(FileFormatError, match=r"does not inflate to 8|claims"):
            list(TraceFile(path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


@pytest.mark.parametrize(
    "access",
    [
        Access(0, 0, 1, (0,)),
        Access(0, 0, 3, ()),
        Access(0, 0, 0, (4,)),
        Access(0, 0, 0, (1, 1)),
        Access(-1, 0, 0, (1,)),
        Access(0, 1 << 32, 0, (1,)),
        Access(0, 0, 0, (1, 2), outcomes=(Outcome.HIT,), bytes=(0,), microseconds=(0,)),
        Access(0, 0, 0, (1,), bytes=(5,), microseconds=(1,)),
        Access(0, 0, 0, (1,), outcomes=(Outcome.UNKNOWN,), bytes=(5,), microseconds=(1,)),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path, access: Access) -> None:
    with TraceWriter(tmp_path / "a.trace", HEADER) as writer, pytest.raises(ValueError, match="Access"):
        writer.add(access)
    assert list(TraceFile(tmp_path / "a.trace")) == []


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.trace", [])
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "a.trace", HEADER)


@pytest.mark.parametrize("more", [b"x", form.end_frame(1, 2)])
def test_nothing_comes_after_the_end(tmp_path: Path, more: bytes) -> None:
    path = write(tmp_path / "a.trace", [Access(0, 0, 0, (1, 2))])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(FileFormatError, match=f"{size + len(more)} bytes, the last frame ends at {size}"):
        list(TraceFile(path))


def test_an_end_that_counts_other_accesses_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace", [Access(0, 0, 0, (1, 2))])
    content = path.read_bytes().removesuffix(form.end_frame(1, 2))
    path.write_bytes(content + form.end_frame(2, 2))
    with pytest.raises(FileFormatError, match="2 accesses with 2 experts, read were 1 with 2"):
        list(TraceFile(path))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", b'{"model": 1, "experts": [], "expert_bytes": []}', b"\xff", b"[" * 100_000]
    + [
        b'{"model": "m", "experts": [%s], "expert_bytes": []}' % bad
        for bad in (b"-1", b"70000", b"1.5", b'"a"')
    ]
    + [b'{"model": "m", "experts": [4], "expert_bytes": [1, 2]}', b'{"model": "m", "experts": 4}'],
)
def test_odd_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(form.MAGIC + form.frame(form.HEAD, header))
    with pytest.raises(FileFormatError, match="header"):
        TraceFile(path)


class TestRoutesCsv:
    HEAD = "trace,seq,layer,step,experts\n"

    def read(self, tmp_path: Path, text: str, *, zipped: bool = False) -> dict[str, list[Access]]:
        path = tmp_path / "routes.csv"
        path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        return {name: list(routes) for name, routes in read_routes(path).items()}

    @pytest.mark.parametrize("zipped", [False, True])
    def test_layers_of_a_step_come_together(self, tmp_path: Path, zipped: bool) -> None:
        rows = "a,0,0,0,1;2\na,0,0,1,3;0\na,0,2,0,2;1\na,0,2,1,0;1\nb,7,0,0,5\n"
        found = self.read(tmp_path, self.HEAD + rows, zipped=zipped)
        order = [(access.step, access.layer, access.experts) for access in found["a"]]
        assert order == [(0, 0, (1, 2)), (0, 2, (2, 1)), (1, 0, (3, 0)), (1, 2, (0, 1))]
        assert found["b"] == [Access(7, 0, 0, (5,))]
        assert read_routes(tmp_path / "routes.csv")["a"].header.space == ExpertSpace((4, 0, 4))

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ("a,0,0,0,1;1", "name one twice"),
            ("a,0,0,0,", "expert is ''"),
            ("a,0,0,0,-1", "expert is '-1'"),
            ("a,0,0,0,65536", "0 to 65535"),
            ("a,0,4096,0,1", "layer is '4096'"),
            ("a,0,0,1", "4 fields"),
            ("a,x,0,0,1", "seq is 'x'"),
            ("a,0,0,²,1", "step is"),
            ("a,0,0,99999999999999999999,1", "step is"),
        ],
    )
    def test_odd_rows_are_named(self, tmp_path: Path, row: str, problem: str) -> None:
        with pytest.raises(FileFormatError, match=f"line 3: .*{problem}"):
            self.read(tmp_path, f"{self.HEAD}a,0,0,0,1\n{row}\n")

    @pytest.mark.parametrize(
        "text", ["", "trace,seq,layer,step,experts\n", "a,b\n1,2\n", "\0\0\0", HEAD + "\n"]
    )
    def test_other_files_are_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(FileFormatError, match="columns trace,seq"):
            self.read(tmp_path, text)

    def test_a_damaged_archive_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "routes.csv.gz"
        whole = gzip.compress((self.HEAD + "a,0,0,0,1\n" * 1000).encode())
        for content in (whole[:-9], whole[:20] + b"\xff" * 20 + whole[40:]):
            path.write_bytes(content)
            with pytest.raises(FileFormatError, match="damaged"):
                read_routes(path)

    @given(content=st.binary(max_size=120))
    @same_folder
    def test_any_bytes_are_refused_or_read(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "routes.csv"
        path.write_bytes(self.HEAD.encode() + content)
        try:
            read_routes(path)
        except FileFormatError:
            return


def test_columns_are_as_wide_as_the_limits() -> None:
    """The widest values that the writer accepts survive."""
    wide = Access(form.MAX_NUMBER, form.MAX_NUMBER, 0, (65_535,), form.MAX_NUMBER, True)
    assert form.decode(form.encode([wide]), ExpertSpace((65_536,)), "here") == [wide]
