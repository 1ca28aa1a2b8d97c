"""Health, metrics, the API's own description, keys, hosts, origins."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from server_harness import CHAT, TEXT, Harness, Script, Serve, hello, load

from strata.interfaces.server import replies
from strata.interfaces.server.gate import is_this_machine
from strata.interfaces.server.worker import State


def status(server: Harness) -> tuple[int, str]:
    reply = server.get("/health")
    replies.Health.model_validate(reply.json)
    return reply.status, reply.json["status"]


def test_the_model_has_the_names_that_people_know(serve: Serve) -> None:
    """Its own, the alias, and what it was started by; the card says how answers call it."""
    server = serve(model_name="alias")
    assert server.thread.model is not None
    for name in ("alias", server.thread.model.name):
        assert server.get(f"/v1/models/{name}").json["id"] == "alias"
    for name in ("other", "", "alias/", "../alias"):
        assert server.get(f"/v1/models/{name}").status == 404
    named = replace(server.service.config, model=replace(server.service.config.model, path="stores/short"))
    server.service.config = named
    assert server.get("/v1/models/short").json["id"] == "alias"
    assert server.get("/v1/models/stores/short").status == 404


def test_loading(tiny_store: Any) -> None:
    """503 with Retry-After until the model is there; /health says how far it is (case-37)."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Any:
        begun.set()
        go_on.wait(20)
        return load(tiny_store)

    server = Harness(slowly, wait=False)
    begun.wait(20)
    server.thread._report("importing the model", 0.25)
    try:
        assert status(server) == (503, "loading")
        assert server.get("/health").json["loading"] == {"stage": "importing the model", "done": 0.25}
        for reply in (
            server.post(CHAT, hello()),
            server.get("/v1/models"),
            server.post("/tokenize", {"content": "x"}),
        ):
            assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
            assert reply.error["code"] == "loading"
        assert "strata_ready 0.0" in server.get("/metrics").body.decode()
    finally:
        go_on.set()
    server.wait_for(lambda: server.thread.state is State.READY)
    assert status(server) == (200, "ok") and server.engine.metrics.steps > 0  # warmed up
    assert server.post(CHAT, hello()).status == 200
    server.close()


def test_a_model_that_cannot_be_loaded() -> None:
    def fail() -> Any:
        raise OSError("no such file")

    server = Harness(fail)
    assert status(server) == (503, "dead")
    assert server.post(CHAT, hello()).status == 503
    server.close()


def test_degraded_when_no_token_comes(serve: Serve) -> None:
    server = serve(stall_seconds=1)
    hold = threading.Event()
    run = server.engine.executor.run
    server.engine.executor.run = lambda works: (hold.wait(20), run(works))[1]  # type: ignore[method-assign]
    running = server.begin("POST", CHAT, hello())
    assert status(server) == (200, "ok")
    server.wait_for(lambda: status(server) == (503, "degraded"), 5)
    assert server.get("/health").json["seconds_since_progress"] > 1
    hold.set()
    assert running.result(10).status == 200
    assert status(server) == (200, "ok")  # with nothing to do it may be silent


