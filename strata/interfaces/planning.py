"""What `strata plan` does: a model's headers, a machine and a configuration become a Plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.backends.base import KvSpec
from strata.config import Config
from strata.core import KvDtype
from strata.engine.load import plan_store
from strata.errors import IncompleteError
from strata.hardware.profile import HardwareProfile
from strata.interfaces.bundled import model_path
from strata.interfaces.importing import extra_files, resolve_checkpoint
from strata.interfaces.inspection import bare_config
from strata.interfaces.speculation import draft_name, match_vocabularies, naming_draft
from strata.interfaces.stores import convert_options
from strata.interfaces.tokenizer import Tokenizer
from strata.model.footprint import (
    Contents,
    contents_of_checkpoint,
    contents_of_config,
    contents_of_store,
    footprint,
)
from strata.model.further import check_further
from strata.plan.advice import advise
from strata.plan.footprint import Footprint
from strata.plan.host import SPREADS
from strata.plan.options import PlanOptions
from strata.plan.plan import Plan
from strata.plan.planner import make_plan
from strata.store.checkpoint import open_headers
from strata.store.checkpoint_file import read_json_file
from strata.store.manifest import MANIFEST, read_manifest
from strata.store.options import ConvertOptions

_SMALL = (("experts", "w4g64"), ("shared", "w4g128"))


def plan_model(config: Config, hardware: HardwareProfile, depth: int | None = None) -> Plan:
    """The plan for the model that the configuration names, with advice.

    Of a checkpoint only headers are read, and they suffice: a config.json, or the beginning of a GGUF file.
    Raises the errors of the readers, of `resolve` and of `make_plan`.
    """
    path = model_path(config.model.path)
    asked = convert_options(config.convert)
    contents = check_models(config)
    model = _footprint(contents, config.kv.dtype, config.kv.page_tokens)
    options = plan_options(config, depth)
    plan = make_plan(model, hardware, options)
    return advise(plan, model, hardware, options, _other_formats(path, contents, model, asked, config))


def check_models(config: Config) -> Contents:
    """What the model is, which has been looked at with its draft: whether there are such files, and whether
    they go together. Headers and tokenizers are read. Raises the errors of the readers, of `resolve`, and
    ConfigError for a draft of another model."""
    path = model_path(config.model.path)
    contents = _contents(path, convert_options(config.convert))
    draft = _draft_contents(config)
    if draft is not None and draft.spec.further:
        check_further(draft.spec, contents.spec)
    elif draft is not None:
        _check_vocabularies(path, config)
    return contents


def model_of(config: Config) -> Footprint:
    """The numbers of the model that the configuration names; headers suffice. Raises as `plan_model`."""
    contents = _contents(model_path(config.model.path), convert_options(config.convert))
    return _footprint(contents, config.kv.dtype, config.kv.page_tokens)


def plan_run(
    store: Path,
    config: Config,
    machine: HardwareProfile,
    *,
    context: int | None = None,
    requests: int | None = None,
) -> Plan:
    """The plan that a run of this store obeys, which is what `strata plan` prints, without advice.

    context, requests: instead of the configuration's. A graphics card that was not asked for by name stays
    idle, because no kernel has run on one so far; one that was, emulated or not, holds the KV pages unless
    kv.tier says host. Raises StoreError and what `make_plan` raises.
    """
    options = dataclasses.replace(plan_options(config), device=False)
    if config.device.use in ("emulated", "cuda"):
        options = dataclasses.replace(options, device=True, kv_tier=options.kv_tier or "device")
    if context is not None:
        options = dataclasses.replace(options, context=context)
    if requests is not None:
        options = dataclasses.replace(options, requests=requests)
    return plan_store(store, machine, options, kv_dtype=config.kv.dtype, page_tokens=config.kv.page_tokens)


def _contents(path: Path, options: ConvertOptions, *, further: bool = False) -> Contents:
    """Of a store, a config.json without weights, or a checkpoint. further: see `contents_of_store`."""
    if (path / MANIFEST).is_file():
        return contents_of_store(read_manifest(path), further=further)
    config = bare_config(path)
    if config is None:
        source = open_headers(path)
        return contents_of_checkpoint(source, resolve_checkpoint(source), options)
    found = contents_of_config(read_json_file(config), options)
    if found.spec.name != found.spec.architecture:
        return found
    name = config.resolve().parent.name if config.name == "config.json" else config.stem
    name = name.removesuffix("_config") or found.spec.name
    return dataclasses.replace(found, spec=dataclasses.replace(found.spec, name=name))


def _footprint(contents: Contents, kv_dtype: KvDtype, page_tokens: int) -> Footprint:
    return footprint(contents, KvSpec.of(contents.spec, page_tokens, kv_dtype))


def _other_formats(
    path: Path, contents: Contents, model: Footprint, asked: ConvertOptions, config: Config
) -> Mapping[str, Footprint]:
    """The same model in smaller formats, by the option that would make it so."""
    tokens = config.kv.page_tokens
    found = {}
    if config.kv.dtype != "int8":
        found["kv.dtype: int8"] = _footprint(contents, "int8", tokens)
    converted = (path / MANIFEST).is_file()
    for part, fmt in _SMALL:
        if converted or getattr(asked, part) == fmt:
            continue
        smaller: dict[str, Any] = {part: fmt}
        changed = _contents(path, dataclasses.replace(asked, **smaller))
        other = _footprint(changed, config.kv.dtype, tokens)
        if other.total < 0.97 * model.total:
            found[f"convert.{part}: {fmt}"] = other
    return found


def _draft_contents(config: Config) -> Contents | None:
    """Of the draft model, or the layer that proposes, if one is to be used. Raises as `plan_model`."""
    name = draft_name(config)
    if not name:
        return None
    with naming_draft(config):
        return _contents(model_path(name), convert_options(config.convert), further=True)


def _check_vocabularies(model: Path, config: Config) -> None:
    """ConfigError as a run's; nothing where headers came without a tokenizer."""
    draft = draft_name(config)
    try:
        mine = _tokenizer(model)
        with naming_draft(config):
            other = _tokenizer(model_path(draft))
    except IncompleteError:
        return
    match_vocabularies(mine, other, draft)


