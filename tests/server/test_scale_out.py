"""Several replicas: prefixes and lost answers without Ray; the whole on a local cluster where Ray is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hangs import SECONDS
from hypothesis import given
from hypothesis import strategies as st

from strata.config import Override, load_config
from strata.errors import UsageError
from strata.interfaces.ray_serve.answer import one_answer
from strata.interfaces.ray_serve.local import Head, LocalServer, Wire
from strata.interfaces.ray_serve.prefix import PrefixIndex, prefix_keys
from strata.interfaces.ray_serve.resume import ResumedEvents, with_seed
from strata.interfaces.server.errors import ApiError

CHAT = "/v1/chat/completions"


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"messages": messages, **more}).encode()


def test_prompts_that_begin_alike_have_their_first_keys_in_common() -> None:
    start = "a" * 2000
    one, other = prefix_keys(chat(start, "b" * 600)), prefix_keys(chat(start, "c" * 600))
    shared = sum(a == b for a, b in zip(one, other, strict=True))
    assert 6 < shared < len(one) and one[:shared] == other[:shared]
    assert prefix_keys(chat(start, temperature=0)) == prefix_keys(chat(start, temperature=1))
    assert prefix_keys(chat(start, tools=[{"x": "y" * 300}]))[:1] != prefix_keys(chat(start))[:1]
    for nothing in (b"", b"[", b"[]", b"{}", b'{"messages": 5}', b"[" * 100_000, chat("short")):
        assert prefix_keys(nothing) == ()
    assert len(prefix_keys(chat("x" * 1_000_000))) == 256


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6), st.sampled_from("abc")), max_size=30),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_the_index_against_a_list_of_everything(sent: list[tuple[list[int], str]], asked: list[int]) -> None:
    """Keys are chains: a key stands for all before it."""

    def chain(values: list[int]) -> list[int]:
        return [hash(tuple(values[: end + 1])) for end in range(len(values))]

    index = PrefixIndex()
    for values, replica in sent:
        index.record(chain(values), replica)
    index.forget("c")

    def common(values: list[int]) -> int:
        pairs = zip(values, asked, strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(values), len(asked)))

    expected: dict[str, int] = {}
    for values, replica in sent:
        if replica != "c" and common(values):
            expected[replica] = max(expected.get(replica, 0), common(values))
    assert index.matches(chain(asked)) == expected


def test_the_index_forgets_what_was_not_asked_for_longest() -> None:
    index = PrefixIndex(most=3)
    index.record([1, 2], "a")
    index.record([3], "a")
    index.record([1], "b")
    index.record([4], "b")
    assert len(index) == 3 and set(index.matches([1])) == {"a", "b"} and not index.matches([2])


def test_a_seed_for_who_brings_none() -> None:
    draw = random.Random(1)
    assert json.loads(with_seed(chat("x"), draw))["seed"] >= 0
    assert with_seed(chat("x", seed=7), draw) == chat("x", seed=7)
    for odd in (b"", b"[1]", b"{", b"[" * 100_000):
        assert with_seed(odd, draw) == odd


def events(identity: str, count: int) -> bytes:
    parts = [f'data: {{"id":"{identity}","created":{len(identity)},"n":{n}}}\n\n' for n in range(count)]
    return "".join([": alive\n\n", *parts, "data: [DONE]\n\n"]).encode()


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=4),
    st.integers(0, 9),
    st.integers(1, 60),
)
def test_a_stream_over_several_attempts(cuts: list[tuple[int, int]], count: int, size: int) -> None:
    """Attempts end anywhere, also inside an event; the client gets every event once, of one answer."""
    resumed, got = ResumedEvents(), []
    for number, (length, piece) in enumerate([*cuts, (1 << 20, size)]):
        resumed.restart()
        data = events("x" * (number + 1), count)[:length]
        for start in range(0, len(data), piece):
            got += resumed.add(data[start : start + piece])
    lines = [event for event in got if not event.startswith(b":")]
    assert lines[-1] == b"data: [DONE]\n\n" and len(lines) == count + 1
    found = [json.loads(line[6:]) for line in lines[:-1]]
    assert [each["n"] for each in found] == list(range(count))
    assert len({(each["id"], each["created"]) for each in found}) <= 1


def test_an_app_that_breaks_is_no_end_of_an_answer(tiny_store: Path) -> None:
    settings = {"model.path": str(tiny_store), "backend.threads": "1", "server.warm_up": "false"}
    config = load_config(None, [Override(name, value, "test") for name, value in settings.items()])
    server = LocalServer(config)

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("broken")

    async def ask() -> list[Any]:
        return [piece async for piece in server.answer(Wire("POST", CHAT, b"", {}))]

    server._app = broken  # type: ignore[assignment]
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(ask())
    server.close()


def test_a_server_without_sockets(tiny_store: Path) -> None:
    """Whole, streamed and left early; healthy until its engine is gone."""
    settings = {"model.path": str(tiny_store), "backend.threads": "1", "server.warm_up": "false"}
    config = load_config(None, [Override(name, value, "test") for name, value in settings.items()])
    server = LocalServer(config)

    async def ask(body: bytes, stop_after: int = 1 << 20) -> list[Any]:
        headers = {"content-type": "application/json", "host": "localhost"}
        pieces: AsyncIterator[Any] = server.answer(Wire("POST", CHAT, body, headers))
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            got = []
            async for piece in pieces:
                got.append(piece)
                if len(got) == stop_after:
                    break
            return got

    head, *body = asyncio.run(ask(chat("Hi", max_tokens=3)))
    assert isinstance(head, Head) and head.status == 200 and json.loads(b"".join(body))["choices"]
    head, *body = asyncio.run(ask(chat("Hi", max_tokens=3, stream=True)))
    assert b"".join(body).endswith(b"data: [DONE]\n\n")
    assert asyncio.run(ask(b"{"))[0].status == 400
    over, tell = threading.Event(), server._thread._tell

    def told(news: Any) -> None:
        tell(news)
        if not server.running:
            over.set()

    server._thread._tell = told  # type: ignore[method-assign]
    asyncio.run(ask(chat("Hi", max_tokens=200, stream=True, ignore_eos=True), stop_after=3))
    assert over.wait(SECONDS) and server.running == 0
    server.check()
    server.close()
    with pytest.raises(RuntimeError, match="not healthy"):
        server.check()


class LostError(Exception):
    """What a replica raises that is gone."""


def replicas(*lives: Any) -> Any:
    """Each attempt comes to the next life: pieces, and at its end what is raised, if that is an error."""
    left = iter(lives)

    async def ask() -> AsyncIterator[Head | bytes]:
        for piece in next(left):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    return ask


def answered(*lives: Any, resumes: bool = True) -> list[Any]:
    async def collect() -> list[Any]:
        pieces = one_answer(replicas(*lives), (LostError,), resumes=resumes, pause=0.0)
        return [piece async for piece in pieces]

    return asyncio.run(collect())


STREAM = Head(200, {"content-type": "text/event-stream; charset=utf-8"})
WHOLE, BUSY, LEAVING = Head(200, {}), Head(429, {}), Head(503, {})


def test_an_answer_from_as_many_replicas_as_it_takes() -> None:
    data, gone = events("a", 4), LostError()
    assert answered([STREAM, data]) == [STREAM, *answered([STREAM, data])[1:]]
    whole = b"".join(answered([STREAM, data])[1:])
    assert whole == data
    cut = [answered([gone], [STREAM, data[:50], gone], [STREAM, gone], [STREAM, data])]
    for pieces in cut:
        assert pieces[0] == STREAM and b"".join(pieces[1:]).replace(b": alive\n\n", b"") == data[9:]
    assert answered([WHOLE, b"half", gone], [WHOLE, b"all"]) == [WHOLE, b"all"]
    assert answered([BUSY, b"later"]) == [BUSY, b"later"]
    assert answered([LEAVING, b"x"], [WHOLE, b"all"]) == [WHOLE, b"all"]
    assert answered(*[[LEAVING, b"x"]] * 5) == [LEAVING, b"x"]
    with pytest.raises(ApiError, match="no replica"):
        answered(*[[gone]] * 5)
    unseeded = answered([gone], [STREAM, b"event: a\n", gone], [STREAM, b"event: a\n"], resumes=False)
    assert unseeded[:2] == [STREAM, b"event: a\n"] and unseeded[2].startswith(b"event: error\n")
    refused = answered([STREAM, data[:60], gone], *[[LEAVING, b"x"]] * 4)
    assert b"no_replica" in refused[-1] and refused[-1].endswith(b"data: [DONE]\n\n")


# With Ray

_LONGEST = 240.0
"""Seconds for an answer: a replica that takes another's place imports everything again."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("replicas", value) for value in ("0", "-1", "two", "1.5", "1_0", " 2", "\u0662", "9" * 5000, "")),
        *(("cpus", value) for value in ("nan", "inf", "1e3", "-1", "")),
        *(("front", "0"), ("slack", "-1"), ("most", "x"), ("replica", "2"), ("", "2")),
    ],
)
def test_arguments_that_are_none(name: str, value: str) -> None:
    pytest.importorskip("ray", reason="ray is missing: pip install 'strata-moe[ray]'")
    from strata.interfaces.ray_serve.deployment import Asked

    with pytest.raises(UsageError) as caught:
        Asked.parse({"model": "demo", name: value})
    assert len(str(caught.value)) < 200
    good = Asked.parse({"model": "demo", "replicas": "3", "cpus": "0.5", "slack": "0"})
    assert (good.replicas, good.cpus, good.slack, good.model) == (3, 0.5, 0, "demo")


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of two replicas of the demo model on a cluster of this machine."""
    ray = pytest.importorskip("ray", reason="ray is missing: pip install 'strata-moe[ray]'")
    serve = pytest.importorskip("ray.serve")
    from strata.interfaces.ray_serve import build

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers are processes of their own, which find the package where this one does.
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"model": "demo", "replicas": "2", "cpus": "1"}), name="strata")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _post(address: str, body: bytes) -> tuple[str, str]:
    """Text and id of an answer; of a stream, all of its events must be there."""
    request = urllib.request.Request(address + CHAT, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_LONGEST) as reply:
        data = reply.read()
    if not data.startswith(b"data:"):
        answer = json.loads(data)
        return answer["choices"][0]["message"]["content"], answer["id"]
    lines = [line for line in data.decode().split("\n\n") if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    found = [json.loads(line[6:]) for line in lines[:-1]]
    (identity,) = {each["id"] for each in found}
    return "".join(each["choices"][0]["delta"].get("content", "") for each in found), identity


@pytest.mark.slow
def test_a_replica_that_dies_under_load_loses_no_request(cluster: str) -> None:
    """Streams and whole answers go on elsewhere; every answer is the one that was given before."""
    address = cluster
    bodies = [
        chat(
            f"Tell me about country {n}. " + "Be brief. " * 40,
            max_tokens=60,
            ignore_eos=True,
            seed=n,
            stream=n % 2 == 0,
        )
        for n in range(6)
    ]
    alone = [_post(address, body)[0] for body in bodies]
    assert len(set(alone)) > 3
    enough, answered_one = threading.Event(), threading.Semaphore(0)

    def many(number: int) -> list[bool]:
        same = []
        while not enough.is_set() or len(same) < 6:
            same.append(_post(address, bodies[number % 6])[0] == alone[number % 6])
            answered_one.release()
        return same

    def as_many_answers() -> None:
        """As there are clients, counted from the last time: all of them are at it."""
        assert all(answered_one.acquire(timeout=_LONGEST) for _ in running)

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(many, number) for number in range(8)]
        try:
            as_many_answers()
            _kill_one_replica()
            as_many_answers()
        finally:
            enough.set()
        results = [each.result(_LONGEST) for each in running]
    assert all(all(same) for same in results) and sum(map(len, results)) >= 48


def _kill_one_replica() -> None:
    """Ray names its workers after their actors; only this cluster's, which descend from this process."""
    mine = psutil.Process().children(recursive=True)
    found = [each for each in mine if "ServeReplica:strata:replica" in " ".join(each.cmdline())]
    assert len(found) == 2, found
    found[0].kill()
