"""Checkpoints with a layer that predicts further tokens, and what transformers' own modules make of it.

transformers ignores these weights, so the layer is put together here, of its decoder layer and norms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import numpy as np
import safetensors.numpy
import small_models
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from strata.model.resolve import resolve
from strata.store.checkpoint import open_checkpoint
from strata.store.convert import convert
from strata.store.options import ConvertOptions
from strata.store.reader import Store

HIDDEN, LAYERS = 64, 3
CASES = ("glm4_moe", "deepseek_v3")
_GGUF_PARTS = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "embed_tokens": "embed_tokens",
    "shared_head.head": "shared_head_head",
}


def parts(own: bool) -> dict[str, NDArray[np.float32]]:
    """What such a layer has beside a decoder layer, random and exact in BF16. own: embedding and head."""
    chosen = np.random.default_rng(1)
    shapes = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "shared_head.norm": (HIDDEN,)}
    shapes |= {"eh_proj": (HIDDEN, 2 * HIDDEN)}
    shapes |= {part: (small_models.VOCAB, HIDDEN) for part in ("embed_tokens", "shared_head.head") if own}
    return {part: chosen.integers(-64, 64, shape).astype(np.float32) / 64 for part, shape in shapes.items()}


def with_head(case: str, folder: Path, *, own: bool = True) -> dict[str, NDArray[np.float32]]:
    """A checkpoint whose last layer is no part of the model; returns its tensors."""
    small_models.save(case, folder, num_hidden_layers=LAYERS + 1)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors |= {f"model.layers.{LAYERS}.{part}.weight": values for part, values in parts(own).items()}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(changed))
    return tensors


def with_head_in_gguf(case: str, path: Path) -> None:
    """The same model and layer as a GGUF file."""
    model = small_models.build(case, num_hidden_layers=LAYERS + 1)
    gguf_files.write(model, path, further={_GGUF_PARTS[part]: each for part, each in parts(True).items()})


class Stores(NamedTuple):
    """The model and its layer that predicts further tokens."""

    model: Store
    further: Store


def to_stores(checkpoint: Path, folder: Path, options: ConvertOptions) -> Stores:
    """Both stores of a checkpoint."""
    source = open_checkpoint(checkpoint)
    for name, further in (("model", False), ("further", True)):
        found = resolve(source.config, source.tensors, source.kind, further=further)
        convert(source, found.spec, found.targets, found.experts, folder / name, options)
    return Stores(Store.open(folder / "model"), Store.open(folder / "further"))


class Expected(NamedTuple):
    """hidden: the model's, after its norm, f32 `[tokens, hidden]`. logits f32 `[tokens - 1, vocab]`: row t is
    of position t and the token after it. states: the same rows after the layer's norm."""

    hidden: NDArray[np.float32]
    logits: NDArray[np.float32]
    states: NDArray[np.float32]


class Reference:
    """Model and layer of a case, in transformers' modules. own: see `parts`."""

    def __init__(self, case: str, own: bool = True) -> None:
        self.model: Any = small_models.build(case, num_hidden_layers=LAYERS + 1)
        inner = self.model.model
        self.layer = inner.layers[LAYERS]
        inner.layers = inner.layers[:LAYERS]
        inner.config.num_hidden_layers = LAYERS
        tensors = {name: torch.from_numpy(each) for name, each in parts(own).items()}
        eps = inner.config.rms_norm_eps
        self.embed_norm, self.hidden_norm, self.norm = (
            _norm(tensors[name], eps) for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self.join = tensors["eh_proj"]
        self.embed = tensors.get("embed_tokens", inner.embed_tokens.weight)
        self.head = tensors.get("shared_head.head", self.model.lm_head.weight)

    @torch.no_grad()
    def expected(self, ids: list[int]) -> Expected:
        """What every row of a text gives."""
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        states = self.apply(hidden[0, :-1], ids[1:])
        return Expected(hidden[0].numpy(), (states @ self.head.T).numpy(), states.numpy())

    @torch.no_grad()
    def apply(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """The layer's normed output `[rows, hidden]` of hidden states and the tokens after them."""
        embedded = self.embed[torch.tensor(tokens)]
        x = torch.cat([self.embed_norm(embedded), self.hidden_norm(hidden)], dim=1) @ self.join.T
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(x[None], position_ids=places)
        out = self.layer(x[None], attention_mask=mask, position_ids=places, position_embeddings=turned)
        result: Tensor = self.norm((out[0] if isinstance(out, tuple) else out).view(len(tokens), -1))
        return result


def _norm(weight: Tensor, eps: float) -> nn.Module:
    norm = nn.RMSNorm(len(weight), eps=eps)
    norm.weight = nn.Parameter(weight)
    return norm
