"""What `strata calibrate` does: a model and texts become a STATS file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import xxhash

from strata.config import format_size
from strata.engine.calibrate.run import CalibrationReport, Progress, calibrate
from strata.engine.calibrate.states import states_bytes
from strata.errors import IncompleteError, UsageError
from strata.interfaces.importing import extra_files, open_and_resolve
from strata.interfaces.terminal import note
from strata.interfaces.tokenizer import Tokenizer
from strata.model.footprint import contents_of_store
from strata.model.loading import WeightStore
from strata.plan.spec import ModelSpec
from strata.store.calibration import DataFile, StatsInfo, model_fingerprint, stats_layout
from strata.store.fingerprint import tool_name
from strata.store.manifest import MANIFEST
from strata.store.reader import Store
from strata.store.unconverted import UnconvertedStore

_MAX_TEXT_BYTES = 64 << 20
WINDOW = 1024
_LEAST_TOKENS = 2
_LONGER = "give texts of some thousand words"


@dataclass(frozen=True)
class CalibrateOptions:
    """tokens: so many are used, taken evenly from all texts; None: all. window: tokens that see each
    other; None: WINDOW, or the model's context where that is smaller."""

    tokens: int | None = None
    window: int | None = None
    min_tokens: int = 256
    moments: bool = True
    threads: int | None = None
    force: bool = False


@dataclass(frozen=True)
class TextFile:
    """A calibration text as it was read."""

    name: str
    data: bytes

    @property
    def text(self) -> str:
        """UsageError where it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{self.name} is not UTF-8: {error.reason} at byte {error.start} of {len(self.data)}",
                remedy="convert it, e.g. iconv -f latin1 -t utf-8",
            ) from None


def default_texts() -> list[TextFile]:
    """The texts of the package: code, dialogue, prose, summaries, several languages."""
    folder = files("strata.interfaces") / "calibration_text"
    found = [
        TextFile(entry.name, entry.read_bytes()) for entry in folder.iterdir() if entry.name.endswith(".txt")
    ]
    return sorted(found, key=lambda text: text.name)


def read_texts(paths: Sequence[Path]) -> list[TextFile]:
    """The user's own; UsageError for what is too large to be tokenized at once."""
    found = []
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path} is no file", remedy="--data takes text files in UTF-8")
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise UsageError(
                f"{path}: {path.stat().st_size} bytes, at most {_MAX_TEXT_BYTES} are read",
                remedy="cut it into several files",
            )
        found.append(TextFile(path.name, path.read_bytes()))
    return found


def calibrate_model(
    path: Path,
    texts: Sequence[TextFile],
    out: Path,
    options: CalibrateOptions,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Of a store, a Hugging Face directory or a GGUF file. Raises what opening it and `calibrate` raise."""
    spec, store, tokenizer = open_weights(path)
    window = options.window or min(WINDOW, spec.context)
    if not 2 <= window <= spec.context:
        raise UsageError(
            f"--window is {window}, the model's context {spec.context}", remedy="choose 2 to that"
        )
    windows, data = cut(tokenizer, texts, window, options.tokens)
    tokens = sum(map(len, windows))
    if tokens < _LEAST_TOKENS:
        raise UsageError(
            f"the calibration text has {tokens} token, needed are {_LEAST_TOKENS}", remedy=_LONGER
        )
    if max(map(max, windows)) >= spec.vocab:
        raise IncompleteError(
            f"{path}: the tokenizer has more tokens than the model, which has {spec.vocab}",
            remedy="take the tokenizer that was published with these weights",
        )
    info = StatsInfo(
        spec=spec,
        fingerprint=model_fingerprint(spec, store.plain),
        tokens=tokens,
        window=window,
        min_tokens=options.min_tokens,
        moments=options.moments,
        data=tuple(data),
        tool=tool_name(),
    )
    for line in _remarks(info, options.tokens):
        note(line)
    return calibrate(
        store, info, windows, out, threads=options.threads, force=options.force, progress=progress
    )


def _remarks(info: StatsInfo, asked: int | None) -> Iterator[str]:
    """What the run will take on the disk, and where there is less text than was asked for or is needed."""
    yield _room(info)
    if asked is not None and asked > info.tokens + 1:
        yield f"note: {asked} tokens were asked for, the texts have {info.tokens}; --data takes more of them"
    if info.moments and info.tokens < info.spec.hidden:
        yield (
            f"note: {info.tokens} tokens say little of vectors of {info.spec.hidden} numbers: gptq needs more"
        )


def _room(info: StatsInfo) -> str:
    stats = format_size(stats_layout(info).nbytes)
    states = format_size(states_bytes(info.tokens, info.spec.hidden))
    return f"{info.tokens} tokens: {stats} of statistics, and {states} of hidden states on the disk meanwhile"


def open_weights(path: Path) -> tuple[ModelSpec, WeightStore, Tokenizer]:
    """A model's weights where they lie, converted or not; IncompleteError without a tokenizer."""
    if (path / MANIFEST).is_file():
        opened = Store.open(path)
        contents_of_store(opened.manifest)  # a layer that predicts further tokens is no model
        return opened.spec, opened, Tokenizer.load(path)
    source, resolved = open_and_resolve(path)
    tokenizer = Tokenizer(extra_files(source), where=str(path))
    store = UnconvertedStore(source, resolved.spec, resolved.targets, resolved.experts)
    return resolved.spec, store, tokenizer


def cut(
    tokenizer: Tokenizer, texts: Sequence[TextFile], window: int, limit: int | None
) -> tuple[list[list[int]], list[DataFile]]:
    """Windows of token ids, each of one text, with BOS where the model expects it, and what came from where.

    With a limit windows are taken evenly from all, so many tokens: the beginning alone would be a single kind
    of text.
    UsageError for texts that are empty or not UTF-8.
    """
    found = [(index, ids) for index, text in enumerate(texts) for ids in _windows(tokenizer, text, window)]
    if not found:
        raise UsageError("the calibration texts are empty", remedy=_LONGER)
    if limit is not None and sum(len(ids) for _, ids in found) > limit:
        found = _evenly(found, limit)
    used = [sum(len(ids) for index, ids in found if index == i) for i in range(len(texts))]
    data = [
        DataFile(text.name, len(text.data), xxhash.xxh3_64_hexdigest(text.data), tokens)
        for text, tokens in zip(texts, used, strict=True)
    ]
    return [ids for _, ids in found], data


def _evenly(found: list[tuple[int, list[int]]], limit: int) -> list[tuple[int, list[int]]]:
    """Evenly spread windows with `limit` tokens, or one less. Texts end in shorter ones, so that the first
    choice may hold fewer: more are taken from between, and of the last of them what is lacking."""
    window = max(len(ids) for _, ids in found)
    chosen: dict[int, list[int]] = {}
    missing = limit
    while missing > 1:  # a window of one token foresees nothing
        rest = [i for i in range(len(found)) if i not in chosen]
        count = min(len(rest), max(1, missing // window))
        first = len(rest) // (2 * count) if chosen else 0  # what is added comes from the middle
        for i in [rest[first + k * len(rest) // count] for k in range(count)]:
            chosen[i] = found[i][1][:missing]
            missing -= len(chosen[i])
    return [(found[i][0], chosen[i]) for i in sorted(chosen)]


def _windows(tokenizer: Tokenizer, text: TextFile, window: int) -> list[list[int]]:
    ids = tokenizer.encode(text.text)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    step = window - len(start)
    return [start + ids[i : i + step] for i in range(0, len(ids), step)]
