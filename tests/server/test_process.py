"""`strata serve` as a process: the official client, signals, sockets (case-37)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.memory.trace import TraceFile

openai = pytest.importorskip("openai")

_HANGS = 120.0  # seconds after which a process does: a busy machine needs many for a start


class Server:
    """A running `strata serve`."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, ready: bool = True) -> None:
        command = [sys.executable, "-m", "strata", "serve", "--port", "0", *arguments]
        environment = {k: v for k, v in os.environ.items() if k != "STRATA_API_KEY"} | (env or {})
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = re.search(r"url=(\S+)", self.wait_for("listening"))[1]  # type: ignore[index]
        if ready:
            self.wait_for("ready")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, word: str) -> str:
        end = time.monotonic() + _HANGS
        while time.monotonic() < end:
            for line in list(self.lines):
                if f" {word} " in line or line.strip().endswith(f" {word}"):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no line with {word!r}: {self.lines}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        code = self.process.wait(_HANGS)
        self._reader.join(5)
        return code

    def client(self, key: str = "none") -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=_HANGS)

    def stream(self, **changes: Any) -> Any:
        messages = [{"role": "user", "content": "Count"}]
        body = {
            "model": "m",
            "messages": messages,
            "stream": True,
            "extra_body": {"ignore_eos": True},
            **changes,
        }
        return self.client().chat.completions.create(**body)


Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def run(*arguments: str, warm_up: bool = False, **options: Any) -> Server:
        settings = ("--threads", "1", "--set", f"server.warm_up={str(warm_up).lower()}")
        servers.append(Server("demo", *settings, *arguments, **options))
        return servers[-1]

    yield run
    for server in servers:
        server.process.kill()
        server.process.wait()
        assert not any("Traceback" in line for line in server.lines), server.lines


def test_the_official_client(start: Start) -> None:
    """Whole, streamed, aborted; a bad request; a key; then SIGTERM while idle: gone within 3 s, code 0."""
    server = start("-md", "demo-draft", env={"STRATA_API_KEY": "secret"})
    client = server.client("secret")
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    asked: Any = {"model": "strata-demo", "messages": question, "temperature": 0}
    answer = client.chat.completions.create(**asked, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["strata-demo"]
    completion = client.completions.create(
        model="strata-demo", prompt="The capital of Italy is", max_tokens=4
    )
    assert completion.choices[0].text
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**asked, "temperature": 9})
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    with client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as endless:
        next(iter(endless))
    server.wait_for("outcome=aborted")
    assert re.search(
        r"draft strata-demo-draft proposes tokens: .* of weights, .* of KV, on the threads of the model",
        server.wait_for("draft"),
    )
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_what_is_recorded_while_serving_is_whole_at_the_end(start: Start, tmp_path: Path) -> None:
    """Two requests after those of the warm-up, each with its own number; no texts in either file."""
    trace, timeline = tmp_path / "served.trace", tmp_path / "served.json"
    server = start("--record-trace", str(trace), "--timeline", str(timeline), warm_up=True)
    for _ in range(2):
        assert len(list(server.stream(max_tokens=4))) > 1
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0
    recorded = TraceFile(trace)
    sequences = {access.sequence for access in recorded}
    assert len(sequences) >= 3 and sequences == set(range(1, len(sequences) + 1)) and not recorded.torn
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"decode 1", "experts", "attention"} <= names


def test_a_process_whose_engine_dies_exits_with_1() -> None:
    """case-37: nothing is left to serve, and whoever supervises the process must see it."""
    code = (
        "import sys; from strata.interfaces.server.worker import EngineThread\n"
        "def die(*_): raise RuntimeError('broken')\n"
        "EngineThread._take_orders = die\n"
        "from strata.interfaces.cli import run\n"
        "sys.exit(run(['serve', 'demo', '--port', '0', '--threads', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_HANGS)
    assert done.returncode == 1, done.stderr
    assert "the engine has stopped" in done.stderr and "Traceback" not in done.stderr


def test_sigterm_lets_a_stream_end_and_refuses_new_requests(start: Start) -> None:
    server = start()
    stream = iter(server.stream(max_tokens=600))
    next(stream)
    server.signal(signal.SIGTERM)
    server.wait_for("stopping")
    with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
        server.stream(max_tokens=1)
    assert refused.value.status_code == 503
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert server.exit_code() == 0


def test_streams_that_take_too_long_end_with_an_error(start: Start) -> None:
    server = start("--set", "server.drain_seconds=0")
    stream = server.stream(max_tokens=2000)
    next(iter(stream))
    server.signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert server.exit_code() == 0


def test_a_second_signal_stops_at_once(start: Start) -> None:
    server = start()
    next(iter(server.stream(max_tokens=2000)))
    server.signal(signal.SIGTERM)
    server.wait_for("stopping")
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 128 + signal.SIGTERM


def test_sigterm_while_loading(start: Start) -> None:
    server = start(ready=False)
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_a_used_port(tmp_path: Any) -> None:
    """Said with its number and before the model is looked at: this one does not exist."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        command = [sys.executable, "-m", "strata", "serve", str(tmp_path / "none"), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HANGS)
    assert done.returncode == 2 and f"port {port}" in done.stderr and "none" not in done.stderr


def test_a_model_that_is_not_there(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "strata", "serve", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_HANGS)
    assert done.returncode == 2 and "no such file" in done.stderr and "Traceback" not in done.stderr


def test_slow_and_broken_headers(start: Start) -> None:
    """A connection that sends no complete header is closed; one with 100 kB of them is refused."""
    server = start("--set", "server.client_seconds=1")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        begin = time.monotonic()
        assert slow.recv(1) == b"" and time.monotonic() - begin > 0.5
    with socket.create_connection((host, int(port)), timeout=10) as large:
        large.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 100_000)
        assert large.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection((host, int(port)), timeout=10) as body:
        body.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert body.recv(100).startswith(b"HTTP/1.1 408")


def test_the_help_names_the_flags() -> None:
    done = subprocess.run([sys.executable, "-m", "strata", "serve", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--api-key-file" in done.stdout and "Examples:" in done.stdout


def test_everybody_on_the_network_without_a_key_is_warned_about(start: Start) -> None:
    warned = start("--host", "0.0.0.0", ready=False)
    warned.wait_for("warning:")
    closed = start("--host", "0.0.0.0", env={"STRATA_API_KEY": "k"})
    assert not any("warning" in line for line in closed.lines)


def test_run_serve_is_the_same() -> None:
    def config(*command: str) -> str:
        line = [sys.executable, "-m", "strata", *command, "demo", "--show-config"]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    served = config("run", "--serve")
    assert served == config("serve") and "engine.requests = 4    # strata serve" in served
    line = [sys.executable, "-m", "strata", "run", "--serve", "demo", "--prompt", "x"]
    assert subprocess.run(line, capture_output=True).returncode == 2
