"""What layers that predict further tokens compute, against modules of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import parity
import pytest
import small_models
import torch
from further_models import CASES, Expected, Reference, Stores, to_stores, with_head, with_head_in_gguf
from numpy.typing import NDArray

from strata.backends.base import Backend, KvSpec
from strata.backends.cpu import CpuBackend
from strata.backends.reference import ReferenceBackend
from strata.core import Batch, Sequence
from strata.errors import ConfigError
from strata.model.decoder import Decoder
from strata.model.further import FurtherLayer, Predicted, check_further
from strata.store.reader import Store

TOKENS = parity.tokens(small_models.VOCAB)
BOUNDS = {"reference": 1e-4, "cpu": 2e-4}


class Rows:
    """The layer over one text, its pages scattered."""

    def __init__(self, store: Store, backend: Backend) -> None:
        pages = -(-len(TOKENS) // parity.PAGE_TOKENS) + 1
        self.layer = FurtherLayer(store.spec, store, backend)
        self.cache = backend.kv_cache(KvSpec.of(store.spec, parity.PAGE_TOKENS, "f32"), pages)
        self.pages = np.arange(pages, dtype=np.int32)[::-1].copy()

    def read(self, start: int, hidden: NDArray[np.float32], tokens: list[int]) -> Predicted:
        """Rows from `start` on; hidden and logits of all of them, as numpy arrays."""
        rows = np.arange(len(tokens), dtype=np.int32)
        sequence = Sequence(0, len(tokens), start, self.pages)
        batch = Batch(np.array(tokens, np.int32), rows + np.int32(start), (sequence,), rows)
        found = self.layer.forward(batch, hidden, self.cache)
        assert found is not None
        return Predicted(*(self.layer.backend.to_numpy(each).copy() for each in found))


def backend_of(name: str) -> Backend:
    return ReferenceBackend() if name == "reference" else CpuBackend(threads=1, activations="f32")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stores]:
    """Stores of a case; "glm4_moe in GGUF" is one, too."""
    made: dict[str, Stores] = {}

    def make(case: str) -> Stores:
        if case not in made:
            folder = tmp_path_factory.mktemp("further")
            if case.endswith(" in GGUF"):
                with_head_in_gguf(case.removesuffix(" in GGUF"), folder / "m.gguf")
                made[case] = to_stores(folder / "m.gguf", folder, parity.EXACT)
            else:
                with_head(case, folder / "hf")
                made[case] = to_stores(folder / "hf", folder, parity.EXACT)
        return made[case]

    return make


@pytest.fixture(scope="module")
def expected() -> Callable[[str], Expected]:
    made: dict[str, Expected] = {}

    def make(case: str) -> Expected:
        if case not in made:
            made[case] = Reference(case.removesuffix(" in GGUF")).expected(TOKENS)
        return made[case]

    return make


@pytest.mark.parametrize("backend", BOUNDS)
@pytest.mark.parametrize("case", [*CASES, "glm4_moe in GGUF"])
def test_logits_of_every_row(
    case: str,
    backend: str,
    checkpoints: Callable[[str], Stores],
    expected: Callable[[str], Expected],
) -> None:
    """Two chunks of a prompt, then row after row, from the hidden states that transformers' model has."""
    wanted, rows = expected(case), Rows(checkpoints(case).further, backend_of(backend))
    start = 0
    for count in [9, parity.PROMPT - 9, *[1] * (parity.STEPS - 1)]:
        stop = start + count
        found = rows.read(start, wanted.hidden[start:stop], TOKENS[start + 1 : stop + 1])
        assert np.abs(found.logits - wanted.logits[start:stop]).max() < BOUNDS[backend] * 10
        assert np.abs(found.hidden - wanted.states[start:stop]).max() < BOUNDS[backend]
        start = stop
    # Tokens and hidden states must matter to the logits, or any layer would do.
    assert wanted.logits.std(axis=0).mean() > 0.3


@pytest.mark.parametrize("case", CASES)
def test_the_model_hands_out_its_hidden_states(
    case: str, checkpoints: Callable[[str], Stores], expected: Callable[[str], Expected]
) -> None:
    """After the final norm, of every row of a pass, in chunks as well."""
    wanted, store = expected(case).hidden, checkpoints(case).model
    for name, bound in BOUNDS.items():
        session = parity.Session(store, backend_of(name), len(TOKENS))
        session.feed(TOKENS[:4])
        assert session.decoder.hidden is None
        session.decoder.keeps_hidden = True
        session.feed(TOKENS[4:30])
        assert session.decoder.hidden is not None
        found = session.decoder.backend.to_numpy(session.decoder.hidden)
        assert np.abs(found - wanted[4:30]).max() < bound


@pytest.mark.parametrize("case", CASES)
def test_the_layer_goes_on_from_its_own_hidden_state(
    case: str, checkpoints: Callable[[str], Stores], expected: Callable[[str], Expected]
) -> None:
    """Further tokens of a draft: its normed output in the model's place, behind all rows before it."""
    wanted, rows = expected(case), Rows(checkpoints(case).further, backend_of("cpu"))
    last, guesses = len(TOKENS) - 1, [5, 77, 140]
    state = rows.read(0, wanted.hidden[:last], TOKENS[1:]).hidden[-1:]
    reference = Reference(case)
    hidden, tokens = torch.from_numpy(wanted.hidden[:last]), TOKENS[1:]
    for step, guess in enumerate(guesses):
        hidden = torch.cat([hidden, reference.apply(hidden, tokens)[-1:]])
        tokens = [*tokens, guess]
        found = rows.read(last + step, state, [guess])
        logits = reference.apply(hidden, tokens)[-1:] @ reference.head.T
        assert np.abs(found.logits - logits.detach().numpy()).max() < 1e-3
        state = found.hidden


def test_embedding_and_head_of_the_model(tmp_path: Path) -> None:
    """Where the layer has none of its own."""
    with_head("glm4_moe", tmp_path / "hf", own=False)
    stores = to_stores(tmp_path / "hf", tmp_path, parity.EXACT)
    wanted = Reference("glm4_moe", own=False).expected(TOKENS)
    found = Rows(stores.further, backend_of("cpu")).read(0, wanted.hidden[:-1], TOKENS[1:])
    assert np.abs(found.logits - wanted.logits).max() < 1e-3


def test_a_layer_of_another_model_is_refused(checkpoints: Callable[[str], Stores]) -> None:
    model, further = checkpoints("glm4_moe")
    check_further(further.spec, model.spec)
    check_further(further.spec, checkpoints("glm4_moe in GGUF").model.spec)
    others = (
        ({"hidden": 128}, "hidden size is 64, .* is 128"),
        ({"vocab": 300}, "vocabulary is 256, .* is 300"),
        ({"architecture": "deepseek_v3"}, "architecture is glm4_moe, .* is deepseek_v3"),
    )
    for changes, message in others:
        with pytest.raises(ConfigError, match=message):
            check_further(further.spec, replace(model.spec, **changes))


def test_a_model_keeps_no_hidden_states_unless_asked(checkpoints: Callable[[str], Stores]) -> None:
    """They are as large as the residual; most runs have no use for them."""
    store = checkpoints("glm4_moe").model
    assert not Decoder(store.spec, store, backend_of("cpu")).keeps_hidden
