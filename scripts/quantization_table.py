"""The table of docs/quantization.md: what each way of storing a model costs in bytes, quality and speed.

    python scripts/quantization_table.py --work /tmp/table demo
    python scripts/quantization_table.py --work /tmp/table smollm2 --steps convert,eval --seconds 250
    python scripts/quantization_table.py --work /tmp/table smollm2 --gguf "llama.cpp Q4_K_M=/tmp/q4_k_m.gguf"
    python scripts/quantization_table.py --work /tmp/table smollm2 --print

MODEL: demo (made into a bf16 checkpoint by demo_checkpoint.py), smollm2, a GGUF file or a checkpoint's
folder. Every row is made by `strata calibrate`, `convert`, `eval compare` against the bf16 row, and `bench`;
those of --gguf are read as they are and not timed. What is done is kept in --work, so that a second call
goes on; --seconds N begins nothing new after that time. A row whose command failed says why; --again tries
those once more. Rows with the same formats and settings have the same speed, which is measured once.

All comparisons have an f32 KV cache (KV rows apart) and the activations that runs have; the reference's
products are f32. Speeds are `strata bench -p 512 -n 32 -d 0 -s 1 -r 2`, with AVX2 alone and with all that the
processor has; an idle machine is the caller's business.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_checkpoint

from strata.interfaces.bundled import model_path
from strata.store.manifest import read_manifest

Result = dict[str, Any]
STEPS = ("convert", "eval", "bench")
_BF16 = {"experts": "bf16", "shared": "bf16", "head": "bf16", "embed": "bf16"}
_BENCH = ("-p", "512", "-n", "32", "-d", "0", "-s", "1", "-r", "2")
ISAS = ("avx2", "")
"""STRATA_ISA of the timed runs; "": the best there is."""
_CALLS = (*STEPS, *STEPS[-1:] * (len(ISAS) - 1))


@dataclass(frozen=True)
class Row:
    """formats: by part, for convert; method, stats and alpha, too: stats names one of STATS. settings: --set.

    gguf: a file that is measured instead of a store.
    """

    name: str
    formats: Mapping[str, str]
    method: str = ""
    stats: str = ""
    settings: tuple[str, ...] = ()
    alpha: str = ""
    gguf: Path | None = None

    def called(self, name: str) -> bool:
        """Whether `name` is part of the row's, or with = before it the whole."""
        return name[1:] == self.name if name.startswith("=") else name in self.name

    @property
    def timed(self) -> bool:
        """KV at no depth costs no time, and files of others are not run as they are."""
        return self.gguf is None and not any(item.startswith("kv.") for item in self.settings)

    @property
    def speed(self) -> tuple[object, ...]:
        """Rows with the same have the same speed: methods choose values, not bytes."""
        return (*self.formats.items(), *self.settings)

    @property
    def store(self) -> str:
        """Rows with the same conversion share a store."""
        parts = [*dict.fromkeys(self.formats.values()), self.method, self.stats, self.alpha]
        return "-".join(part for part in parts if part).replace("+", "_")


def _all(fmt: str) -> dict[str, str]:
    """Matrices of layers in one format, head and embedding in 8 bits per row."""
    return {"experts": fmt, "shared": fmt, "head": "w8", "embed": "w8"}


STATS = {"own": (), "shared": ("--min-tokens", "1000000000")}
"""Arguments of `strata calibrate`: every expert's own statistics, or its layer's for all."""
W8A8 = ("backend.activations=int8_per_token",)
ROWS = (
    Row("bf16", _BF16),
    Row("w8", _all("w8")),
    Row("w4g128 plain", _all("w4g128")),
    Row("w4g64 plain", _all("w4g64")),
    Row("w4g64 gptq", _all("w4g64"), "gptq", "own"),
    Row("w4g64 gptq, shared statistics", _all("w4g64"), "gptq", "shared"),
    Row("w4g64 awq", _all("w4g64"), "awq", "own"),
    Row("w4g64 awq+gptq", _all("w4g64"), "awq+gptq", "own"),
    Row("w4g64m plain", _all("w4g64m")),
    Row("w4g64m gptq", _all("w4g64m"), "gptq", "own"),
    Row("w4g64m awq+gptq", _all("w4g64m"), "awq+gptq", "own"),
    Row("w8a8 plain", _all("w8"), settings=W8A8),
    Row("w8a8 smooth, per expert", _all("w8"), "smooth", "own", W8A8),
    Row("w8a8 smooth, shared statistics", _all("w8"), "smooth", "shared", W8A8),
    Row("w8a8 smooth, alpha by perplexity", _all("w8"), "smooth", "own", W8A8, "perplexity"),
    *(
        Row(f"bf16, KV {dtype}", _BF16, settings=(f"kv.dtype={dtype}",))
        for dtype in ("bf16", "int8g32", "int8g64", "int8")
    ),
)
BASE = ROWS[0]


