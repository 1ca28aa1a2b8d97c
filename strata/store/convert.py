"""Checkpoint -> store: plan, write record by record, seal, publish."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from strata.errors import StoreError
from strata.plan.spec import ModelSpec
from strata.store import names
from strata.store.calibration import CalibrationStats
from strata.store.fingerprint import check_unchanged, identity, source_record, tool_name
from strata.store.journal import Journal
from strata.store.lock import exclusive
from strata.store.manifest import MANIFEST, SHARED, FileRecord, Manifest
from strata.store.options import ConvertOptions
from strata.store.planning import ConversionPlan, Planner
from strata.store.source import CheckpointSource, TargetExpert, TargetTensor
from strata.store.stats_check import with_stats
from strata.store.tasks import Bytes, Task
from strata.store.writer import (
    StoreWriter,
    beside,
    check_beside,
    check_output,
    check_space,
    disk_errors,
    remove_tree,
)

Progress = Callable[[int, int, str], None]
_RESERVED = (MANIFEST, SHARED)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion made. resumed: records that an earlier run had finished.

    notes: parts that got another format or fewer slices than meant, one sentence each. replaced: NaN and
    Inf turned into 0, per source tensor (only with allow_nan).
    """

    path: Path
    bytes: int
    records: int
    resumed: int
    notes: tuple[str, ...]
    replaced: dict[str, int]


def convert(
    source: CheckpointSource,
    spec: ModelSpec,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
    out: Path,
    options: ConvertOptions | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
    stats: CalibrationStats | None = None,
) -> ConvertReport:
    """Write the store `out`. Peak memory is a few experts; an interrupted run is continued by the next.

    stats: of the model's inputs, for `options.methods`; with them a matrix's moments are in memory as well.

    progress(bytes done, bytes in all, what) is called after every few MB. Raises LockedError when another
    process converts into `out`, CapacityError when the disk is too small, StoreError when `out` exists or an
    unfinished conversion is of something else, WeightValueError for NaN and Inf, UsageError for methods
    without statistics or with those of another model; damaged statistics are a StoreError before anything is
    written.
    """
    options, extra_files, out = options or ConvertOptions(), extra_files or {}, Path(out).absolute()
    _check_names(extra_files)
    options = with_stats(options, stats, source, spec, targets)
    if stats is not None:
        stats.check(moments=options.factored)
    planner = Planner(source, spec, options, stats)
    plan = planner.plan(targets, experts)
    manifest = _manifest(source, spec, options, plan)
    key = identity(source, spec, targets, experts, options, extra_files)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(beside(out, ".lock")):
            check_output(out, options.force)
            check_beside(out)
            check_space(out, manifest.shards())
            with _journal(out, key, options) as journal:
                resumed = len(journal.done)
                writer = StoreWriter(out, manifest.shards(), journal)
                todo = _tasks(planner, plan, targets, experts, journal)
                _write(writer, manifest, todo, journal, options, progress or (lambda *_: None))
                _refuse_changes(source, key, out)
                manifest = _sealed(manifest, writer, journal, extra_files)
                writer.finish(extra_files, manifest.to_bytes())
    return ConvertReport(
        out, manifest.disk_bytes, len(journal.done), resumed, tuple(plan.notes), dict(manifest.replaced)
    )


def _manifest(
    source: CheckpointSource, spec: ModelSpec, options: ConvertOptions, plan: ConversionPlan
) -> Manifest:
    return Manifest(
        spec=spec,
        tensors=plan.tensors,
        layers=plan.layers,
        expert_count=plan.expert_count,
        source=source_record(source),
        options=options.identity(),
        tool=tool_name(),
    )


def _check_names(extra_files: Mapping[str, bytes]) -> None:
    for name in extra_files:
        if Path(name).name != name or name in _RESERVED or name.startswith("."):
            raise StoreError(f"{name!r} cannot be the name of a file beside the manifest")


