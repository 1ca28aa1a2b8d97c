"""Runs both engines in turns, probes the memory around every run, and reads what they print."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from peers.figures import Pair, Sample
from peers.workloads import Peer, Workload, strata_command
from strata.backends.isa import ENV, NAMES, choose_isa, extension
from strata.errors import StrataError
from strata.hardware.bandwidth import read_bandwidth
from strata.hardware.cpu import choose_cpus

ROOT = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 0.3
_KERNELS = "csrc/cpu"
_SHOWN = 2000
_TABLE_COLUMNS, _TABLE_SPEED = 10, 7
"""Of llama-batched-bench's table: PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S; seconds and tokens/s."""

Speed = tuple[float, float | None]
"""Tokens/s, and the share of the bandwidth where the engine says one."""


class RunError(StrataError):
    """An engine failed or printed something else than figures."""


@dataclass(frozen=True)
class Model:
    """The same weights for both engines. notes: what the conversion could not keep, one sentence each."""

    gguf: Path
    store: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runner:
    """prefix: words before either engine's command, e.g. ("chrt", "-f", "1")."""

    threads: int
    repeats: int
    prefix: tuple[str, ...] = ()
    timeout: float = 3600.0

    def pair(self, peer: Peer, work: Workload, model: Model) -> Pair:
        """The peer, then Strata; a probe before, between and after."""
        before = probe(self.threads)
        repeats = 1 if work.long else self.repeats
        command = peer.command(work, model.gguf, self.threads, repeats)
        read = partial(batched_speed if work.streams > 1 else llama_speed, skip=peer.warm_ups(work))
        theirs, others = self._run(command, {}, read)
        between = probe(self.threads)
        peer_run = Sample(theirs[0], before, between, others=others)
        command = strata_command(work, model.store, self.threads, repeats)
        isa = {ENV: peer.isa} if peer.isa in NAMES else {}
        ours, others = self._run(command, isa, strata_speed)
        after = probe(self.threads)
        return Pair(peer_run, Sample(ours[0], between, after, ours[1], others), kernels_version())

    def _run(
        self, command: Sequence[str], extra: Mapping[str, str], read: Callable[[str], Speed]
    ) -> tuple[Speed, float]:
        """What `read` finds, and the CPUs that others had meanwhile. In an empty folder: some programs leave
        a log in the current one."""
        full = [*self.prefix, *command]
        environment = {key: value for key, value in os.environ.items() if key != ENV} | dict(extra)
        environment["PYTHONPATH"] = str(ROOT)
        load = Load()
        try:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    full, capture_output=True, text=True, cwd=folder, env=environment, timeout=self.timeout
                )
        except FileNotFoundError as error:
            raise RunError(f"there is no program {full[0]}") from error
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{' '.join(full)}: no end after {self.timeout:.0f} s") from error
        others = load.of_others()
        if done.returncode:
            raise failed(full, done.returncode, done.stderr)
        try:
            return read(done.stdout if done.stdout.strip() else done.stderr), others
        except (ValueError, KeyError, IndexError, TypeError) as error:
            cause = f"{' '.join(full)} printed no figures ({error}):\n{done.stdout[-_SHOWN:]}"
            raise RunError(cause) from error


class Load:
    """CPU time that others than this process and its children take from now on."""

    def __init__(self) -> None:
        self._begin, self._all, self._mine = time.monotonic(), _cpu_seconds(), _own_cpu_seconds()

    def of_others(self) -> float:
        """CPUs, on average until now."""
        taken = (_cpu_seconds() - self._all) - (_own_cpu_seconds() - self._mine)
        return max(0.0, taken / (time.monotonic() - self._begin))


def _cpu_seconds() -> float:
    """That all CPUs were busy since the start of the machine; waiting for a disk is not busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _own_cpu_seconds() -> float:
    """Of this process and those of its children that have ended."""
    return sum(os.times()[:4])


def kernels_version() -> str:
    """The last commit that changed the kernels, "+" behind it where files differ from it; "" without git."""
    log = _git("log", "-1", "--format=%h", "--", _KERNELS)
    return log + ("+" if log and _git("status", "--porcelain", "--", _KERNELS) else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def failed(command: Sequence[str], status: int, stderr: str) -> RunError:
    """The error for a command's exit status; negative: the signal that ended it."""
    how = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    remedy = ""
    if -status in (signal.SIGILL, signal.SIGSEGV):
        remedy = (
            "the processor may not run what the program was built for (on some virtual machines AMX is "
            "announced and does not work): --isa avx2,avx512"
        )
    return RunError(f"{' '.join(command)} {how}:\n{stderr[-_SHOWN:]}", remedy=remedy)


def probe(threads: int) -> float:
    """Bytes/s that `threads` of ours read from memory now. The threads are gone when it returns: an engine
    that runs next must not share the cores with them."""
    chosen, native = choose_cpus(threads), extension()
    cpu = native.Cpu(list(chosen.cpus), choose_isa(native.features()), chosen.bind)
    return read_bandwidth(cpu, PROBE_SECONDS).best


def llama_speed(text: str, skip: int = 0) -> Speed:
    """Of `llama-bench -o json`: the median of its repetitions behind the first `skip`, of its last test."""
    entry = json.loads(text)[-1]
    return statistics.median(positive(value) for value in entry["samples_ts"][skip:]), None


def batched_speed(text: str, skip: int = 0) -> Speed:
    """Of llama-batched-bench, JSON lines or a table: the median over its lines behind the first `skip`, all
    streams together."""
    lines = [json.loads(line)["speed_tg"] for line in text.splitlines() if line.startswith("{")]
    lines += [row[_TABLE_SPEED] for row in map(_cells, text.splitlines()) if row]
    return statistics.median(positive(line) for line in lines[skip:]), None


def _cells(line: str) -> list[str]:
    """Of a table's line of figures; of every other line none."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return cells if len(cells) == _TABLE_COLUMNS and cells[0].isdecimal() else []


def strata_speed(text: str) -> Speed:
    """Of `strata bench --json`: the median of its repetitions."""
    (result,) = json.loads(text)["results"]
    share = result["share"]
    return positive(result["tokens_per_second"]["median"]), share["median"] if share else None


def positive(value: Any) -> float:
    """A speed. ValueError for zero, infinity and what is no number."""
    speed = float(value)
    if not 0 < speed < float("inf"):
        raise ValueError(f"a speed of {value}")
    return speed


def progress(text: str) -> None:
    """For the person who waits."""
    print(text, file=sys.stderr, flush=True)
