"""A tiny random model with a byte for a token, the demo model, and servers over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Harness, Script, Serve, load
from tiny_checkpoint import write_checkpoint

from strata.interfaces.bundled import model_path
from strata.interfaces.importing import import_checkpoint
from strata.store.options import ConvertOptions


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-moe")
    import_checkpoint(checkpoint, checkpoint.parent / "store", ConvertOptions())
    return checkpoint.parent / "store"


@pytest.fixture(scope="module")
def tiny(tiny_store: Path) -> Iterator[Harness]:
    """One server for a module's tests; each must leave it without requests."""
    harness = Harness(lambda: load(tiny_store), warm_up=False)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Harness]:
    harness = Harness(lambda: load(model_path("demo")))
    yield harness
    harness.close()


@pytest.fixture
def serve(tiny_store: Path) -> Iterator[Serve]:
    """Servers with settings of their own."""
    made: list[Harness] = []

    def start(model: dict[str, Any] | None = None, **settings: Any) -> Harness:
        settings.setdefault("warm_up", False)
        made.append(Harness(lambda: load(tiny_store, **(model or {})), **settings))
        return made[-1]

    yield start
    for harness in made:
        harness.close()


@pytest.fixture
def script(tiny: Harness) -> Iterator[Script]:
    """Tells `tiny` what to answer; afterwards it answers by itself again."""
    yield from _scripted(tiny)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """The demo model with the module's TEMPLATE."""
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(request.module.TEMPLATE)
    harness = Harness(lambda: load(model_path("demo"), chat_template=file), warm_up=False)
    yield harness
    harness.close()


@pytest.fixture
def speaking(server: Harness) -> Iterator[Script]:
    """Tells `server` what to answer."""
    yield from _scripted(server)


def _scripted(harness: Harness) -> Iterator[Script]:
    assert harness.thread.model is not None
    script = Script(harness.thread.model)
    yield script
    harness.idle()
    script.stop()
