"""Layers that predict further tokens (MTP heads): kept when asked for, told when not, no model to run."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import parity
import pytest
import small_models
from further_models import HIDDEN, LAYERS, with_head

from strata.errors import UnsupportedError
from strata.interfaces.importing import import_checkpoint
from strata.interfaces.inspection import describe, inspect_path
from strata.model.footprint import contents_of_store
from strata.model.resolve import resolve
from strata.store import names
from strata.store.checkpoint import open_checkpoint
from strata.store.pack import unpack
from strata.store.reader import Store


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3"])
def test_the_model_is_converted_without_it_and_says_so(case: str, tmp_path: Path) -> None:
    tensors = with_head(case, tmp_path / "hf")
    report = import_checkpoint(tmp_path / "hf", tmp_path / "store", parity.EXACT)
    left = [t for name, t in tensors.items() if name.startswith(f"model.layers.{LAYERS}.")]
    told = next(note for note in report.notes if "MTP" in note)
    assert f"layer {LAYERS} " in told and f"{sum(t.nbytes for t in left)} bytes" in told
    assert "--further" in told and told in describe(inspect_path(tmp_path / "hf"))
    store = Store.open(tmp_path / "store")
    assert store.spec.layers == LAYERS and not store.spec.further


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("own", [True, False])
def test_a_head_becomes_a_store_of_its_own(case: str, own: bool, tmp_path: Path) -> None:
    """With every tensor of the layer; embedding and output matrix are the model's where it has none."""
    tensors = with_head(case, tmp_path / "hf", own=own)
    import_checkpoint(tmp_path / "hf", tmp_path / "mtp", parity.EXACT, further=True)
    store = Store.open(tmp_path / "mtp")
    assert (store.spec.layers, store.spec.moe_layers, store.spec.further) == (1, (True,), True)
    assert store.manifest.expert_count == 8 and set(store.manifest.layers) == {0}
    at = f"model.layers.{LAYERS}."
    for name, source in ((names.EMBED_NORM, "enorm"), (names.HIDDEN_NORM, "hnorm")):
        assert (store.plain(name) == tensors[f"{at}{source}.weight"]).all()
    assert (store.plain(names.FINAL_NORM) == tensors[f"{at}shared_head.norm.weight"]).all()
    join = tensors[f"{at}eh_proj.weight"]
    assert (unpack(store.tensor(names.JOIN_EMBED)) == join[:, :HIDDEN]).all()
    assert (unpack(store.tensor(names.JOIN_HIDDEN)) == join[:, HIDDEN:]).all()
    embed = f"{at}embed_tokens" if own else "model.embed_tokens"
    head = f"{at}shared_head.head" if own else "lm_head"
    assert (unpack(store.tensor(names.EMBED)) == tensors[f"{embed}.weight"]).all()
    assert (unpack(store.tensor(names.HEAD)) == tensors[f"{head}.weight"]).all()
    assert "MTP head" in describe(inspect_path(tmp_path / "mtp"))


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with_head("glm4_moe", tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "mtp", parity.EXACT, further=True)
    with pytest.raises(UnsupportedError, match="MTP head"):
        contents_of_store(Store.open(tmp_path / "mtp").manifest)


def test_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    small_models.save("glm4_moe", tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="no layer behind the model's 3 predicts"):
        import_checkpoint(tmp_path / "hf", tmp_path / "mtp", parity.EXACT, further=True)


def test_the_same_layer_from_gguf_is_told(tmp_path: Path) -> None:
    model = small_models.build("glm4_moe")
    gguf_files.write(model, tmp_path / "m.gguf", mtp=True)
    source = open_checkpoint(tmp_path / "m.gguf")
    (note,) = resolve(source.config, source.tensors, "gguf").notes
    assert f"layer {LAYERS} predicts further tokens" in note
