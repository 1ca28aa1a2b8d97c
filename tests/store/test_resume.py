"""Conversions that are killed, doubled or continued with something else."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fakes import small_model
from test_convert import digest, run

from strata.errors import CapacityError, LockedError, StoreError, WeightValueError
from strata.store.lock import exclusive
from strata.store.options import ConvertOptions
from strata.store.reader import Store

SCRIPT = Path(__file__).with_name("killed_convert.py")
ROOT = SCRIPT.parents[2]


def killed_run(out: Path, calls: int, seed: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), str(out), str(calls), str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


class Whole(NamedTuple):
    """A conversion that nothing stopped: the digest of its files, and how often it called the disk."""

    files: dict[str, str]
    calls: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("whole") / "s"
    done = killed_run(out, 0)
    assert done.returncode == 0, done.stderr
    return Whole(digest(out), int(done.stdout.split()[0]))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, whole: Whole) -> Path:
    """The folder of a conversion that was killed near its end."""
    folder = tmp_path_factory.mktemp("killed")
    assert killed_run(folder / "s", whole.calls - 14).returncode == -9
    return folder


@pytest.fixture
def stopped(tmp_path: Path, killed: Path) -> Path:
    """That store, for one test to go on with."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    return tmp_path / "s"


def test_killed_anywhere_ends_bit_identical(tmp_path: Path, whole: Whole) -> None:
    """SIGKILL at random disk calls until a run comes through: the same bytes in every file."""
    calls = whole.calls
    rng = random.Random(0)
    kills = 0
    for attempt, limits in enumerate(
        ([calls // 3, calls // 3, calls // 4], [calls - 2], [calls // 2, calls - 30])
    ):
        out = tmp_path / f"killed-{attempt}"
        for limit in limits:
            kills += killed_run(out, limit + rng.randrange(-5, 3)).returncode == -9
            assert not (out / "manifest.json").exists() or digest(out) == whole.files
        if not out.exists():
            last = killed_run(out, 0)
            assert last.returncode == 0, last.stderr
        assert digest(out) == whole.files
    assert kills >= 5


def test_finished_records_are_not_made_again(stopped: Path) -> None:
    with pytest.raises(StoreError, match="run the same `strata convert` again"):
        Store.open(stopped)
    again = killed_run(stopped, 0)
    assert int(again.stdout.split()[1]) >= 6, again.stderr


def test_another_source_or_option_does_not_continue(stopped: Path) -> None:
    model = small_model(layers=3)
    with pytest.raises(
        StoreError, match=r"something else: options: experts is auto there, w8 now\n  remedy: "
    ):
        run(model, stopped, ConvertOptions(experts="w8"), extra_files={"tokenizer.json": b"{}"})
    with pytest.raises(
        StoreError, match=r"extra files: tokenizer\.json is [0-9a-f]{16} there, [0-9a-f]{16} now"
    ):
        run(model, stopped, extra_files={"tokenizer.json": b"[]"})
    with pytest.raises(StoreError, match=r"model is [0-9a-f]{16} there, [0-9a-f]{16} now"):
        run(small_model(layers=2), stopped, extra_files={"tokenizer.json": b"{}"})
    run(small_model(layers=2), stopped, ConvertOptions(force=True))
    assert Store.open(stopped).spec.layers == 2


def test_allow_nan_continues_what_nan_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """case-22: the error's remedy must work without a new start; the way back must not."""
    monkeypatch.setattr("strata.store.writer._SYNC_SECONDS", 0.0)
    model, allowed = small_model(), ConvertOptions(allow_nan=True)
    model.source.arrays["1.2.down"][7, 9] = np.nan
    with pytest.raises(WeightValueError, match="strata convert --allow-nan"):
        run(model, tmp_path / "s")
    assert run(model, tmp_path / "s", allowed).resumed > 0
    run(model, tmp_path / "whole", allowed)
    assert digest(tmp_path / "s") == digest(tmp_path / "whole")

    def stop(done: int, total: int, what: str) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "t", allowed, progress=stop)
    model.source.arrays["1.2.down"][7, 9] = 0.0
    with pytest.raises(StoreError, match="turned NaN and Inf into 0"):
        run(model, tmp_path / "t")
    assert run(model, tmp_path / "t", ConvertOptions(force=True)).replaced == {}


def test_damage_between_two_runs_is_found(stopped: Path) -> None:
    """A journalled record whose bytes changed meanwhile must not get a fresh checksum."""
    shard = stopped.with_name("s.partial") / "shared.safetensors"
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xfe\xfd")
    again = killed_run(stopped, 0)
    assert again.returncode != 0
    assert "is not what was written" in again.stderr
    assert not stopped.exists()


def test_two_converters_on_one_store(tmp_path: Path) -> None:
    """case-39: the second one stops with the pid of the first and disturbs nothing."""
    model = small_model()
    inside, leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        assert leave.wait(30)

    first = threading.Thread(target=lambda: run(model, tmp_path / "s", progress=hold))
    first.start()
    assert inside.wait(30)
    with pytest.raises(LockedError, match=f"process {os.getpid()} is writing it already"):
        run(model, tmp_path / "s")
    second = killed_run(tmp_path / "s", 0)
    assert second.returncode != 0
    assert f"process {os.getpid()}" in second.stderr
    leave.set()
    first.join()
    assert Store.open(tmp_path / "s").has("embed.weight")


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    """case-39: the file alone is no lock."""
    (tmp_path / "s.lock").write_text("999999\n")
    with exclusive(tmp_path / "s.lock"):
        assert (tmp_path / "s.lock").read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / "s.lock").exists()


