"""Sampling from the best logits alone: the token that the whole row would have given, or the whole row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_figures import ROUND as FIGURES
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.backends.cpu import CpuBackend
from strata.backends.hybrid.arrays import Matrix
from strata.backends.hybrid.host_kernels import HostKernels
from strata.core import Request, SamplingParams
from strata.engine.best_rows import BestRow
from strata.engine.engine import Engine
from strata.engine.logit_reader import Need, Needs
from strata.engine.sampler import Sampler, top_k
from strata.interfaces.dry_launching import count
from strata.memory.regions import Arena

VALID = 50
DEMO = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
GREEDY = SamplingParams(temperature=0.0)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Few different values, so that many are equal, zeros of both signs, impossible ones."""
    values = [-np.inf, -2.0, -0.0, 0.0, 1.0, 1.5, 3.0]
    found = np.array(
        draw(st.lists(st.sampled_from(values), min_size=VALID + 6, max_size=VALID + 6)), np.float32
    )
    found[draw(st.integers(0, VALID - 1))] = 2.5
    return found


@settings(deadline=None)
@given(rows(), st.integers(1, 20), st.floats(0.1, 1.0), st.floats(0.0, 0.5), st.booleans(), st.integers(0, 9))
def test_the_same_token(row: np.ndarray, k: int, p: float, least: float, greedy: bool, banned: int) -> None:
    params = SamplingParams(0.0 if greedy else 0.7, k, p, least, seed=5)
    whole, part = (Sampler(params, VALID, range(banned)) for _ in range(2))
    if not np.isfinite(row[banned:VALID].max()):
        return
    needed = part.enough
    assert needed == (1 if greedy else k) + banned
    best = top_k(row[:VALID], needed)
    found = part.sample(BestRow(best.logits.astype(np.float32), best.ids.astype(np.int32)), [])
    assert found == whole.sample(row, [])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=0),
        SamplingParams(top_k=VALID),
        SamplingParams(0.0, repeat_penalty=1.1),
        SamplingParams(0.0, frequency_penalty=0.5),
        SamplingParams(0.0, presence_penalty=0.5),
    ],
)
def test_who_needs_all_logits(params: SamplingParams) -> None:
    assert Sampler(params, VALID).enough is None


@pytest.mark.parametrize(("k", "banned"), [(VALID - 1, 1), (VALID - 3, 3), (1, VALID - 1)])
def test_no_more_are_wanted_than_there_are(k: int, banned: int) -> None:
    """Ids that are banned come on top of what is wanted; all requests of the step would fail."""
    assert Sampler(SamplingParams(top_k=k), VALID, range(banned)).enough is None
    assert Sampler(SamplingParams(top_k=k), VALID, range(banned - 1)).enough == VALID - 1


def test_bias_and_constraint_need_all_logits() -> None:
    assert Sampler(GREEDY, VALID, bias={3: 1.0}).enough is None
    constraint: Any = object()
    assert Sampler(GREEDY, VALID, constraint=constraint).enough is None
    assert Sampler(GREEDY, VALID).enough == 1


class Recording:
    """Puts a note of what was asked before a backend that knows no more than to answer with all logits."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Needs | None] = []
        run = engine.executor.run

        def noted(works: Any) -> Any:
            self.asked.append(engine.executor.needs)
            return run(works)

        monkeypatch.setattr(engine.executor, "run", noted)


def test_only_the_request_with_logprobs_needs_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.config import load_config
    from strata.interfaces.models import open_model

    model = open_model(load_config(DEMO, []))
    recording = Recording(model.engine, monkeypatch)
    prompt = model.encode_text("hello")
    for number, logprobs in enumerate((None, 2)):
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        model.engine.add(Request(str(number), prompt, sampling, logprobs=logprobs))
    while model.engine.busy:
        model.engine.step()
    columns = model.tokenizer.vocab_size
    assert recording.asked == [Needs(columns, [Need(1), Need()])] * 2


def test_few_bytes_are_read_back() -> None:
    """One logit and one id per row and step, where all logits would be 4 bytes x vocabulary."""
    from strata.config import load_config

    (_, found), *_ = count(load_config(DEMO, []), [2])
    assert found.calls.copied["d2h"] / found.steps < 40_000
    waits = {what: found.per_step(n) for what, n in found.calls.read_backs.items()}
    assert waits == {"routes": 6.0, "best logits": 1.0}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_seen(bad: float) -> None:
    """It counts as the largest f32, so that whoever asked reads all logits and finds it."""
    from strata.device.emulated import EmulatedDevice

    device = EmulatedDevice(FIGURES)
    stream = device.stream("s")
    pinned = device.host_alloc(4096, "pinned")
    logits = Matrix(device.alloc(4 * 2 * 20, "logits"), 2, 20)
    values, ids = (Matrix(device.alloc(4 * 2 * 3, "best"), 2, 3) for _ in range(2))
    rows = np.zeros((2, 20), np.float32)
    rows[1, 7], rows[0, 4] = bad, 1.0
    device.host_write(pinned.slice(0, rows.nbytes))[:] = rows.reshape(-1).view(np.uint8)
    device.copy(logits.buffer, pinned.slice(0, rows.nbytes), stream)
    kernels, arena = HostKernels(CpuBackend(threads=1)), Arena("scratch", None, "")
    for launch in kernels.head_topk(logits, 18, values, ids, arena):
        device.launch(launch, stream)
    back = [pinned.slice(at, values.buffer.nbytes) for at in (1024, 2048)]
    for target, source in zip(back, (values, ids), strict=True):
        device.copy(target, source.buffer, stream)
    device.sync()
    best, found = device.host_read(back[0]).view(np.float32), device.host_read(back[1]).view(np.int32)
    assert found.tolist() == [4, 0, 1, 7, 0, 1] and best[0] == 1.0 and best[3] >= np.finfo(np.float32).max
    device.close()
