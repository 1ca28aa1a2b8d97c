"""The planted mutants still fit the kernels; a cheap kernel's are all detected (mutants.py runs the rest)."""

from __future__ import annotations

import pytest
from cases_experts import CASES
from mutants import TABLE, Mutant, all_mutants, detect

from strata.backends.cuda.sources import kernel_names


def test_every_mutant_changes_its_kernel() -> None:
    found = list(all_mutants())
    assert len(found) >= len(TABLE) >= 40
    assert {mutant.kernel for mutant in found} <= set(kernel_names())
    assert len({str(mutant) for mutant in found}) == len(found)


@pytest.mark.parametrize("mutant", [m for m in all_mutants() if m.kernel == "combine"], ids=str)
def test_mutants_are_detected(mutant: Mutant) -> None:
    assert detect(mutant, [case for case in CASES if case.file == "combine"]) is not None
