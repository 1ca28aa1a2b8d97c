"""A calibration: layer after layer over files of hidden states; an interrupted one is continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from strata.config import format_bytes, format_size
from strata.core import ExpertId
from strata.engine.calibrate.accumulate import Accumulator
from strata.engine.calibrate.layer import Pass, run_layer
from strata.engine.calibrate.recording import RecordingBackend
from strata.engine.calibrate.states import States, states_bytes
from strata.errors import CapacityError, StoreError
from strata.model.decoder import load_layer
from strata.model.loading import Weights, WeightStore
from strata.store import names
from strata.store.calibration import CalibrationStats, StatsInfo, stats_layout
from strata.store.calibration_writer import StatsWriter
from strata.store.journal import Done, Journal
from strata.store.lock import exclusive
from strata.store.writer import beside, check_beside, disk_errors, remove_tree

Progress = Callable[[int, int, str], None]
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class CalibrationReport:
    """What a run made. resumed: layers that earlier runs had finished. starved: experts that saw fewer rows
    than `info.min_tokens`, and how many."""

    path: Path
    bytes: int
    info: StatsInfo
    resumed: int
    starved: dict[ExpertId, int]


def calibrate(
    store: WeightStore,
    info: StatsInfo,
    windows: Sequence[Sequence[int]],
    out: Path,
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Run `windows` of token ids through the model and write the STATS file `out`.

    In memory are one layer without its routed experts, one expert, a window, and the statistics at hand; on
    the disk beside `out` three times the hidden states. progress(rows done, rows in all, what).
    Raises CapacityError when the disk is too small, LockedError when another process writes the same file,
    StoreError when `out` exists or an unfinished run is of something else, NumericalError or WeightValueError
    for NaN.
    """
    out = Path(out).absolute()
    if out.exists() and not (force and out.is_file()):
        raise StoreError(f"{out} exists already", remedy="--force replaces it once the new file is complete")
    with disk_errors(out), exclusive(beside(out, ".lock")):
        check_beside(out)
        _check_space(out, info)
        identity = _identity(info, windows)
        with _journal(out, identity, force) as journal:
            resumed = len(journal.done)
            _run(
                store, info, windows, beside(out, ".partial"), journal, threads, progress or (lambda *_: None)
            )
        (beside(out, ".partial") / _STATS).replace(out)
        beside(out, ".journal").unlink()
        remove_tree(beside(out, ".partial"))
    return CalibrationReport(out, out.stat().st_size, info, resumed, CalibrationStats(out).starved)


_STATS = "stats"


def _identity(info: StatsInfo, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a journal begins with: `tool` first, see journal.JOURNAL_BEGIN."""
    tokens = xxhash.xxh3_64()
    for window in windows:
        tokens.update(np.asarray(window, np.int32).tobytes())
    return {"tool": info.tool, "stats": json.loads(info.to_json()), "tokens": tokens.hexdigest()}


def _check_space(out: Path, info: StatsInfo) -> None:
    """CapacityError unless the statistics and the hidden states fit; what an earlier run reserved counts."""
    stats, states = stats_layout(info).nbytes, states_bytes(info.tokens, info.spec.hidden)
    partial = beside(out, ".partial")
    taken = sum(path.stat().st_blocks * 512 for path in partial.glob("*")) if partial.is_dir() else 0
    needed, free = max(0, stats + states + _SPARE_BYTES - taken), shutil.disk_usage(out.parent).free
    if needed > free:
        raise CapacityError(
            f"{out}: needs {format_bytes(needed)} ({format_size(stats)} of statistics, "
            f"{format_size(states)} of hidden states for the while), {format_bytes(free)} are "
            "available on its disk",
            remedy="--no-moments, fewer --tokens, or another disk",
        )


def _journal(out: Path, identity: dict[str, Any], force: bool) -> Journal:
    """Continue the unfinished run beside `out`, or begin one."""
    partial, path = beside(out, ".partial"), beside(out, ".journal")
    if not (partial.exists() and path.exists()):
        remove_tree(partial)
        path.unlink(missing_ok=True)
    try:
        journal = Journal(path, identity)
    except StoreError:
        if not force:
            raise
        remove_tree(partial)
        path.unlink()
        journal = Journal(path, identity)
    partial.mkdir(exist_ok=True)
    return journal


def _run(
    store: WeightStore,
    info: StatsInfo,
    windows: Sequence[Sequence[int]],
    folder: Path,
    journal: Journal,
    threads: int | None,
    progress: Progress,
) -> None:
    spec, backend = info.spec, RecordingBackend(threads)
    weights = Weights(store, backend)
    states = [States(folder / name, info.tokens, spec.hidden) for name in ("states.0", "states.1", "hidden")]
    done = _finished(journal, states)
    meter = _Meter(progress, 2 * info.tokens * spec.layers, 2 * info.tokens * done)
    with ExitStack() as stack:
        writer = StatsWriter(folder / _STATS, info)
        stack.callback(writer.close)
        run = Pass(spec, backend, _slices(windows), info.moments, writer, meter.advance)
        if done == 0:
            _embed(run, weights, windows, states[0].rows)
        for index in range(done, spec.layers):
            meter.what = f"layer {index}"
            source, target = states[index % 2], states[(index + 1) % 2]
            layer = load_layer(spec, weights.layer(index), index)
            run_layer(run, layer, index, source.rows, target.rows, states[2].rows)
            del layer  # before the next one is loaded: a layer of weights at a time
            writer.sync()
            journal.add([Done(_STATS, names.layer(index, ""), target.sync(), {})])
        _head(run, weights, states[spec.layers % 2].rows)
        writer.sync()


class _Meter:
    """Adds up rows for the progress bar."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress, self._total, self._done = progress, total, done
        self.what = ""

    def advance(self, rows: int) -> None:
        """So many more."""
        self._done += rows
        self._progress(self._done, self._total, self.what)


def _slices(windows: Sequence[Sequence[int]]) -> list[slice]:
    ends = list(accumulate(map(len, windows)))
    return [slice(end - len(window), end) for window, end in zip(windows, ends, strict=True)]


def _finished(journal: Journal, states: Sequence[States]) -> int:
    """Layers that earlier runs finished; StoreError when the states that they left were changed."""
    done = len(journal.done)
    if done:
        found = states[done % 2].checksum()
        wanted = journal.done[_STATS, names.layer(done - 1, "")].xxh3
        if found != wanted:
            path = states[done % 2].path
            raise StoreError(
                f"{path}: the checksum is {found}, recorded is {wanted}",
                remedy=f"delete {path.parent} and start over",
            )
    return done


def _embed(
    run: Pass, weights: Weights, windows: Sequence[Sequence[int]], target: NDArray[np.float32]
) -> None:
    spec = run.spec
    matrix = weights.matrix(names.EMBED, spec.vocab, spec.hidden)
    for window, ids in zip(run.windows, windows, strict=True):
        target[window] = run.backend.embedding(matrix, np.asarray(ids, np.int32), spec.embedding_scale)


def _head(run: Pass, weights: Weights, source: NDArray[np.float32]) -> None:
    """What the head reads, which is scaled as the decoder scales it."""
    spec = run.spec
    norm = weights.norm(names.FINAL_NORM, spec.hidden, spec.norm_eps, scale=spec.logit_scale)
    found = Accumulator(spec.hidden, run.tokens, run.moments)
    for window in run.windows:
        found.add(run.backend.rms_norm(np.array(source[window]), norm.weight, norm.eps))
    run.writer.write(names.HEAD, 0, found.result())