def test_a_store_opens_while_it_is_locked_and_read_only(tmp_path: Path) -> None:
    """case-39: serving needs neither the lock nor write access."""
    run(small_model(), tmp_path / "s")
    for path in [*(tmp_path / "s").rglob("*"), tmp_path / "s"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = digest(tmp_path / "s")
    with exclusive(tmp_path / "s.lock"), Store.open(tmp_path / "s") as store:
        assert store.plain("final_norm.weight").shape == (96,)
    assert digest(tmp_path / "s") == before
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        path.chmod(0o755)


def test_kill_between_the_two_renames_of_force(tmp_path: Path, whole: Whole) -> None:
    """The old store has been moved aside, the new one not yet moved in: the next run finishes."""
    run(small_model(seed=1), tmp_path / "s")
    killed_run(tmp_path / "t", whole.calls - 6)
    (tmp_path / "s").rename(tmp_path / "s.replaced")
    (tmp_path / "t.partial").rename(tmp_path / "s.partial")
    (tmp_path / "t.journal").rename(tmp_path / "s.journal")
    assert killed_run(tmp_path / "s", 0).returncode == 0
    assert digest(tmp_path / "s") == whole.files
    assert not (tmp_path / "s.replaced").exists()


def test_a_disk_that_fills_up_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and the same command continues later."""
    calls = 0

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    pwrite = os.pwrite
    monkeypatch.setattr("strata.store.writer.os.pwrite", write)
    with pytest.raises(CapacityError, match="the disk is full"):
        run(small_model(), tmp_path / "s")
    run(small_model(), tmp_path / "s")
    run(small_model(), tmp_path / "whole")
    assert digest(tmp_path / "s") == digest(tmp_path / "whole")


@pytest.mark.parametrize("tail", ['{"file": "shared.saf', "[1, 2]\n", "\n", "\x00\x00\x00"])
def test_a_torn_journal_counts_up_to_the_tear(stopped: Path, whole: Whole, tail: str) -> None:
    """A power cut in the middle of an append."""
    with stopped.with_name("s.journal").open("a") as journal:
        journal.write(tail)
    again = killed_run(stopped, 0)
    assert again.returncode == 0, again.stderr
    assert digest(stopped) == whole.files


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.partial").mkdir()
    (tmp_path / "s.journal").write_text('{"tool": 1}\n{"what": "?"}\n')
    with pytest.raises(
        StoreError, match=r"tool is 1 there, strata [0-9.]+, [0-9]+ now; source is not set there, path="
    ):
        run(small_model(), tmp_path / "s")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: File exists"):
        run(small_model(), tmp_path / "file" / "s")
    with pytest.raises(StoreError, match="exists and is no folder"):
        run(small_model(), tmp_path / "file")


FOREIGN = {
    "poetry.lock": ("s.lock", "# a lock file of another program\n"),
    "journal": ("s.journal", "Dear diary\n"),
    "partial": ("s.partial/mine", "x"),
    "partial file": ("s.partial", "x"),
    "replaced": ("s.replaced/mine", "x"),
    "replaced file": ("s.replaced", "x"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("name", "text"), FOREIGN.values(), ids=FOREIGN.keys())
def test_files_of_others_are_left_alone(tmp_path: Path, name: str, text: str, force: bool) -> None:
    """`--out poetry` emptied and removed poetry.lock; a backup called <store>.old was deleted at the end."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(StoreError, match="it is left alone"):
        run(small_model(), tmp_path / "s", ConvertOptions(force=force))
    assert path.read_text() == text
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("suffix", [".lock", ".journal", ".partial", ".replaced"])
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_neither_pipes_nor_links_are_followed(tmp_path: Path, suffix: str, kind: str) -> None:
    """The lock's link led to a file that was emptied; removing a FIFO as if it were a folder hung."""
    victim = tmp_path / "victim"
    victim.write_text("1")
    if kind == "fifo":
        os.mkfifo(tmp_path / f"s{suffix}")
    else:
        (tmp_path / f"s{suffix}").symlink_to(victim)
    with pytest.raises(StoreError):
        run(small_model(), tmp_path / "s")
    assert victim.read_text() == "1"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("change", ["write", "replace", "remove"])
def test_a_source_that_changes_meanwhile_makes_no_store(tmp_path: Path, change: str) -> None:
    """Else the store is half of one checkpoint and half of another, with checksums that match."""
    model, file = small_model(), tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 20))
    model.source.files = lambda: [file]  # type: ignore[method-assign]

    def meddle(done: int, total: int, label: str) -> None:
        if change == "write":
            with file.open("r+b") as stream:
                stream.seek(1 << 19)  # neither size nor ends
                stream.write(b"x")
            os.utime(file, ns=(1, 1))  # clocks of file systems tick every few ms
        elif change == "replace":
            (tmp_path / "new").write_bytes(b"x")
            (tmp_path / "new").rename(file)
        else:
            file.unlink(missing_ok=True)

    message = "No such file" if change == "remove" else "model.safetensors changed while it was converted"
    with pytest.raises(StoreError, match=message) as caught:
        run(model, tmp_path / "s", progress=meddle)
    assert not (tmp_path / "s").exists()
    # The remedy holds for every command: the same one again, without --force, which only convert has.
    assert caught.value.remedy.endswith("run the same command again")
    assert not list(tmp_path.glob("s.*"))
    file.write_bytes(bytes(1 << 20))
    assert run(model, tmp_path / "s").resumed == 0
