"""Engines over tiny random models, for the tests of what an engine does."""

from __future__ import annotations

import random
from dataclasses import replace

from tiny_model import VOCAB, TinyStore, gpt_oss_spec, mla_spec, moe_spec

from strata.backends.base import Backend
from strata.core import SamplingParams
from strata.engine.engine import Engine, EngineOptions
from strata.model.decoder import Decoder

SPECS = {"moe": moe_spec(), "gpt_oss": gpt_oss_spec(), "mla": mla_spec()}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def make_decoders(backend: Backend, fmt: str = "bf16") -> dict[str, Decoder]:
    return {name: Decoder(spec, TinyStore(spec, fmt=fmt), backend) for name, spec in SPECS.items()}


def make_engine(decoder: Decoder, **changes: object) -> Engine:
    options = EngineOptions(context=64, pages=40, valid_tokens=VOCAB, page_tokens=8, kv_dtype="f32", chunk=16)
    return Engine(decoder, replace(options, **changes))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)