def _tokenizer(path: Path) -> Tokenizer:
    """What a run would have. IncompleteError: there is none."""
    if (path / MANIFEST).is_file():
        return Tokenizer.load(path)
    config = bare_config(path)
    if config is not None:
        return Tokenizer.load(config.parent)
    return Tokenizer(extra_files(open_headers(path)), where=str(path))


def _draft_of(config: Config) -> Footprint | None:
    """Its numbers."""
    contents = _draft_contents(config)
    return None if contents is None else _footprint(contents, config.kv.dtype, config.kv.page_tokens)


def plan_options(config: Config, depth: int | None = None) -> PlanOptions:
    """What a configuration asks of the planner."""
    kv, device, numa = config.kv, config.device, config.host.numa
    # The reference's ops are small: on a busy machine torch's barriers made two threads 10 times slower.
    threads = 1 if config.backend.name == "reference" else None
    return PlanOptions(
        context=config.model.context,
        requests=config.engine.requests,
        max_running=config.engine.max_running,
        depth=depth,
        chunk=config.engine.prefill_chunk,
        threads=config.backend.threads or threads,
        device=device.use != "none",
        device_memory=device.memory,
        reserve=device.reserve,
        workspace=device.workspace,
        slots=config.experts.slots,
        misses=config.experts.misses,
        kv_tier=None if kv.tier == "auto" else kv.tier,
        kv_bytes=kv.size,
        host_memory=config.host.memory,
        draft=_draft_of(config),
        spread=next((spread for spread in SPREADS if spread == numa), None),
        numa=numa != "off",
        nodes=numa if isinstance(numa, tuple) else None,
        copies=config.host.copies,
    )
