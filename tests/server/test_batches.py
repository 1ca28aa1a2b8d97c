"""An answer is the same alone and among others, and after any traffic nothing is left behind."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from typing import Any

import pytest
from server_harness import CHAT, TEXT, Harness, Reply, hello

COUNTRIES = (
    *("France", "Italy", "Spain", "Japan", "Peru", "Kenya", "Samoa", "Norway"),
    *("Egypt", "Chile", "Cuba", "Iran", "Iraq", "Mali", "Oman", "Togo"),
)


def question(country: str, **changes: Any) -> dict[str, Any]:
    content = f"What is the capital of {country}?"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0, **changes}


def test_the_same_alone_and_in_any_batch(demo: Harness) -> None:
    """Greedy and seeded, streamed or not, whoever runs beside.

    What makes it so: a token's row is computed from its own sequence only, in an order of sums that does not
    depend on how many rows a batch has or how a prompt was cut; every request draws from a generator of its
    own. So not only the texts are equal but the log-probabilities to the last bit.
    """
    seeded = {"temperature": 1.0, "seed": 5, "top_k": 0, "top_p": 1, "min_p": 0}
    bodies = [
        question(country, logprobs=True, **(seeded if i % 2 else {})) for i, country in enumerate(COUNTRIES)
    ]
    alone = [demo.post(CHAT, body).json["choices"] for body in bodies]
    for order in range(2):
        mixed = list(enumerate(bodies))
        random.Random(order).shuffle(mixed)
        running = [(index, demo.begin("POST", CHAT, body)) for index, body in mixed]
        for index, reply in running:
            assert reply.result(60).json["choices"] == alone[index]


def test_many_clients_that_behave_badly(demo: Harness) -> None:
    """Sixteen at a time: answers, streams, departures, bad bodies, over-long prompts. No 5xx, no leak."""
    random_ = random.Random(1)
    expected = {c: demo.post(CHAT, question(c)).json["choices"][0]["message"]["content"] for c in COUNTRIES}
    running: list[tuple[str, Future[Reply]]] = []
    end, done = time.monotonic() + 2.5, 0
    while running or time.monotonic() < end:
        while len(running) < 16 and time.monotonic() < end:
            running.append(_misbehave(demo, random_))
        country, reply = running.pop(random_.randrange(len(running)))
        got = reply.result(60)
        assert got.status < 500, got.body
        if country:
            assert _text(got) == expected[country]
        done += 1
    assert done > 50
    demo.idle()
    figures = demo.get("/metrics").body.decode()
    assert "strata_requests_running 0.0" in figures and "strata_kv_pages_used 0.0" in figures


def _misbehave(demo: Harness, random_: random.Random) -> tuple[str, Future[Reply]]:
    """A request, and the country whose capital it must name, or ""."""
    country = random_.choice(COUNTRIES)
    kind = random_.randrange(8)
    if kind < 3:
        return country, demo.begin("POST", CHAT, question(country, stream=bool(kind), n=1))
    if kind == 3:
        return "", demo.begin(
            "POST", CHAT, question(country, stream=True, n=2), leave_after=random_.randrange(9)
        )
    if kind == 4:
        return "", demo.begin("POST", TEXT, {"prompt": "x " * random_.choice((1000, 5000)), "max_tokens": 5})
    if kind == 5:
        return "", demo.begin("POST", TEXT, random_.choice((b"{", b"", b'{"prompt":""}', b'{"prompt":[]}')))
    if kind == 6:
        return "", demo.begin("POST", CHAT, hello(max_tokens=500, ignore_eos=True), leave_after=0)
    return "", demo.begin("POST", TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "stop": ["e", " t"]})


def _text(reply: Reply) -> str:
    if "event-stream" not in reply.headers["content-type"]:
        return str(reply.json["choices"][0]["message"]["content"])
    return "".join(event["choices"][0]["delta"].get("content", "") for event in reply.events)


@pytest.mark.parametrize("n", [1, 4])
def test_short_prompts_do_not_wait_for_a_long_answer(demo: Harness, n: int) -> None:
    """Continuous batching: a request joins in the middle of another's answer and ends before it."""
    long = demo.begin("POST", CHAT, hello(max_tokens=400, ignore_eos=True))
    demo.wait_for(lambda: demo.thread.running == 1)
    assert demo.post(CHAT, question("France", n=n)).status == 200
    assert not long.done()
    assert long.result(60).json["usage"]["completion_tokens"] == 400
