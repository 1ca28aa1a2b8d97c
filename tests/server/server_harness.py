"""A server without sockets: the ASGI application, an event loop and a real engine in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strata.config import Config, Override, load_config
from strata.core import Request, SamplingParams
from strata.engine.engine import Engine
from strata.engine.sampler import Sampler
from strata.interfaces.models import LoadedModel, open_model
from strata.interfaces.server.app import build_app
from strata.interfaces.server.log import RequestLog
from strata.interfaces.server.service import Service
from strata.interfaces.server.warm_up import warm_up_seconds
from strata.interfaces.server.worker import EngineThread, State

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = SamplingParams(temperature=0.0)


def load(path: Path, **options: Any) -> LoadedModel:
    """The model of a store, with room for four contexts. options: the configuration's, _ for the dot."""
    settings = {
        "backend_threads": 1,
        "engine_requests": 4,
        "model_path": path,
        "device_use": "none",
        **options,
    }
    named = [(name.replace("_", ".", 1), str(value)) for name, value in settings.items()]
    return open_model(load_config(None, [Override(name, value, "test") for name, value in named]))


def hello(**changes: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, **changes}


@dataclass
class Reply:
    """What a client got. left: it closed the connection before the end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose shape must be OpenAI's."""
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in self.json["error"]["message"] and self.json["error"]["message"]
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        """The stream's events; the last must be [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
        assert lines[-1] == "data: [DONE]", lines[-1:]
        return [json.loads(line[6:]) for line in lines[:-1]]


class _Connection:
    """One request's receive and send. leave_after: pieces of the answer until the client leaves."""

    def __init__(self, body: bytes, leave_after: int | None) -> None:
        self.reply = Reply()
        self._body = body
        self._asked = False
        self._leave_after = leave_after
        self._left = asyncio.Event()
        if leave_after == 0:
            self._left.set()

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        if message.get("body"):
            self.reply.pieces.append(message["body"])
            self.reply.times.append(time.perf_counter())
        self.reply.complete = not message.get("more_body", False)
        if self._leave_after is not None and len(self.reply.pieces) >= self._leave_after:
            self._left.set()


class Harness:
    """Runs until `close`, which checks that nothing is left of any request."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        *,
        keys: tuple[str, ...] = (),
        wait: bool = True,
        sampling: SamplingParams = GREEDY,
        **server: Any,
    ) -> None:
        config = Config(sampling=sampling)
        config = replace(config, server=replace(config.server, **server))
        self.loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._loop_thread.start()
        self.thread = EngineThread(
            lambda report: load(),
            self.loop.call_soon_threadsafe,
            warm_up_seconds=warm_up_seconds(config.server),
        )
        self.log = _Lines()
        self.service = Service(config, self.thread)
        self.app = build_app(self.service, keys=keys, log=RequestLog(as_json=True, stream=self.log))
        self.thread.start()
        if wait:
            self.wait_for(lambda: self.thread.state is not State.LOADING)

    @property
    def engine(self) -> Engine:
        assert self.thread.engine is not None
        return self.thread.engine

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return self.request("POST", path, body, **options)

    def get(self, path: str, **options: Any) -> Reply:
        return self.request("GET", path, b"", **options)

    def request(self, method: str, path: str, body: Any, **options: Any) -> Reply:
        return self.begin(method, path, body, **options).result(60)

    def begin(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
        leave_after: int | None = None,
    ) -> Future[Reply]:
        """Start a request; its reply comes later."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 8080),
        }
        return self.run(self._call(scope, raw, leave_after))

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _call(self, scope: dict[str, Any], body: bytes, leave_after: int | None) -> Reply:
        connection = _Connection(body, leave_after)
        await self.app(scope, connection.receive, connection.send)
        return connection.reply

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.002)

    def idle(self) -> None:
        """Wait until no request is left, then look whether they left anything behind."""
        self.wait_for(lambda: not (self.thread.open or self.thread._orders or self.engine.busy))
        self.engine.check_integrity()
        assert not self.thread._jobs

    def close(self) -> None:
        try:
            if self.thread.state is State.READY:
                self.idle()
        finally:
            self.thread.stop()
            assert self.thread.join(10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._loop_thread.join(10)
            self.loop.close()


class _Lines:
    """A stream that keeps its lines."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


class Script:
    """Makes an engine answer what a test says: a text (every byte is a token), or token ids."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.texts: dict[str, str] = {}
        self.delay = 0.0
        self._add = model.engine.add
        model.engine.add = self._scripted  # type: ignore[method-assign]

    def say(self, text: str, to: str = "") -> None:
        """The answer to prompts that contain `to`; the last that fits counts."""
        self.texts[to] = text

    def stop(self) -> None:
        self.model.engine.add = self._add  # type: ignore[method-assign]

    def _scripted(self, request: Request, sampler: Sampler | None = None) -> None:
        prompt = self.model.tokenizer.decode(request.prompt, skip_special=False)
        for to, text in reversed(self.texts.items()):
            if to in prompt:
                sampler = _ScriptSampler(self, request, text)
                break
        self._add(request, sampler)


class _ScriptSampler(Sampler):
    """What the request's constraint does not allow becomes the first id that it does."""

    def __init__(self, script: Script, request: Request, text: str) -> None:
        super().__init__(request.sampling, 0, constraint=request.constraint)
        tokenizer = script.model.tokenizer
        self._script = script
        self._tokens = tokenizer.encode(text, special=True)
        self._end = min(tokenizer.stop_ids)
        self._start = len(request.prompt)

    def sample(self, logits: Any, tokens: Any) -> int:
        if self._script.delay:
            time.sleep(self._script.delay)
        place = len(tokens) - self._start
        wanted = self._tokens[place] if place < len(self._tokens) else self._end
        if self.constraint is None:
            return wanted
        allowed = self.constraint.allowed(list(tokens[self._start :]))
        return wanted if allowed[wanted] else int(allowed.argmax())


Serve = Callable[..., Harness]
