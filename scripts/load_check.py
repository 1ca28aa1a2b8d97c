"""Endurance of `strata serve`: many streaming clients, good and bad, for as long as asked.

    python scripts/load_check.py --minutes 10 --clients 16 --json load.json

Answers are computed alone first, one after the other; then the clients ask for the same ones all at once and
in any order, among aborts, disconnects, empty and over-long prompts and broken bodies. Exit status 0 only if
every answer that was completed is the one computed alone, nothing was answered with 5xx, nothing is left of
any request (KV pages, files, threads; the engine checks itself at the end), and memory does not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving.client import Answer, Client, raw_request
from serving.process import ROOT, StrataServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_WORDS = ("river", "mountain", "clock", "winter", "engine", "paper", "window", "garden", "letter", "music")
_SETTLED = 0.3  # the share of the run after which memory must be flat: by then every arena has been used
_MOST_GROWTH = 2.0  # MiB a minute; the allocator's own scatter is below 1


@dataclass(frozen=True)
class Asked:
    """A request whose answer is known: text, finish reason and tokens of each choice."""

    path: str
    body: dict[str, Any]


Known = tuple[tuple[str, str | None], ...]


@dataclass
class Figures:
    """What happened. wrong: sentences about what must not happen."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def requests(seed: int, count: int) -> list[Asked]:
    """Prompts of 1 to 400 words, some that begin alike; greedy, or drawn with a seed."""
    draw = random.Random(seed)
    found = []
    start = " ".join(draw.choices(_WORDS, k=60))
    for index in range(count):
        words = " ".join(draw.choices(_WORDS, k=draw.choice((1, 5, 20, 60, 200, 400))))
        prompt = f"{start} {words}" if index % 3 == 0 else words
        sampling: dict[str, Any] = {"temperature": 0.0}
        if index % 2:
            sampling = {"temperature": 1.0, "seed": index, "top_p": 0.9, "top_k": 40}
        body = {"max_tokens": draw.choice((1, 8, 24, 60)), "stream": True, **sampling}
        if index % 4 == 3:
            found.append(Asked(TEXT, {"prompt": prompt, "n": 2 if index % 8 == 7 else 1, **body}))
        else:
            found.append(Asked(CHAT, {"messages": [{"role": "user", "content": prompt}], **body}))
    return found


def known(answer: Answer) -> Known:
    """Text and finish reason of each choice of a stream."""
    texts: dict[int, str] = {}
    finish: dict[int, str | None] = {}
    for event in answer.events:
        for choice in event["choices"]:
            index = choice["index"]
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            finish[index] = choice["finish_reason"] or finish.get(index)
    return tuple((texts[index], finish[index]) for index in sorted(texts))


