"""Fixtures of the engine's tests.

One thread: a second one changes no bit (tests/backends/test_cpu_layers.py), and waiting for it takes half of
the time where tests run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import make_decoders, make_engine
from tiny_model import make_backend

from strata.backends.reference import ReferenceBackend
from strata.engine.engine import Engine
from strata.model.decoder import Decoder


@pytest.fixture(scope="module")
def decoders() -> dict[str, Decoder]:
    return make_decoders(ReferenceBackend())


@pytest.fixture(scope="module", params=["reference", "cpu"])
def any_decoders(request: pytest.FixtureRequest) -> dict[str, Decoder]:
    """For what every backend must keep; cpu with 4-bit weights and int8 activations."""
    if request.param == "reference":
        return make_decoders(ReferenceBackend())
    return make_decoders(make_backend("cpu", 1, "int8"), "w4g64")


@pytest.fixture(scope="module")
def cpu_decoders() -> dict[str, Decoder]:
    """The cpu backend with 4-bit weights and int8 activations."""
    return make_decoders(make_backend("cpu", 1, "int8"), "w4g64")


@pytest.fixture
def engine(decoders: dict[str, Decoder]) -> Iterator[Engine]:
    """An engine that must be without requests and whole when a test ends."""
    engine = make_engine(decoders["moe"])
    yield engine
    assert not engine.busy
    engine.check_integrity()
