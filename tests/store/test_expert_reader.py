"""Expert records read past the page cache: the same bytes as mapped ones, or an error that says why not."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from fakes import small_model

from strata import _C
from strata.core import ExpertId
from strata.errors import StoreError
from strata.store.convert import convert
from strata.store.expert_reader import ExpertReader
from strata.store.options import ConvertOptions
from strata.store.reader import Bytes, Store

EXPERTS, LAYERS = 12, (1, 2)
SYSFS = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model(layers=3, experts=EXPERTS)
    path = tmp_path_factory.mktemp("reader") / "store"
    options = ConvertOptions(experts="w4g32", shared="w4g32")
    convert(model.source, model.spec, model.targets, model.experts, path, options)
    return path


@pytest.fixture
def store(original: Path) -> Store:
    return Store.open(original)


def room_for(store: Store, layer: int, count: int = 1) -> list[Bytes]:
    """Aligned arrays, filled with what no record holds."""
    place = store.expert_range(layer)
    nbytes = place.stop - place.start
    memory = np.full(count * nbytes + 4096, 0xA5, np.uint8)
    start = -memory.ctypes.data % 4096
    return [memory[start + i * nbytes :][:nbytes] for i in range(count)]


def all_of(reader: ExpertReader, count: int) -> dict[int, StoreError | None]:
    found: dict[int, StoreError | None] = {}
    while len(found) < count:
        got = reader.finished(5.0)
        assert got, "nothing ends"
        found.update(got)
    return found


def read_one(reader: ExpertReader, store: Store, expert: ExpertId) -> tuple[Bytes, StoreError | None]:
    (into,) = room_for(store, expert.layer)
    ticket = reader.submit(expert, into, urgent=True)
    return into, all_of(reader, 1)[ticket]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 8])
def test_reads_are_the_mapped_bytes(store: Store, direct: bool, threads: int) -> None:
    reader = ExpertReader(store, threads=threads, most_open=threads, direct=direct)
    asked = [ExpertId(layer, index) for layer in LAYERS for index in range(EXPERTS)] * 3
    random.Random(1).shuffle(asked)
    rooms = {layer: iter(room_for(store, layer, len(asked))) for layer in LAYERS}
    tickets = {}
    for expert in asked:
        into = next(rooms[expert.layer])
        tickets[reader.submit(expert, into, urgent=expert.index % 2 == 0)] = expert, into
    assert set(all_of(reader, len(asked)).values()) == {None}
    assert reader.open_files <= threads
    for expert, into in tickets.values():
        assert np.array_equal(into, store.expert(expert))
    totals = reader.totals()
    assert totals.reads == len(asked) and totals.nbytes == sum(into.nbytes for _, into in tickets.values())
    assert totals.bandwidth > 0


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_are_bounded_and_given_back(store: Store) -> None:
    before = descriptors()
    reader = ExpertReader(store, threads=2, most_open=3)
    for index in range(EXPERTS):
        read_one(reader, store, ExpertId(1, index))
        assert reader.open_files <= 3
    assert descriptors() == before + 3
    reader.close()
    assert descriptors() == before


def copy_of(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def test_a_truncated_file_is_an_error(original: Path, tmp_path: Path) -> None:
    path = copy_of(original, tmp_path)
    store = Store.open(path)
    reader = ExpertReader(store)
    file = path / "experts" / "expert-003.safetensors"
    assert read_one(reader, store, ExpertId(2, 3))[1] is None  # opened before it is cut
    os.truncate(file, file.stat().st_size - 100)
    for index in (3, 3):
        _, problem = read_one(reader, store, ExpertId(2, index))
        assert problem is not None and "expert 3 of layer 2" in problem.cause
        assert "is shorter than it was" in problem.cause and str(file) in problem.cause
    assert read_one(reader, store, ExpertId(2, 4))[1] is None  # others are sound


@pytest.mark.parametrize("opened", [True, False])
def test_a_changed_file_is_an_error(original: Path, tmp_path: Path, opened: bool) -> None:
    path = copy_of(original, tmp_path)
    store = Store.open(path)
    reader = ExpertReader(store)
    file = path / "experts" / "expert-003.safetensors"
    if opened:
        assert read_one(reader, store, ExpertId(1, 3))[1] is None
    with file.open("r+b") as handle:
        handle.seek(5000)
        handle.write(b"changed")
    os.utime(file, ns=(1, 1))  # the clock of some file systems is coarse
    _, problem = read_one(reader, store, ExpertId(1, 3))
    assert problem is not None and "has changed since it was opened" in problem.cause


@pytest.mark.parametrize("how", ["replaced", "gone"])
def test_a_replaced_or_missing_file_is_an_error(original: Path, tmp_path: Path, how: str) -> None:
    path = copy_of(original, tmp_path)
    store = Store.open(path)
    file = path / "experts" / "expert-000.safetensors"
    data, times = file.read_bytes(), file.stat()
    file.unlink()
    if how == "replaced":
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    _, problem = read_one(ExpertReader(store), store, ExpertId(1, 0))
    assert problem is not None
    assert ("has changed" if how == "replaced" else "ENOENT") in problem.cause


def test_memory_off_the_grid_is_refused(store: Store) -> None:
    reader = _C.DirectReader([tuple(identity) for identity in store.expert_files], 1, 1, True)
    with pytest.raises(ValueError, match="no multiple of 4096"):
        reader.submit(0, 0, np.zeros(4096 + 1, np.uint8)[1:], True)


@pytest.mark.skipif(not SYSFS.is_file(), reason="no sysfs")
def test_where_direct_reads_are_refused_the_page_cache_serves() -> None:
    found = SYSFS.stat()  # sysfs says EINVAL to O_DIRECT
    identity = str(SYSFS), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    reader = _C.DirectReader([identity], 1, 1, True)
    memory = np.zeros(found.st_size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    into = memory[start:][: found.st_size]
    reader.submit(0, 0, into, True)
    reader.finished(5.0)
    totals = reader.totals()
    assert totals["buffered"] == 1 and totals["reason"] == errno.EINVAL
    text = SYSFS.read_bytes()
    assert into[: len(text)].tobytes() == text


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_tmpfs_is_read_one_way_or_the_other(original: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = Store.open(shutil.copytree(original, Path(folder) / "store"))
        reader = ExpertReader(store)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for index in range(EXPERTS):
                into, problem = read_one(reader, store, ExpertId(1, index))
                assert problem is None and np.array_equal(into, store.expert(ExpertId(1, index)))
        totals = reader.totals()
        assert (totals.buffered > 0) == (totals.reason != "") == (len(told) == 1)


def test_a_cancelled_read_never_writes(store: Store) -> None:
    """With one thread most of the queue has not begun."""
    reader = ExpertReader(store, threads=1)
    rooms = room_for(store, 1, EXPERTS * 20)
    tickets = [reader.submit(ExpertId(1, i % EXPERTS), into, urgent=False) for i, into in enumerate(rooms)]
    cancelled = {ticket for ticket in tickets[::-1] if reader.cancel(ticket)}
    assert cancelled
    done = all_of(reader, len(tickets) - len(cancelled))
    assert not cancelled & set(done)
    for ticket, into in zip(tickets, rooms, strict=True):
        assert (into == 0xA5).all() == (ticket in cancelled)
    assert not any(reader.cancel(ticket) for ticket in tickets)
    assert reader.finished(0.0) == [] == reader.finished(30.0)  # nothing under way: no wait


def test_urgent_reads_overtake(store: Store) -> None:
    reader = ExpertReader(store, threads=1)
    rooms = room_for(store, 1, 400)
    patient = [reader.submit(ExpertId(1, i % EXPERTS), into, urgent=False) for i, into in enumerate(rooms)]
    (into,) = room_for(store, 2)
    urgent = reader.submit(ExpertId(2, 0), into, urgent=True)
    reader.hurry(patient[-1])
    order = list(all_of(reader, 401))
    assert order.index(urgent) < 400 and order.index(patient[-1]) < 400
    assert order.index(patient[-2]) > order.index(patient[-1])


def test_an_io_error_is_told_with_its_name(store: Store) -> None:
    """Reading a folder gives EISDIR; a failing disk's EIO takes the same way."""
    files = [("/proc/self", 0, 0, 8192, 0)]
    reader = _C.DirectReader(files, 1, 1, False)
    into = np.zeros(8192, np.uint8)
    ticket = reader.submit(0, 0, into, True)
    ((found, outcome),) = reader.finished(5.0)
    assert found == ticket and outcome in (_C.READ_SHORT, _C.READ_CHANGED, errno.EISDIR)


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    """A disk that does not answer: a FIFO that nobody writes to keeps the reader's thread in open()."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = _C.DirectReader([(str(fifo), 0, 0, 4096, 0)], 1, 1, False)
    into = np.zeros(4096, np.uint8)
    reader.submit(0, 0, into, True)
    begin = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        reader.finished(60.0)
    assert time.monotonic() - begin < 10
    timer.join()
    os.close(os.open(fifo, os.O_WRONLY))  # lets the thread go
    assert reader.finished(5.0)[0][1] != _C.READ


def test_what_cannot_be_read_is_refused_at_once(store: Store) -> None:
    reader = _C.DirectReader([tuple(identity) for identity in store.expert_files], 1, 1, False)
    whole = store.expert_files[0].nbytes
    for offset, nbytes in ((-1, 4096), (0, whole + 1), (whole, 1), (2**62, 4096)):
        with pytest.raises(ValueError, match="of a file of"):
            reader.submit(0, offset, np.zeros(nbytes, np.uint8), True)
    with pytest.raises(ValueError, match="a file is 99"):
        reader.submit(99, 0, np.zeros(1, np.uint8), True)
    with pytest.raises(ValueError, match="may open"):
        _C.DirectReader([], 4, 3, True)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.submit(0, 0, np.zeros(1, np.uint8), True)