def test_draining(serve: Serve) -> None:
    server = serve()
    assert server.thread.model is not None
    script = Script(server.thread.model)
    script.say("z" * 20)
    script.delay = 0.05
    running = server.begin("POST", CHAT, hello(max_tokens=50, stream=True))
    server.wait_for(lambda: server.thread.running == 1)
    server.service.draining = True
    assert status(server) == (503, "draining")
    reply = server.post(CHAT, hello())
    assert reply.status == 503 and reply.error["code"] == "shutting_down" and "retry-after" in reply.headers
    assert running.result(10).events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_what_was_admitted_is_answered_when_draining_begins(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes between the start of the request and the first byte of its answer."""
    server = serve()
    start = server.service.call

    def start_and_drain(*arguments: Any) -> Any:
        call = start(*arguments)
        server.service.draining = True
        return call

    monkeypatch.setattr(server.service, "call", start_and_drain)
    body = hello(max_tokens=3) if path == CHAT else {"prompt": "hello", "max_tokens": 3}
    assert server.post(path, {**body, "stream": True}).events[-1]["choices"][0]["finish_reason"]
    assert server.post(path, body).error["code"] == "shutting_down"


@pytest.mark.parametrize("stream", [False, True])
def test_what_still_runs_when_the_engine_is_stopped(serve: Serve, stream: bool) -> None:
    """It ends with an error that says so, not with a cut connection."""
    server = serve()
    assert server.thread.model is not None
    script = Script(server.thread.model)
    script.say("z" * 200)
    script.delay = 0.02
    running = server.begin("POST", CHAT, hello(max_tokens=200, stream=stream))
    server.wait_for(lambda: server.thread.running == 1)
    server.thread.stop()
    reply = running.result(10)
    error = reply.events[-1]["error"] if stream else reply.error
    assert error["code"] == "shutting_down" and (stream or reply.status == 503)


def test_metrics(tiny: Harness) -> None:
    tiny.post(CHAT, hello(stream=True, ignore_eos=True))
    tiny.post(CHAT, hello(temperature="x"))
    lines = dict(
        line.rsplit(" ", 1) for line in tiny.get("/metrics").body.decode().splitlines() if line[0] != "#"
    )
    figures = {name: float(value) for name, value in lines.items()}
    assert figures['strata_requests_total{path="/v1/chat/completions",status="200"}'] == 1
    assert figures['strata_requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert figures['strata_answers_total{outcome="ok"}'] == 1
    assert figures["strata_completion_tokens_total"] == 6
    assert figures["strata_time_to_first_token_seconds_count"] == 1
    assert figures["strata_inter_token_seconds_count"] == 5
    assert figures["strata_kv_pages_total"] == tiny.engine.pages.total
    assert figures["strata_kv_pages_used"] == figures["strata_requests_running"] == 0
    assert figures["strata_requests_waiting"] == 0 and figures["strata_ready"] == 1
    assert figures["strata_steps_total"] == tiny.engine.metrics.steps
    assert figures["strata_logits_read_bytes_total"] == tiny.engine.executor.logit_bytes > 0
    assert figures["strata_decode_tokens_total"] == 5
    uses = [figures[f'strata_expert_uses_total{{layer="{layer}"}}'] for layer in range(2)]
    assert all(tiny.engine.metrics.steps <= count <= 4 * tiny.engine.metrics.steps for count in uses)
    read = figures['strata_expert_read_bytes_total{layer="1"}']
    assert read == uses[1] * tiny.engine.decoder.expert_bytes[1]
    pages = tiny.engine.pages.total * tiny.engine.kv.page_bytes
    assert figures['strata_region_total_bytes{region="KV pages",tier="host"}'] == pages
    assert figures["strata_preemptions_total"] == 0


def test_metrics_of_an_expert_cache(tiny_store: Any) -> None:
    """With a device: how experts were answered, what the split decided, the levels of both tiers."""
    server = Harness(lambda: load(tiny_store, device_use="emulated"), warm_up=False)
    server.post(CHAT, hello(ignore_eos=True))
    server.idle()
    lines = [line for line in server.get("/metrics").body.decode().splitlines() if line[0] != "#"]
    figures = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    flow = server.engine.decoder.backend.metrics.experts  # type: ignore[attr-defined]
    for answer, count in (("hit", flow.hits), ("fetched", flow.fetched), ("computed", flow.computed)):
        assert figures[f'strata_experts_total{{answer="{answer}"}}'] == count
    assert flow.hits + flow.fetched + flow.streamed + flow.computed > 0
    for name in ("strata_miss_split_total", "strata_prefetch_total", "strata_expert_cache_hits_total"):
        assert any(line.startswith(name) for line in lines), name
    tiers = {line.rsplit(" ", 1)[0] for line in lines if line.startswith("strata_region_used_bytes")}
    assert any('tier="device"' in name for name in tiers) and any('tier="host"' in name for name in tiers)
    server.close()


def test_the_description_is_true(tiny: Harness) -> None:
    """Every route, every field of every body, and 422 nowhere: what is wrong is 400 here."""
    document = tiny.get("/openapi.json").json
    assert set(document["paths"]) == {
        *(CHAT, TEXT, "/tokenize", "/detokenize"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/stats"),
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], path
            assert operation["responses"]["200"]["content"], path
    body = document["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["messages"] and "top_logprobs" in body["properties"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic one"}])
def test_keys(serve: Serve, headers: dict[str, str]) -> None:
    server = serve(keys=("one", "two"))
    for reply in (
        server.post(CHAT, hello(), headers=headers),
        server.get("/v1/models", headers=headers),
        server.get("/metrics", headers=headers),
        server.get("/openapi.json", headers=headers),
        server.post("/tokenize", b"[", headers=headers),
    ):
        assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
    assert status(server) == (200, "ok")
    for good in ({"authorization": "Bearer two"}, {"authorization": "bearer one"}, {"x-api-key": "one"}):
        assert server.post(CHAT, hello(), headers=good).status == 200
    assert "wrong" not in server.log.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io"]
)
def test_a_web_page_cannot_name_itself_like_this_machine(tiny: Harness, serve: Serve, host: str) -> None:
    """DNS rebinding: the page's own name points to 127.0.0.1, but the browser still sends that name."""
    reply = tiny.post(CHAT, hello(), headers={"host": host})
    assert reply.status == 403 and reply.error["code"] == "host_not_allowed"
    assert serve(host="0.0.0.0").post(CHAT, hello(), headers={"host": host}).status == 200


def test_names_of_this_machine() -> None:
    for host in (
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.0.0.1:8080",
        "[::1]:80",
        "[::1]",
        "a.localhost",
    ):
        assert is_this_machine(host), host
    for host in ("example.org", "localhost.example", "[example]", "1.2.3.4.example:80"):
        assert not is_this_machine(host), host


def test_origins(serve: Serve) -> None:
    """Off unless asked for."""
    origin = {"origin": "https://chat.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    closed, opened = serve(), serve(cors=("https://chat.example",), keys=("k",))
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers=origin).headers
    assert closed.request("OPTIONS", CHAT, b"", headers=preflight).status == 405
    reply = opened.request("OPTIONS", CHAT, b"", headers=preflight)
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://chat.example"
    other = opened.request("OPTIONS", CHAT, b"", headers={**preflight, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
