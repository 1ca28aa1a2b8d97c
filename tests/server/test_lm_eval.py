"""lm-eval against the service: its requests as they are, and the program itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_harness import TEXT, Harness
from test_process import Server

from strata.interfaces.bundled import model_path
from strata.interfaces.tokenizer import Tokenizer

TASK = Path(__file__).parent / "lm_eval_task"
DOCUMENTS = [json.loads(line) for line in (TASK / "capitals.jsonl").read_text().splitlines()]


def context(document: dict[str, Any]) -> str:
    """As capitals.yaml's doc_to_text writes it."""
    country = document["country"]
    question = f"What is the capital of {country}?"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nThe capital of {country} is"


def body(prompts: list[list[int]]) -> dict[str, Any]:
    """What lm-eval 0.4.13's local-completions sends to score continuations."""
    fixed = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": "strata-demo", "prompt": prompts, **fixed}


def scored(choice: dict[str, Any], length: int) -> tuple[float, bool]:
    """As lm-eval reads an answer: the continuation's log-probability, and whether each token was the best."""
    values = choice["logprobs"]["token_logprobs"][length:-1]
    tops = choice["logprobs"]["top_logprobs"][length:-1]
    greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), greedy


def test_the_task_by_its_requests(demo: Harness) -> None:
    """The right capital is the least surprising one, and what greedy decoding would write."""
    tokenizer = Tokenizer.load(model_path("demo"))
    for document in DOCUMENTS[:6]:
        start = tokenizer.encode(context(document), special=True)
        prompts = [
            tokenizer.encode(f"{context(document)} {choice}", special=True) for choice in document["choices"]
        ]
        assert all(prompt[: len(start)] == start for prompt in prompts)
        reply = demo.post(TEXT, body(prompts))
        assert reply.status == 200, reply.body
        choices = sorted(reply.json["choices"], key=lambda choice: choice["index"])
        found = [scored(choice, len(start)) for choice in choices]
        best = max(range(len(found)), key=lambda index: found[index][0])
        assert best == document["answer"] and found[best][1]
        assert not any(greedy for index, (_, greedy) in enumerate(found) if index != best)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs: pip install 'lm-eval[api]'")
def test_the_program_itself(tmp_path: Path) -> None:
    """600 MB with what it needs, so that the `test` extra is without it."""
    server = Server("demo")
    try:
        url = server.url + TEXT
        arguments = f"model=strata-demo,base_url={url},tokenizer={model_path('demo')},max_length=2048"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "strata_capitals", "--include_path", ".", "--output_path", str(tmp_path)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        subprocess.run(command, cwd=TASK, env={**os.environ, **offline}, check=True, timeout=280)
    finally:
        server.process.kill()
        server.process.wait()
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())["results"]
    assert results["strata_capitals"]["acc,none"] == 1.0