class Load:
    """The clients. alone: what each request must be answered with."""

    def __init__(self, client: Client, asked: list[Asked], alone: list[Known], seed: int) -> None:
        self.client = client
        self.asked = asked
        self.alone = alone
        self.seed = seed
        self.figures = Figures()
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[Answer | None]]]] = {
            "stream": (56, self._stream),
            "whole": (8, self._whole),
            "abort": (10, self._abort),
            "leave at once": (6, self._leave),
            "half a body": (4, self._half),
            "empty prompt": (4, self._empty),
            "too long": (4, self._too_long),
            "bad body": (8, self._bad),
        }

    async def run(self, clients: int, seconds: float) -> None:
        """All clients until the time is over."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._one(random.Random(self.seed + index), end) for index in range(clients)))

    async def _one(self, draw: random.Random, end: float) -> None:
        names, weights = [*self._kinds], [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < end:
            (kind,) = draw.choices(names, weights)
            try:
                answer = await self._kinds[kind][1](draw)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                self.figures.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                continue
            status = answer.status if answer is not None else 0
            self.figures.kinds[kind] += 1
            self.figures.statuses[str(status or "left")] += 1
            if status >= 500:
                self.figures.wrong.append(f"{kind}: status {status}: {answer.body[:200]!r}")  # type: ignore[union-attr]

    async def _stream(self, draw: random.Random) -> Answer:
        index = draw.randrange(len(self.asked))
        answer = await self.client.post(self.asked[index].path, self.asked[index].body)
        self._compare(index, known(answer), answer.status == 200 and answer.done)
        self.figures.tokens += len(answer.texts())
        return answer

    async def _whole(self, draw: random.Random) -> Answer:
        index = draw.randrange(len(self.asked))
        answer = await self.client.post(self.asked[index].path, {**self.asked[index].body, "stream": False})
        choices = answer.json.get("choices", [])
        texts = tuple(
            (c.get("text", (c.get("message") or {}).get("content")), c["finish_reason"]) for c in choices
        )
        self._compare(index, texts, answer.status == 200)
        return answer

    def _compare(self, index: int, found: Known, complete: bool) -> None:
        if not complete:
            self.figures.wrong.append(f"request {index} was not answered")
        elif found != self.alone[index]:
            self.figures.wrong.append(f"request {index}: {found!r}, alone {self.alone[index]!r}"[:600])
        else:
            self.figures.equal += 1

    async def _abort(self, draw: random.Random) -> Answer:
        body = {**draw.choice(self.asked[:1]).body, "max_tokens": 500, "ignore_eos": True}
        return await self.client.post(CHAT, body, leave_after=draw.randrange(1, 12))

    async def _leave(self, draw: random.Random) -> Answer:
        """During prefill, or before it has begun."""
        asked = draw.choice(self.asked)
        answer = await self.client.post(asked.path, asked.body, leave_after=0)
        await asyncio.sleep(draw.random() * 0.05)
        return answer

    async def _half(self, draw: random.Random) -> Answer:
        asked = draw.choice(self.asked)
        request = raw_request(self.client.host, asked.path, json.dumps(asked.body).encode())
        return await self.client.ask(request[: -draw.randrange(1, 20)], leave_after=0)

    async def _empty(self, draw: random.Random) -> Answer:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (TEXT, {"prompt": ""}),
            (TEXT, {"prompt": []}),
            (TEXT, {"prompt": [[]]}),
            (CHAT, {"messages": []}),
        ]
        path, body = draw.choice(bodies)
        return self._expect(await self.client.post(path, {**body, "stream": draw.random() < 0.5}), 400)

    async def _too_long(self, draw: random.Random) -> Answer:
        prompt = " ".join(draw.choices(_WORDS, k=draw.choice((6000, 60_000))))
        answer = self._expect(await self.client.post(TEXT, {"prompt": prompt, "stream": True}), 400)
        if answer.status == 400 and answer.json["error"]["code"] != "context_length_exceeded":
            self.figures.wrong.append(f"too long: {answer.body[:200]!r}")
        return answer

    async def _bad(self, draw: random.Random) -> Answer:
        message = {"messages": [{"role": "user", "content": "x"}]}
        bodies: list[tuple[bytes | dict[str, Any], dict[str, str], int]] = [
            (b"{not json", {}, 400),
            (b"[]", {}, 400),
            (b"\xff\xfe", {}, 400),
            (b"[" * 5000, {}, 400),
            ({**message, "temperature": "hot"}, {}, 400),
            ({**message, "max_tokens": -5}, {}, 400),
            ({**message, "n": 10_000}, {}, 400),
            ({**message, "logit_bias": {"99999999": 5}}, {}, 400),
            (message, {"content-type": "text/plain"}, 415),
        ]
        body, headers, status = draw.choice(bodies)
        return self._expect(await self.client.post(CHAT, body, headers=headers), status)

    def _expect(self, answer: Answer, status: int) -> Answer:
        if answer.status != status:
            self.figures.wrong.append(f"status {answer.status}, not {status}: {answer.body[:200]!r}")
        return answer


async def measure(server: StrataServer, options: argparse.Namespace) -> Load:
    """The answers alone, the load, and then quiet."""
    client = await asyncio.to_thread(server.ready)
    asked = requests(options.seed, options.requests)
    alone = []
    for each in asked:
        answer = await client.post(each.path, each.body)
        if answer.status != 200 or not answer.done:
            raise SystemExit(f"alone already: status {answer.status}: {answer.body[:300]!r}")
        alone.append(known(answer))
    load = Load(client, asked, alone, options.seed)
    files, threads = server.files, server.threads
    server.watch(every=1.0)
    await load.run(options.clients, options.minutes * 60)
    await _look_at_what_is_left(server, client, load.figures, files, threads)
    return load


async def _look_at_what_is_left(
    server: StrataServer, client: Client, figures: Figures, files: int, threads: int
) -> None:
    deadline = time.monotonic() + 60
    left: dict[str, float] = {}
    while time.monotonic() < deadline:
        metrics = (await client.get("/metrics")).body.decode()
        names = ("strata_requests_running", "strata_requests_waiting", "strata_kv_pages_used")
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and line[0] != "#")
        left = {name: float(lines[name]) for name in names}
        left["files"] = server.files - files
        if all(value <= 0 for value in left.values()):
            break
        await asyncio.sleep(0.5)
    figures.wrong += [f"left behind: {value:g} {name}" for name, value in left.items() if value > 0]
    if server.threads > threads + 2:  # anyio keeps those that tokenize for a while
        figures.wrong.append(f"{threads} threads before, {server.threads} afterwards")


def slope(samples: list[tuple[float, int]]) -> float:
    """MiB a minute: least squares through the samples after the first part of the run."""
    kept = samples[int(len(samples) * _SETTLED) :]
    if len(kept) < 3:
        return 0.0
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean_y = sum(y for _, y in kept) / len(kept)
    over = sum((t - mean_t) ** 2 for t, _ in kept)
    return sum((t - mean_t) * (y - mean_y) for t, y in kept) / over * 60 / (1 << 20)


def main() -> int:
    options = parse()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("STRATA_API_KEY", None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [options.model, *(["--threads", str(options.threads)] if options.threads else [])]
        server = StrataServer([*arguments, "--set", "engine.requests=8"], Path(folder) / "log", environment)
        try:
            load = asyncio.run(measure(server, options))
        finally:
            code = server.stop()
        log = server.log.read_text(errors="replace")
    return report(server, load, code, log, options)


def report(server: StrataServer, load: Load, code: int, log: str, options: argparse.Namespace) -> int:
    """Print the result; the exit status."""
    figures, growth = load.figures, slope(server.samples)
    figures.wrong += [] if code == 0 else [f"exit code {code}"]
    figures.wrong += [] if "integrity checked" in log else ["the engine did not find itself in order"]
    figures.wrong += ["a traceback in the log"] if "Traceback" in log or " error  " in log else []
    if growth > _MOST_GROWTH and options.minutes >= 5:
        figures.wrong.append(f"memory grows by {growth:.2f} MiB a minute")
    resident = [size for _, size in server.samples]
    result = {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": sum(figures.kinds.values()),
        "by kind": dict(figures.kinds),
        "by status": dict(figures.statuses),
        "answers equal to the one alone": figures.equal,
        "resident MiB at the start, most, at the end": [
            round(size / (1 << 20), 1) for size in (resident[0], max(resident), resident[-1])
        ],
        "growth in MiB a minute": round(growth, 3),
        "wrong": figures.wrong[:20],
        "wrong in all": len(figures.wrong),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if figures.wrong else 0


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="demo", help="what to serve [demo]")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48, help="different ones [48]")
    parser.add_argument("--threads", type=int, help="of the engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
