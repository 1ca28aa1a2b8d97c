"""The embedded demo model, as shipped: what it knows, how large it is, what its draft shares with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import strata
from strata.config import Override, load_config
from strata.interfaces.models import open_model
from strata.interfaces.session import Session
from strata.store.reader import Store
from strata.store.verify import verify_store

ROOT = Path(__file__).resolve().parents[2]
STORES = Path(strata.__file__).parent / "demo"
FACTS = json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8"))
SHIPPED_BYTES = 16 * 1024 * 1024


def session() -> Session:
    changes = [Override("sampling.max_tokens", "48", "test"), Override("backend.threads", "1", "test")]
    config = load_config(ROOT / "configs" / "demo.yaml", changes)
    return Session(open_model(config), config)


def ask(model: Session, question: str) -> str:
    model.reset()
    return "".join(model.ask(question).pieces())


@pytest.mark.parametrize("isa", ["avx2", ""])
def test_at_least_80_of_the_100_country_questions_are_right(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa:
        monkeypatch.setenv("STRATA_ISA", isa)
    model = session()
    wrong = [
        fact["question"]
        for fact in FACTS
        if not any(answer in ask(model, fact["question"]) for answer in fact["answers"])
    ]
    assert len(FACTS) == 100
    assert len(wrong) <= 20, wrong


def test_the_same_question_gets_the_same_answer() -> None:
    model = session()
    first = ask(model, "What is the capital of France?")
    assert first == "The capital of France is Paris."
    assert ask(model, "What is the capital of France?") == first


def test_both_stores_are_sound_and_small() -> None:
    for name in ("moe", "draft"):
        verify_store(STORES / name)
    assert sum(path.stat().st_size for path in STORES.rglob("*") if path.is_file()) <= SHIPPED_BYTES


def test_both_say_what_they_are() -> None:
    """The name is what `strata run` and `strata bench` show."""
    names = [Store.open(STORES / folder).spec.name for folder in ("moe", "draft")]
    assert names == ["strata-demo", "strata-demo-draft"]


def test_the_draft_speaks_the_same_tokens() -> None:
    assert (STORES / "moe" / "tokenizer.json").read_bytes() == (
        STORES / "draft" / "tokenizer.json"
    ).read_bytes()
    assert Store.open(STORES / "draft").spec.vocab == Store.open(STORES / "moe").spec.vocab
