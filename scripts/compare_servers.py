"""`strata serve` beside llama.cpp's server: the same weights, the same prompts, in turns on this machine.

    python scripts/compare_servers.py --llama-server ~/llama.cpp/build/bin/llama-server \\
        --model smollm2=smollm2.gguf --model moe=moe-10.gguf=moe-10.store --json servers.json

Both servers of a model run at once, one of them idle. For each number of clients they are asked in turns, in
an order that changes; every client has a prompt of its own that nobody had before (random token ids), and
gets the same number of tokens (`ignore_eos`), greedily. A run's rate is all tokens from the first request to
the last token, prompts included; ratios are taken pair by pair. Both have the same threads and the same kind
of KV cache. STRATA_ISA holds Strata to an instruction set; llama.cpp's is that of its build. An idle machine
is the caller's business.

What follows random tokens repeats itself, and there n-gram drafts gain most. `--set speculative.use=off`
holds Strata to a token per step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving.client import Client
from serving.process import ROOT, StrataServer

STRATA, LLAMA = "strata", "llama.cpp"
_LEAST, _MOST = 8, 256  # tokens of an answer
_IDS = (1000, 40_000)  # prompts are drawn from; no control tokens there
_KV = {"half": ("bf16", ["-ctk", "f16", "-ctv", "f16"]), "int8": ("int8", ["-ctk", "q8_0", "-ctv", "q8_0"])}


@dataclass(frozen=True)
class Model:
    """gguf: what llama.cpp reads; strata: the same, or the store made of it."""

    name: str
    gguf: Path
    strata: Path


@dataclass
class Point:
    """One number of clients: what each server's runs came to, pair by pair."""

    clients: int
    tokens: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {STRATA: [], LLAMA: []})
    first: dict[str, list[float]] = field(default_factory=lambda: {STRATA: [], LLAMA: []})

    def ratios(self) -> list[float]:
        """Strata's rate over llama.cpp's, of every pair."""
        return [ours / theirs for ours, theirs in zip(self.rates[STRATA], self.rates[LLAMA], strict=True)]

    def row(self) -> dict[str, Any]:
        """Medians, the ratio's mean and its spread; times in milliseconds."""
        ratios = self.ratios()
        return {
            "clients": self.clients,
            "tokens each": self.tokens,
            **{f"{name} tokens/s": round(statistics.median(self.rates[name]), 1) for name in self.rates},
            "ratio": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            **{f"{name} first ms": round(1e3 * statistics.median(self.first[name])) for name in self.first},
        }


async def ask_all(client: Client, clients: int, prompt: int, tokens: int, draw: random.Random) -> Run:
    """All clients at once. Raises RuntimeError for an answer that is not whole."""
    bodies = [
        {
            **{"prompt": [draw.randrange(*_IDS) for _ in range(prompt)], "max_tokens": tokens},
            **{
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        }
        for _ in range(clients)
    ]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies))
    for answer in answers:
        found = [event["usage"] for event in answer.events if event.get("usage")]
        if answer.status != 200 or not answer.done or not found:
            raise RuntimeError(f"status {answer.status}: {answer.body[:300]!r}")
        if found[-1]["completion_tokens"] != tokens or found[-1]["prompt_tokens"] < prompt:
            raise RuntimeError(f"{tokens} tokens were asked for: {found[-1]}")
    seconds = max(answer.times[-1] for answer in answers) - begin
    firsts = [answer.times[0] - answer.begin for answer in answers]
    return Run(clients * tokens / seconds, statistics.median(firsts))


@dataclass(frozen=True)
class Run:
    """rate: tokens per second of all clients together; first: seconds to the first token, their median."""

    rate: float
    first: float


