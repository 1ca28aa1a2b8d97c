"""`strata eval kv`: what is printed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_every_cache_of_the_demo(strata: Any) -> None:
    arguments = ["eval", "kv", "demo", "--tokens", "40", "--prompt", "16", "--ends", "10"]
    found = json.loads(strata(*arguments, "--json").out)
    caches = {one["dtype"]: one for one in found["caches"]}
    assert list(caches)[:4] == ["bf16", "f32", "int8t", "int8"]
    assert caches["bf16"]["all"]["kl_mean"] == 0 and caches["bf16"]["all"]["top1"] == 1
    assert 0 < caches["int8"]["last"]["kl_mean"] < 0.05
    assert caches["int8t"]["bytes_per_token"] < caches["int8"]["bytes_per_token"]
    assert found["written_tokens"] == 40 and found["text"]
    shown = strata(*arguments).out.splitlines()
    assert shown[0].startswith("demo: 40 tokens written over bf16 after 16 of prompt (seed 0), perplexity ")
    assert shown[2].split()[:4] == ["KV", "bytes/token", "ppl", "1-10"]
    assert [line.split()[0] for line in shown[3:-2]] == list(caches)
    assert len({len(line) for line in shown[2:-2]}) == 1


def test_the_first_and_the_last_tokens_are_not_the_same(strata: Any) -> None:
    shown = strata("eval", "kv", "demo", "--tokens", "12", "--prompt", "16").out.splitlines()
    assert shown[2].split()[2:6] == ["ppl", "1-6", "7-12", "all"]
    assert shown[-1] == "int8g128 and int8g64: the same as int8, because heads have 64 elements"


def test_a_text_longer_than_the_context_is_refused(strata: Any) -> None:
    done = strata("eval", "kv", "demo", "--tokens", 100_000)
    assert done.code == 2 and "64 tokens of prompt and 100000 to write, the context has" in done.err


@pytest.mark.parametrize("dtype", ["int8g32", "int8g64", "int8g128"])
def test_groups_are_a_setting_of_a_run(strata: Any, dtype: str) -> None:
    done = strata("run", "demo", "--temp", 0, "-n", 8, "--set", f"kv.dtype={dtype}", "--prompt", "Hello")
    assert done.out.strip()


def test_a_scale_per_tensor_is_no_setting_of_a_run(strata: Any) -> None:
    done = strata("run", "demo", "--set", "kv.dtype=int8t", "--prompt", "Hello")
    assert (
        done.code == 2
        and "int8t" in done.err
        and "is not one of: int8, int8g128, int8g64, int8g32, bf16, f32" in done.err
    )
