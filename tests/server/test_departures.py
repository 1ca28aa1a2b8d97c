"""Clients that leave (case-20), queues that are full, time that is up, engines that fail."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from server_harness import CHAT, TEXT, Harness, Script, Serve, hello

from strata.errors import NumericalError

DETAIL = "nobody's business"


def slow(server: Harness, delay: float = 0.02) -> Script:
    """Answers that go on until the context is full."""
    assert server.thread.model is not None
    script = Script(server.thread.model)
    script.say("z" * 1000)
    script.delay = delay
    return script


@pytest.mark.parametrize("stream", [False, True])
def test_a_departed_clients_request_ends(serve: Serve, stream: bool) -> None:
    """Within about one step; fifty times in a row; the next answer is right."""
    server = serve()
    expected = server.post(CHAT, hello()).json["choices"][0]["message"]["content"]
    script = slow(server, 0.01)
    for _ in range(50):
        reply = server.begin(
            "POST", CHAT, hello(stream=stream, max_tokens=4000), leave_after=3 if stream else 0
        )
        gone = reply.result(5)
        assert (gone.status, gone.complete) == (200, False) if stream else gone.status == 499
        left = time.monotonic()
        server.idle()
        assert time.monotonic() - left < 10  # its 4,000 tokens would take 40 s
    script.stop()
    assert server.post(CHAT, hello()).json["choices"][0]["message"]["content"] == expected
    assert server.log.lines[0]["status"] == 200
    assert {line["outcome"] for line in server.log.lines[1:-1]} == {"aborted"}
    assert 'strata_answers_total{outcome="aborted"} 50.0' in server.get("/metrics").body.decode()


def test_a_client_that_leaves_while_its_prompt_is_computed(serve: Serve) -> None:
    server = serve(model={"engine_prefill_chunk": 1})
    body = {"prompt": "p" * 250, "stream": True}
    assert not server.request("POST", TEXT, body, leave_after=0).complete
    server.idle()
    assert server.engine.metrics.total.prefill.tokens < 250


def test_all_choices_of_a_departed_client_end(serve: Serve) -> None:
    server = serve()
    slow(server)
    assert not server.request("POST", CHAT, hello(stream=True, n=4, max_tokens=100), leave_after=9).complete
    server.idle()


def test_a_full_queue(serve: Serve) -> None:
    """429 with Retry-After; those who wait are served, and then there is room again."""
    server = serve(model={"engine_requests": 1, "model_context": 64}, queue=2)
    script = slow(server)
    replies = [server.begin("POST", CHAT, hello(max_tokens=None)) for _ in range(8)]
    statuses = sorted(reply.result(60).status for reply in replies)
    refused = [reply.result() for reply in replies if reply.result().status == 429]
    assert statuses.count(200) in (3, 4) and len(refused) == 8 - statuses.count(200)
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1 and reply.error["code"] == "queue_full"
        assert reply.error["type"] == "rate_limit_error"
    script.stop()
    assert server.post(CHAT, hello()).status == 200


def test_one_request_of_many_answers_is_not_refused_for_its_size(serve: Serve) -> None:
    """An empty queue takes it whole, or nobody could ever ask for that many."""
    server = serve(queue=2)
    assert len(server.post(CHAT, hello(n=8)).json["choices"]) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_time_is_up(serve: Serve, stream: bool) -> None:
    server = serve(answer_seconds=1)
    slow(server, 0.1)
    reply = server.post(CHAT, hello(stream=stream, max_tokens=200))
    if stream:
        assert reply.status == 200 and reply.events[-1]["error"]["code"] == "timeout"
    else:
        assert reply.status == 504 and reply.error["code"] == "timeout"
    server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_request_fails_alone(serve: Serve, stream: bool) -> None:
    """NaN among its logits: 500, or an error event; its batch mates do not notice."""
    server = serve()
    mate = server.begin("POST", CHAT, hello(max_tokens=100, ignore_eos=True))
    server.wait_for(lambda: server.thread.running == 1)
    assert server.thread.model is not None
    script = Script(server.thread.model)
    script.say("bad")
    add = server.engine.add

    def poisoned(request: Any, sampler: Any = None) -> None:
        add(request, sampler)
        if len(request.prompt) > 40:
            sampler = server.engine._samplers[request.request_id]
            sampler.sample = lambda *_: (_ for _ in ()).throw(NumericalError("the best of 259 logits is nan"))

    server.engine.add = poisoned  # type: ignore[method-assign]
    body = {"messages": [{"role": "user", "content": "x" * 50}], "stream": stream}
    reply = server.post(CHAT, body)
    if stream:
        assert reply.status == 200 and "nan" in reply.events[-1]["error"]["message"]
    else:
        assert reply.status == 500 and "nan" in reply.error["message"]
    assert mate.result(20).json["usage"]["completion_tokens"] == 100
    server.engine.add = add  # type: ignore[method-assign]
    script.stop()
    assert server.post(CHAT, hello()).status == 200


def test_a_failing_batch_fails_its_requests_and_no_others(serve: Serve) -> None:
    server = serve()
    run, server.engine.executor.run = server.engine.executor.run, _raise  # type: ignore[method-assign]
    reply = server.post(CHAT, hello())
    assert reply.status == 500 and reply.error["message"] == "internal error"  # and nothing of where or why
    server.engine.executor.run = run  # type: ignore[method-assign]
    assert server.post(CHAT, hello()).status == 200


def _raise(*_: Any) -> np.ndarray:
    raise ValueError(DETAIL)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine(serve: Serve, stream: bool) -> None:
    """Running requests end with an error, /health turns red, and the process would end."""
    server = serve()
    slow(server)
    running = server.begin("POST", CHAT, hello(stream=stream, max_tokens=200))
    server.wait_for(lambda: server.thread.running == 1)
    server.engine.scheduler.schedule = _raise  # type: ignore[method-assign,assignment]
    reply = running.result(10)
    if stream:
        assert "error" in reply.events[-1]
    else:
        assert reply.status == 500 and reply.error
    assert server.get("/health").status == 503 and server.get("/health").json["status"] == "dead"
    assert isinstance(server.thread.failure, ValueError)
    late = server.post(CHAT, hello())
    assert late.status == 503 and late.error["code"] == "engine_stopped"


def test_a_fault_of_ours_shows_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    monkeypatch.setattr("strata.interfaces.server.chat.check_parameters", _raise)
    reply = server.post(CHAT, hello())
    assert reply.status == 500 and reply.error["message"] == "internal error"
    assert "ValueError" in server.log.text and "chat.py" in server.log.text
    assert DETAIL not in server.log.text