async def measure(servers: dict[str, Client], options: argparse.Namespace) -> list[Point]:
    """Every number of clients; `options.rounds` pairs of runs each."""
    draw = random.Random(options.seed)
    points = []
    for clients in options.clients:
        # Warm, and how many tokens the slower one makes in the time that a run shall take.
        probes = [await ask_all(each, clients, options.prompt, 16, draw) for each in servers.values()]
        pace = min(run.rate for run in probes)
        point = Point(clients, min(max(round(pace * options.seconds / clients), _LEAST), _MOST))
        for number in range(options.rounds):
            order = [STRATA, LLAMA] if number % 2 else [LLAMA, STRATA]
            for name in order:
                run = await ask_all(servers[name], clients, options.prompt, point.tokens, draw)
                point.rates[name].append(run.rate)
                point.first[name].append(run.first)
        points.append(point)
        print(json.dumps(point.row()), file=sys.stderr, flush=True)
    return points


@contextmanager
def strata_server(model: Model, options: argparse.Namespace, folder: Path) -> Iterator[Client]:
    """A running `strata serve` with room for all clients."""
    most = max(options.clients)
    arguments = [str(model.strata), "--threads", str(options.threads), "--parallel", str(most)]
    arguments += ["--context", str(options.prompt + _MOST + 8), "--set", f"kv.dtype={_KV[options.kv][0]}"]
    for setting in ("device.use=none", *options.set):
        arguments += ["--set", setting]
    server = StrataServer(arguments, folder / "strata.log", {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        yield server.ready()
    finally:
        server.stop()


@contextmanager
def llama_server(model: Model, options: argparse.Namespace, folder: Path) -> Iterator[Client]:
    """A running llama-server with as many slots as there are clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    most = max(options.clients)
    command = [str(options.llama_server), "-m", str(model.gguf), "--port", str(port), "--parallel", str(most)]
    command += ["-c", str(most * (options.prompt + _MOST + 8)), "-t", str(options.threads), "-fa", "on"]
    command += ["-tb", str(options.threads), *_KV[options.kv][1], "--no-webui", "--cache-ram", "0"]
    with (folder / "llama.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, folder / "llama.log")
        yield Client("127.0.0.1", port)
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server did not get ready:\n{log.read_text(errors='replace')[-2000:]}")


def compare(model: Model, options: argparse.Namespace) -> list[Point]:
    """Both servers up, the measurement, both gone."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = {
            STRATA: stack.enter_context(strata_server(model, options, folder)),
            LLAMA: stack.enter_context(llama_server(model, options, folder)),
        }
        return asyncio.run(measure(servers, options))


def table(results: dict[str, list[Point]]) -> str:
    """Markdown: ratios first; above 1 Strata is faster."""
    lines = [
        "| model | clients | tokens/s, ratio | Strata | llama.cpp | first token, Strata | llama.cpp |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, points in results.items():
        for point in points:
            row = point.row()
            spread = f"{min(point.ratios()):.2f} to {max(point.ratios()):.2f}"
            lines.append(
                f"| {name} | {point.clients} | **{row['ratio']:.2f}** ({spread}) "
                f"| {row[f'{STRATA} tokens/s']} | {row[f'{LLAMA} tokens/s']} "
                f"| {row[f'{STRATA} first ms']} ms | {row[f'{LLAMA} first ms']} ms |"
            )
    return "\n".join(lines)


def main() -> int:
    options = parse()
    begin = time.perf_counter()
    results = {model.name: compare(model, options) for model in options.model}
    print(table(results))
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)
    if options.json:
        rows = {name: [point.row() for point in points] for name, points in results.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's program")
    model = "NAME=GGUF or NAME=GGUF=STORE; several times"
    parser.add_argument("--model", type=_model, action="append", required=True, help=model)
    parser.add_argument("--clients", type=_numbers, default=[1, 4, 16], help="[1,4,16]")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each number of clients [3]")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="that a run of the slower one shall take [5]"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt [64]")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both [one per CPU]")
    parser.add_argument("--kv", choices=[*_KV], default="int8", help="KV cache [int8]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of Strata; several times"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _model(text: str) -> Model:
    name, gguf, *store = text.split("=")
    return Model(name, Path(gguf), Path(store[0] if store else gguf))


if __name__ == "__main__":
    sys.exit(main())
