"""A speculator as it was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from strata.backends.base import Backend, KvSpec
from strata.engine.speculative.draft_length import LengthOptions
from strata.engine.speculative.draft_model import DraftModel
from strata.engine.speculative.ledger import Promise
from strata.engine.speculative.mtp import MtpProposer
from strata.engine.speculative.ngram import NgramProposer
from strata.engine.speculative.proposer import Proposer
from strata.engine.speculative.speculator import Speculator
from strata.engine.speculative.vocabulary import IdMap
from strata.errors import CapacityError, ConfigError, UnsupportedError
from strata.hardware.cpu import CpuChoice
from strata.hardware.profile import HardwareProfile
from strata.model.decoder import Decoder
from strata.model.further import FurtherLayer, check_further
from strata.plan.decode_cost import DecodeCost
from strata.plan.footprint import Footprint
from strata.plan.plan import DraftPlan, Plan
from strata.store.reader import Store


@dataclass(frozen=True)
class SpeculationOptions:
    """machine: what the plan was made for. costs: whether steps' times cut the lengths further.

    draft: the store of the model that proposes, or of a layer of the model that does (`convert --further`),
    which the plan must have room for; None: prompt n-grams.
    ids: the draft's for the model's; None: the same. promise: see `ledger`.
    """

    machine: HardwareProfile
    lengths: LengthOptions = field(default_factory=LengthOptions)
    costs: bool = True
    draft: Path | None = None
    ids: IdMap | None = None
    promise: Promise = "request"


def make_speculator(
    options: SpeculationOptions,
    model: Footprint,
    plan: Plan,
    backend: Backend,
    valid_tokens: int,
    decoder: Decoder,
    clock: Callable[[], float] = time.perf_counter,
) -> Speculator:
    """For an engine that runs `model` by `plan`. clock: that of its steps.

    backend: what a draft model computes on. valid_tokens: ids that both models know. decoder: the model, for
    which a layer of its own proposes. CapacityError when the plan has no room for the draft, ConfigError when
    it knows fewer ids, or is another model's layer; UnsupportedError for such a layer beside a device.
    """
    estimate = DecodeCost(model, plan, options.machine) if options.costs else None
    proposer = make_proposer(options, plan, backend, valid_tokens, decoder)
    return Speculator(proposer, options.lengths, estimate, clock, options.promise, spare_for(proposer))


def spare_for(proposer: Proposer) -> Proposer | None:
    """What proposes where this one does not pay."""
    return None if proposer.free else NgramProposer()


def make_proposer(
    options: SpeculationOptions, plan: Plan, backend: Backend, valid_tokens: int, decoder: Decoder
) -> Proposer:
    """A draft model, or a layer of the model's own, where there is one, else prompt n-grams.

    Raises as `make_speculator`.
    """
    if options.draft is None:
        return NgramProposer()
    store = Store.open(options.draft)
    if store.spec.further:
        return _further(store, plan, backend, decoder)
    return _draft(store, options.ids, plan, backend, valid_tokens)


def draft_backend(plan: Plan, backend: Backend) -> Backend:
    """On threads of its own at the home node, with its KV pages there, where the plan says so.

    They work while the model's do not: the draft proposes between two of its steps.
    """
    from strata.backends.cpu import CpuBackend

    assert plan.draft is not None
    if not plan.draft.cpus or not isinstance(backend, CpuBackend):
        return backend
    chosen = CpuChoice(plan.draft.cpus, plan.bind, nodes=plan.nodes[:1])
    return CpuBackend(activations=backend.activations, chosen=chosen)


def _further(store: Store, plan: Plan, backend: Backend, decoder: Decoder) -> MtpProposer:
    """The layer computes on the model's threads, as large as one of the model's."""
    check_further(store.spec, decoder.spec)
    if getattr(decoder.backend, "device", None) is not None:
        raise UnsupportedError(
            f"{store.spec.name} reads the model's hidden states, which the {decoder.backend.name} backend "
            f"does not hand out",
            remedy="run without a device (device.use: none), or choose speculative.use: ngram",
        )
    room = _room(store, plan)
    kv = KvSpec.of(store.spec, room.page_tokens, plan.kv.dtype)
    layer = FurtherLayer(store.spec, store, backend)
    return MtpProposer(decoder, layer, kv, room.pages, room.context)


def _room(store: Store, plan: Plan) -> DraftPlan:
    room = plan.draft
    if room is None or not room.pages:
        raise CapacityError(
            f"the plan has no memory for the KV cache of the draft model {store.spec.name}",
            remedy="choose a smaller model.context or engine.requests, or speculative.use: ngram",
        )
    return room


def _draft(store: Store, ids: IdMap | None, plan: Plan, backend: Backend, valid_tokens: int) -> DraftModel:
    room = _room(store, plan)
    needed = valid_tokens if ids is None else ids.most + 1
    if store.spec.vocab < needed:
        raise ConfigError(
            f"the draft model {store.spec.name} has {store.spec.vocab} token ids, {needed} are used",
            remedy="choose a draft with the same tokenizer, or speculative.use: ngram",
        )
    kv = KvSpec.of(store.spec, room.page_tokens, plan.kv.dtype)
    decoder = Decoder(store.spec, store, draft_backend(plan, backend))
    return DraftModel(decoder, kv, room.pages, room.context, plan.chunk, ids)
