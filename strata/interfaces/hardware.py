"""The machine a command plans for: this one, measured once and remembered, or a profile (`--hardware`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strata.backends import isa
from strata.backends.cpu import CpuBackend
from strata.config import Config
from strata.engine.device_run import DeviceActivations, DeviceRun
from strata.errors import ConfigError, StrataError
from strata.hardware.bandwidth import read_bandwidth
from strata.hardware.gpu_stack import gpu_stack
from strata.hardware.measure import Measurement, load, machine_key, measure_nodes, measured, save
from strata.hardware.probe import card_profile, probe
from strata.hardware.profile import HardwareProfile
from strata.hardware.profile_file import load_profile
from strata.interfaces.importing import cache_folder
from strata.interfaces.terminal import note
from strata.store.formats import FORMATS, PackedShape, PackedTensor

_EMULATED = "rtx3090-2x-e5-2680v4"
_SECONDS = 0.25
_ROWS, _COLS, _TOKENS = 4096, 2048, 256


def hardware(asked: str | None) -> HardwareProfile:
    """The profile that --hardware names; None: this machine, measured when that was never done."""
    return this_machine() if asked is None else load_profile(asked)


def this_machine(*, again: bool = False) -> HardwareProfile:
    """This machine with its speeds. again: measure even when some are remembered (a second or two).

    Without a processor that Strata's kernels run on, or memory to measure with, speeds stay assumed.
    """
    found = examine_machine()
    folder, key = _folder(), machine_key(found)
    known = None if again else load(folder, key)
    if known is None and found.processor.isa:
        try:
            known = _measure(found)
        except StrataError as error:
            note(f"note: speeds are assumed, not measured: {error.cause}")
            return found
        save(folder, key, known)
    return found if known is None else measured(found, known)


def remembered_machine() -> HardwareProfile:
    """This machine with the speeds that are remembered; else they stay assumed.

    For what must start at once: measuring takes seconds and a buffer of a gigabyte.
    """
    found = examine_machine()
    known = load(_folder(), machine_key(found))
    return found if known is None else measured(found, known)


def with_device(machine: HardwareProfile, config: Config) -> HardwareProfile:
    """The machine that a configuration runs on: with device.use "emulated" it has the card of a profile.

    With "cuda" it has its own, known by its PCI id or else by what the driver says. HardwareError names all
    that is missing for it.
    """
    if config.device.use == "emulated":
        return dataclasses.replace(machine, device=load_profile(_EMULATED).device)
    if config.device.use == "cuda":
        stack = gpu_stack()
        stack.require()
        return dataclasses.replace(machine, device=machine.device or card_profile(stack.cards[0], machine))
    return machine


def device_run(config: Config, machine: HardwareProfile) -> DeviceRun | None:
    """What a run computes on beside the processors. ConfigError for kernels that the device cannot run."""
    use, kernels = config.device.use, config.device.kernels
    if kernels == "auto" and use == "emulated":
        kernels = "host"
    if config.device.graphs and use == "emulated" and kernels == "host":
        raise ConfigError(
            f"device.graphs is true ({config.where('device.graphs')}) and device.kernels is {kernels}",
            remedy="set device.kernels=cuda: only those kernels can be captured",
        )
    if (use == "emulated" and kernels == "cuda") or (use == "cuda" and kernels != "host"):
        lock, graphs = config.experts.page_lock, config.device.graphs
        return DeviceRun(machine, use, "cuda", device_activations(config), lock, graphs)
    if config.device.activations == "int8":
        raise ConfigError(
            f"device.activations is int8 ({config.where('device.activations')}) and no kernels of a card run",
            remedy="device.use: cuda; for the processor's kernels there is backend.activations",
        )
    if use == "emulated":
        return DeviceRun(machine, use, "host", page_lock=config.experts.page_lock)
    if use == "cuda" or kernels == "cuda":
        where = config.where("device.kernels")
        raise ConfigError(
            f"device.kernels is {kernels} ({where}) and device.use is {use}",
            remedy="host kernels need device.use: emulated; cuda kernels emulated or cuda",
        )
    return None


def device_activations(config: Config) -> DeviceActivations:
    """What the CUDA kernels multiply matrices in w8 with."""
    return "int8" if config.device.activations == "int8" else "bf16"


def examine_machine() -> HardwareProfile:
    """This machine before any measurement; a processor without AVX2 has isa ""."""
    try:
        features: Any = isa.extension().features()
        return probe(features["brand"], isa.choose_isa(features))
    except StrataError:
        return probe("unknown", "")


def _folder() -> Path:
    return cache_folder("auto") / "hardware"


def _measure(machine: HardwareProfile) -> Measurement:
    nodes = measure_nodes(machine, lambda cores: _on(cores, lambda backend: read_bandwidth(backend.cpu).best))
    first = next(node.cores for node in machine.nodes if node.cores)
    return Measurement(nodes, _on(first, _core_macs))


def _on(cores: Sequence[int], measure: Callable[[CpuBackend], float]) -> float:
    """What `measure` says about a backend on `cores`, to which all threads are bound while they compute."""
    return measure(CpuBackend(len(cores), cpus=cores))


def _core_macs(backend: CpuBackend) -> float:
    """Multiply-adds/s of one core, from the best of some products of a w4g64 matrix and 256 tokens."""
    shape = PackedShape(FORMATS["w4g64"], _ROWS, _COLS)
    weight = backend.weight(PackedTensor("probe", shape, np.zeros(shape.nbytes, np.uint8)))
    x = np.ones((_TOKENS, _COLS), np.float32)
    best, stop = float("inf"), time.perf_counter() + _SECONDS
    while (begin := time.perf_counter()) < stop:
        backend.linear(x, weight)
        best = min(best, time.perf_counter() - begin)
    return _ROWS * _COLS * _TOKENS / best / len(backend.chosen_cpus.cpus)