class FailedError(Exception):
    """A command's last line of errors."""


def strata(*arguments: str | Path, isa: str = "") -> str:
    """Runs a command; its stdout."""
    command = [sys.executable, "-m", "strata", *map(str, arguments)]
    environment = {**os.environ, **({"STRATA_ISA": isa} if isa else {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FailedError(next((line for line in lines if line.startswith("error")), lines[0]))
    return done.stdout


class Table:
    """The rows of one model. results: by row and step, as they were measured; kept in a file."""

    def __init__(self, model: str, work: Path, text: Sequence[str], rows: Sequence[Row]) -> None:
        self.model = model
        self.rows = rows
        self.folder = work / Path(model).stem
        self.folder.mkdir(parents=True, exist_ok=True)
        self._text = text
        self._file = self.folder / "results.json"
        self.results: dict[str, dict[str, Result]] = {}
        if self._file.exists():
            self.results = json.loads(self._file.read_text())

    @property
    def source(self) -> Path:
        """What is converted."""
        if self.model != "demo":
            return model_path(self.model)
        made = self.folder / "demo-bf16"
        return made if made.exists() else demo_checkpoint.write_checkpoint(made)

    def forget_failures(self) -> None:
        """So that they are tried again."""
        for done in self.results.values():
            done.pop("failed", None)

    def store(self, row: Row) -> Path:
        """Where the row's store is, or will be."""
        return row.gguf or self.folder / row.store

    def missing(self, steps: Sequence[str], names: Sequence[str]) -> Iterator[tuple[Row, str]]:
        """What is not done yet when it is asked for, in the order in which it can be done."""
        for row in self.rows:
            if not any(row.called(name) for name in names) or (row.stats == "shared" and self._dense()):
                continue
            for step in _CALLS if row.timed else STEPS[:2]:
                done = self.results.get(row.name, {})
                if step in steps and not self._has(row, step) and "failed" not in done:
                    yield row, step

    def _has(self, row: Row, step: str) -> bool:
        """Whether a step is done, be it by another row with the same speed."""
        if step != "bench":
            return step in self.results.get(row.name, {})
        found = self._speeds(row)
        return all(_key(isa) in found for isa in ISAS)

    def _speeds(self, row: Row) -> Result:
        """What was measured of a row's speed, or of another's that has the same; by instruction set."""
        same = [one for one in self.rows if one.timed and one.speed == row.speed]
        found = [self.results.get(one.name, {}).get("bench", {}) for one in same]
        return max(found, key=len) if row.timed else {}

    def _dense(self) -> bool:
        """Whether there are no experts, whose statistics could be shared; once the first row is made."""
        return read_manifest(self.store(BASE)).spec.experts is None

    def do(self, row: Row, step: str) -> None:
        """One step of one row, noted."""
        done = self.results.setdefault(row.name, {})
        begin = time.perf_counter()
        try:
            done[step] = getattr(self, f"_{step}")(row)
            done[step]["seconds"] = round(time.perf_counter() - begin, 1)
            done[step]["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        except FailedError as error:
            done["failed"] = {"step": step, "why": str(error)}
        self._file.write_text(json.dumps(self.results, indent=1))

    def _convert(self, row: Row) -> Result:
        store = self.store(row)
        if row.gguf is not None:
            return {"bytes": row.gguf.stat().st_size}
        if not store.exists():
            options = [part for key, value in row.formats.items() for part in (f"--{key}", value)]
            if row.method:
                options += ["--method", row.method, "--stats", str(self._stats(row.stats))]
            options += ["--alpha", row.alpha] if row.alpha else []
            strata("convert", self.source, "--out", store, *options)
        manifest = read_manifest(store)
        shards = {shard.path for shard in manifest.shards()}
        return {"bytes": sum(entry.bytes for entry in manifest.files if entry.file in shards)}

    def _stats(self, name: str) -> Path:
        made = self.folder / f"{name}.stats"
        if not made.exists():
            strata("calibrate", self.source, "--out", made, *STATS[name])
        return made

    def _eval(self, row: Row) -> Result:
        if row is BASE:
            exact = ("--set", "kv.dtype=f32", "--set", "backend.activations=f32")
            return {
                "b": json.loads(strata("eval", "perplexity", self.store(row), *exact, *self._text, "--json"))
            }
        asked = ["kv.dtype=f32", *row.settings]
        settings = [part for item in asked for part in ("--set-b", item)]
        truth = ["--set-a", "kv.dtype=f32", "--set-a", "backend.activations=f32"]
        stores = self.store(BASE), self.store(row)
        found: Result = json.loads(
            strata("eval", "compare", *stores, *truth, *settings, *self._text, "--samples", "0", "--json")
        )
        return found

    def _bench(self, row: Row) -> Result:
        """One instruction set per call, so that the machine need not be idle for long at a time."""
        settings = [part for item in row.settings for part in ("--set", item)]
        made: Result = dict(self.results[row.name].get("bench", {}))
        isa = next(isa for isa in ISAS if _key(isa) not in made)
        found = json.loads(strata("bench", self.store(row), *settings, *_BENCH, "--json", isa=isa))
        by_kind = {result["kind"]: result for result in found["results"]}
        return {**made, _key(isa): {"subject": found["subject"], **by_kind}}

    def markdown(self) -> str:
        """The table, and under it the rows that failed; without speeds where none was measured."""
        timed = any("bench" in done for done in self.results.values())
        columns = ["", "bytes", "perplexity", "change", "KL mean", "KL 99 %", "top-1"]
        columns += ["decode, AVX2", "prefill", "decode, best", "prefill"] if timed else []
        lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
        for row in filter(self._shown, self.rows):
            speeds = _cells(self._speeds(row)) if timed else []
            lines.append("| " + " | ".join([row.name, *_quality(self.results[row.name]), *speeds]) + " |")
        notes = [
            f"- {row.name}: not made, `{failed['step']}` says: {failed['why']}"
            for row in self.rows
            if (failed := self.results.get(row.name, {}).get("failed"))
        ]
        return "\n".join([*lines, "", *notes])

    def _shown(self, row: Row) -> bool:
        return "convert" in self.results.get(row.name, {})


def _key(isa: str) -> str:
    """Of an instruction set in the results."""
    return isa or "best"


def _quality(done: Mapping[str, Result]) -> list[str]:
    cells = [f"{done['convert']['bytes']:,}", *["-"] * 5]
    found = done.get("eval")
    if found is not None:
        cells[1] = f"{found['b']['perplexity']:.3f}"
    if found is not None and "kl" in found:
        change = f"{100 * found['perplexity_change']:+.2f} % ± {100 * found['perplexity_change_error']:.2f}"
        kl = found["kl"]
        cells[2:] = [change, f"{kl['mean']:.2e}", f"{kl['p99']:.2e}", f"{100 * found['top1']:.2f} %"]
    return cells


def _cells(found: Mapping[str, Any]) -> list[str]:
    """Of decoding, with bytes/s and their share of the memory's, and of prefill, by instruction set."""
    cells = []
    for one in (found.get(_key(isa)) for isa in ISAS):
        if one is None:
            cells += ["-", "-"]
            continue
        decode, prefill = one["decode"], one["prefill"]
        speed = f"{decode['tokens_per_second']['median']:.1f} t/s"
        if decode["bytes_per_second"]:
            speed += f", {decode['bytes_per_second']['median'] / 1e9:.1f} GB/s"
        if decode.get("share"):
            speed += f", {100 * decode['share']['median']:.0f} %"
        cells += [speed, f"{prefill['tokens_per_second']['median']:.0f} t/s"]
    return cells


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--work", type=Path, required=True, help="folder for stores and results")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)} [all]")
    parser.add_argument(
        "--rows", default="", help="only those whose name holds one of these, or is: gptq,=w8"
    )
    parser.add_argument("--seconds", type=float, help="begin nothing new after these")
    parser.add_argument("--tokens", type=int, help="of the text, at most")
    parser.add_argument("--gguf", action="append", default=[], metavar="NAME=FILE", help="one more row")
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--print", action="store_true", help="only print what is there")
    options = parser.parse_args()
    text = ["--tokens", str(options.tokens)] if options.tokens else []
    ggufs = (item.partition("=") for item in options.gguf)
    rows = (*ROWS, *(Row(name, {}, gguf=Path(path)) for name, _, path in ggufs))
    table = Table(options.model, options.work, text, rows)
    if options.again:
        table.forget_failures()
    if not options.print:
        fill(table, options)
    print(table.markdown())
    return 0


def fill(table: Table, options: argparse.Namespace) -> None:
    """Step after step, until all is done or the time is over."""
    stop = time.monotonic() + (float("inf") if options.seconds is None else options.seconds)
    for row, step in table.missing(options.steps.split(","), options.rows.split(",")):
        if time.monotonic() > stop:
            print("not all is done: call again", file=sys.stderr)
            break
        print(f"{step} {row.name}", file=sys.stderr, flush=True)
        table.do(row, step)


if __name__ == "__main__":
    sys.exit(main())
