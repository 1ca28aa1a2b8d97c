"""Guesses are trusted by their rank, once they were right often enough, and no longer than that."""

from __future__ import annotations

from strata.memory.foresight import TRUSTED, Foresight


def live(foresight: Foresight, steps: int, right: int, layer: int = 3) -> list[list[int]]:
    """Steps whose guesses name four experts, of which the first `right` are asked for."""
    trusted = []
    for _ in range(steps):
        trusted.append(foresight.expect(layer, [10, 11, 12, 13], lambda _: True))
        foresight.judge(layer, [*range(10, 10 + right), 20, 21])
    return trusted


def test_nothing_is_trusted_at_first_and_then_what_proves_right() -> None:
    foresight = Foresight()
    trusted = live(foresight, 200, right=2)
    assert trusted[0] == []
    assert trusted[-1] == [10, 11]


def test_trust_goes_when_guesses_become_wrong() -> None:
    foresight = Foresight()
    live(foresight, 200, right=4)
    assert live(foresight, 200, right=1)[-1] == [10]


def test_a_guess_that_is_never_judged_changes_nothing() -> None:
    foresight = Foresight()
    before = list(foresight.trust)
    foresight.expect(1, [1, 2], lambda _: True)
    foresight.judge(2, [1, 2])
    assert foresight.trust == before


def test_where_none_is_trusted_guesses_become_rare_but_do_not_end() -> None:
    foresight = Foresight()
    live(foresight, 400, right=0)
    assert max(foresight.trust[:4]) < TRUSTED
    wanted = 0
    for _ in range(160):
        if foresight.wants(3):
            wanted += 1
            live(foresight, 1, right=0)
    assert 5 <= wanted <= 20
    live(foresight, 200, right=4)
    assert foresight.wants(3) and foresight.wants(3)


def test_what_is_there_already_proves_nothing() -> None:
    """Favourites are easily guessed; only what must be read shows what a guess is worth."""
    foresight = Foresight()
    for _ in range(200):
        foresight.expect(3, [10, 11, 12], lambda index: index == 11)
        foresight.judge(3, [10, 12])
    assert foresight.trust[1] < 0.1
    assert foresight.trust[0] == foresight.trust[2] == 0.5
    assert foresight.expect(3, [10, 11, 12], lambda index: index == 11) == []
