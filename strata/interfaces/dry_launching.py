"""`strata bench --dry-launch`: what a step asks of the driver, counted without a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.config import Config
from strata.device.counting import CountingDevice
from strata.engine.device_run import DeviceRun
from strata.engine.dry_launch import DryLaunch, MadeUpRoutes, StepCount
from strata.engine.load import load_engine
from strata.errors import UnsupportedError
from strata.interfaces.hardware import device_activations, remembered_machine, with_device
from strata.interfaces.planning import plan_run
from strata.interfaces.stores import store_path
from strata.plan.figures import CALL_SECONDS

CONTEXT = 256


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is counted. rows: requests that decode. fresh: experts of each layer and row that are not on the
    device. misses: who computes those. graphs: with CUDA graphs."""

    title: str
    rows: int
    fresh: int
    misses: str
    graphs: bool = False


def scenes(streams: Sequence[int], top_k: int) -> Iterator[Scene]:
    """Everything on the device, then a quarter of the experts missing, fetched or computed by the host."""
    for rows in streams:
        yield Scene("every expert is on the device" if top_k else "dense", rows, 0, "fetch")
    title = "the same with CUDA graphs" if top_k else "dense, with CUDA graphs"
    yield Scene(title, streams[0], 0, "fetch", graphs=True)
    if top_k:
        few = max(1, top_k // 4)
        yield Scene(f"{few} of {top_k} experts are fetched", streams[0], few, "fetch")
        yield Scene(f"{few} of {top_k} experts are the host's", streams[0], few, "cpu")


def count(config: Config, streams: Sequence[int]) -> Iterator[tuple[Scene, StepCount]]:
    """Scene after scene; each has a backend of its own."""
    path = store_path(config, text=False)
    device = dataclasses.replace(config.device, use="emulated", kernels="cuda")
    asked = dataclasses.replace(config, device=device)
    engine, _ = _open(asked, path, 1)
    experts = engine.decoder.spec.experts
    for scene in scenes(streams, experts.router.top_k if experts else 0):
        misses: Any = scene.misses
        changed = dataclasses.replace(asked, experts=dataclasses.replace(asked.experts, misses=misses))
        changed = dataclasses.replace(changed, device=dataclasses.replace(device, graphs=scene.graphs))
        engine, routes = _open(changed, path, scene.rows)
        yield scene, DryLaunch(engine, _device(engine), routes).decode(scene.rows, scene.fresh)


def _open(config: Config, path: Path, requests: int) -> tuple[Any, MadeUpRoutes]:
    machine = with_device(remembered_machine(), config)
    plan = plan_run(path, config, machine, context=CONTEXT, requests=requests)
    run = DeviceRun(machine, "counted", "cuda", device_activations(config), graphs=config.device.graphs)
    engine = load_engine(path, plan, share_prefixes=False, device=run)
    routes = _device(engine).answer
    assert isinstance(routes, MadeUpRoutes)
    return engine, routes


def _device(engine: Any) -> CountingDevice:
    device = engine.decoder.backend.device
    if not isinstance(device, CountingDevice):
        raise UnsupportedError(
            f"launches of the device '{device.name}' cannot be counted", remedy="device.use: emulated"
        )
    return device


def to_json(scene: Scene, found: StepCount, launch_seconds: float) -> dict[str, Any]:
    """Per step; seconds are predicted from the two costs, not measured."""
    calls, per_step = found.calls, found.per_step
    return {
        **dataclasses.asdict(scene),
        "layers": found.layers,
        "launches": found.launches,
        "launches_by_layer": [found.of_layer(layer) for layer in range(found.layers)],
        "launches_outside_layers": found.of_layer(None),
        "kernels_of_last_layer": found.by_kernel(found.layers - 1),
        "host_waits": {what: per_step(n) for what, n in calls.read_backs.items()},
        "synchronisations": per_step(calls.synchronisations),
        "copies": {way: per_step(n) for way, n in calls.copies.items()},
        "copied_bytes": {way: per_step(n) for way, n in calls.copied.items()},
        "driver_calls": per_step(calls.all),
        "launch_seconds": launch_seconds,
        "call_seconds": CALL_SECONDS,
        "predicted_seconds": predicted_seconds(found, launch_seconds),
    }


def predicted_seconds(found: StepCount, launch_seconds: float) -> float:
    """Of a step that does nothing but call the driver."""
    launches = found.calls.launches.total()
    others = found.calls.all - launches
    return found.per_step(launches * launch_seconds + others * CALL_SECONDS)


def describe(scene: Scene, found: StepCount, launch_seconds: float) -> str:
    """A paragraph for people."""
    calls, per_step = found.calls, found.per_step
    last = found.by_kernel(found.layers - 1)
    kernels = ", ".join(f"{name} {n:g}" if n != 1 else name for name, n in last.items())
    waits = ", ".join(f"{per_step(n):g} for {what}" for what, n in calls.read_backs.items()) or "none"
    copies = ", ".join(
        f"{per_step(calls.copies[way]):g} {way} ({per_step(calls.copied[way]) / 1e3:.1f} kB)"
        for way in sorted(calls.copies)
    )
    milliseconds = predicted_seconds(found, launch_seconds) * 1e3
    return "\n".join(
        (
            f"{scene.rows} decoding, {scene.title}:",
            f"  launches    {found.launches:g} a step: {found.most_per_layer:g} in the layer with the most, "
            f"{found.of_layer(None):g} outside of layers",
            f"  last layer  {kernels}",
            f"  host waits  {waits}; {per_step(calls.synchronisations):g} for a whole stream or the device",
            f"  copies      {copies}",
            f"  predicted   {milliseconds:.2f} ms a step for {per_step(calls.all):g} calls of the driver, "
            f"at {launch_seconds * 1e6:g} us a launch and {CALL_SECONDS * 1e6:g} us for any other (assumed)",
        )
    )