def _journal(out: Path, key: dict[str, object], options: ConvertOptions) -> Journal:
    """Continue the unfinished conversion beside `out`, or begin one."""
    partial, path = beside(out, ".partial"), beside(out, ".journal")
    if not (partial.exists() and path.exists()):
        _discard(out)
    try:
        journal = Journal(path, key, replaced_allowed=options.allow_nan)
    except StoreError:
        if not options.force:
            raise
        _discard(out)
        journal = Journal(path, key)
    partial.mkdir(exist_ok=True)
    return journal


def _refuse_changes(source: CheckpointSource, key: dict[str, object], out: Path) -> None:
    """StoreError when the source changed meanwhile; what was made of it continues nothing and is removed."""
    try:
        check_unchanged(source, key)
    except StoreError:
        _discard(out)
        raise


def _discard(out: Path) -> None:
    remove_tree(beside(out, ".partial"))
    beside(out, ".journal").unlink(missing_ok=True)


def _tasks(
    planner: Planner,
    plan: ConversionPlan,
    targets: Sequence[TargetTensor],
    experts: Sequence[TargetExpert],
    journal: Journal,
) -> Iterator[Task]:
    """What is not yet journalled: shared tensors, then experts layer by layer, as checkpoints are sorted."""
    for target in targets:
        if (SHARED, target.name) not in journal.done:
            yield planner.task(target, plan.tensors[target.name])
    for expert in sorted(experts, key=lambda expert: (expert.layer, expert.index)):
        if (names.expert_file(expert.index), f"layers.{expert.layer}") not in journal.done:
            yield planner.expert_task(expert, plan.layers[expert.layer])


def _write(
    writer: StoreWriter,
    manifest: Manifest,
    tasks: Iterable[Task],
    journal: Journal,
    options: ConvertOptions,
    progress: Progress,
) -> None:
    shards = manifest.shards()
    entries = {(shard.path, entry.name): entry for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for entry in entries.values())
    done = sum(entries[key].nbytes for key in journal.done)
    threads = options.threads or min(4, len(os.sched_getaffinity(0)))
    for task, pieces in _computed(tasks, threads):
        reported = _reported(pieces, done, total, task.label, progress)
        entry = entries[(task.file, task.name)]
        writer.write(task.file, entry, reported, task.guard.replaced)
        done += entry.nbytes
    writer.commit()


def _reported(
    pieces: Iterable[Bytes], done: int, total: int, label: str, progress: Progress
) -> Iterator[Bytes]:
    """Pieces, each reported when the next one is asked for, that is after it was written."""
    for piece in pieces:
        yield piece
        done += piece.nbytes
        progress(done, total, label)


def _computed(tasks: Iterable[Task], threads: int) -> Iterator[tuple[Task, Iterator[Bytes]]]:
    """Tasks with their pieces in order, made by `threads` threads at most threads + 1 pieces ahead."""
    tasks, ahead = itertools.tee(tasks)
    calls = (piece for task in ahead for piece in task.pieces)
    waiting: deque[Future[Bytes]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="convert")

    def next_piece() -> Bytes:
        waiting.extend(pool.submit(call) for call in itertools.islice(calls, threads + 1 - len(waiting)))
        return waiting.popleft().result()

    try:
        for task in tasks:
            yield task, (next_piece() for _ in task.pieces)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sealed(
    manifest: Manifest, writer: StoreWriter, journal: Journal, extra_files: Mapping[str, bytes]
) -> Manifest:
    """The manifest with its file table and the values that were replaced."""
    extra = [
        FileRecord(name, len(data), xxhash.xxh3_64_hexdigest(data))
        for name, data in sorted(extra_files.items())
    ]
    replaced: dict[str, int] = {}
    for key in sorted(journal.done):
        for name, count in journal.done[key].replaced.items():
            replaced[name] = replaced.get(name, 0) + count
    return replace(manifest, files=(*writer.seal(), *extra), replaced=replaced)
