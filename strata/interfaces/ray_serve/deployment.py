"""The deployments: replicas that compute, and a front that speaks HTTP and loses nothing."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from strata.config import Config, Override
from strata.errors import UsageError
from strata.interfaces.commands.serve import serving_config
from strata.interfaces.ray_serve.answer import one_answer, streams
from strata.interfaces.ray_serve.local import Head, LocalServer, Wire
from strata.interfaces.ray_serve.prefix import prefix_keys
from strata.interfaces.ray_serve.resume import with_seed
from strata.interfaces.ray_serve.router import PrefixRouter
from strata.interfaces.server.anthropic.errors import content_for
from strata.interfaces.server.errors import ApiError

_LOST = (RayActorError, BackPressureError)
_PASSED_ON = ("authorization", "x-api-key", "content-type", "accept")
_WHOLE, _NUMBER = re.compile("[0-9]{1,6}"), re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_LEAST = {"replicas": 1, "front": 1}
_HOP = ("content-length", "connection", "transfer-encoding")  # of the answer: the front's own


@dataclass(frozen=True)
class Asked:
    """What `serve run` was told. config: a file; model: instead of its own. replicas: at least, and where
    `most` is larger they follow the load. front: processes that speak HTTP. cpus: of a replica, for Ray."""

    config: str = ""
    model: str = ""
    replicas: int = 2
    most: int = 0
    front: int = 1
    cpus: float = 1.0
    slack: int = 4

    @classmethod
    def parse(cls, arguments: Mapping[str, str]) -> Asked:
        """From `name=value` words. UsageError for a name that is none, or a number that is none."""
        unknown = set(arguments) - set(cls.__dataclass_fields__)
        if unknown:
            names = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"{', '.join(sorted(unknown))}: not known", remedy=f"one of {names}")
        return cls(**{name: cls._value(name, text) for name, text in arguments.items()})

    @classmethod
    def _value(cls, name: str, text: str) -> Any:
        kind, least = type(getattr(cls(), name)), _LEAST.get(name, 0)
        if kind is str:
            return text
        if not (_NUMBER if kind is float else _WHOLE).fullmatch(text) or not least <= float(text):
            raise UsageError(f"{name}={text[:40]} is no number from {least} on", remedy="replicas=2 most=4")
        return kind(text)

    def configuration(self) -> Config:
        """The server's. UsageError without a model."""
        overrides = [Override("model.path", self.model, "model=")] if self.model else []
        config = serving_config(self.config or None, overrides)
        if not config.model.path:
            raise UsageError("no model is given", remedy="config=FILE or model=PATH")
        return config


class Replica:
    """One server with its own engine and KV cache."""

    def __init__(self, asked: Asked) -> None:
        self._server = LocalServer(asked.configuration())

    async def answer(self, keys: tuple[int, ...], wire: Wire) -> AsyncIterator[Head | bytes]:
        """keys: for the router; the replica has no use for them."""
        async for piece in self._server.answer(wire):
            yield piece

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica when it raises."""
        self._server.check()

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.close()


class Front:
    """HTTP in, HTTP out. A request whose replica is lost is sent to another one; a stream goes on there."""

    def __init__(self, replicas: Any, body_bytes: int) -> None:
        """body_bytes: the most that a request's body may have."""
        self._replicas = replicas.options(stream=True)
        self._body_bytes = body_bytes
        self._draw = random.Random()

    async def __call__(self, request: Request) -> Response:
        """One request. Errors in the shape of the API that was asked, as those of the replicas."""
        try:
            wire = await self._wire(request)
            ask = functools.partial(self._ask, prefix_keys(wire.body), wire)
            attempts = one_answer(ask, _LOST, resumes=_has_seed(wire.path))
            head = await anext(attempts)
        except ApiError as error:
            content = content_for(request.scope["path"], error)
            return JSONResponse(content, error.status, headers=error.headers)
        assert isinstance(head, Head)
        headers = {name: value for name, value in head.headers.items() if name not in _HOP}
        if streams(head):
            return StreamingResponse(attempts, head.status, headers=headers)  # type: ignore[arg-type]
        body = b"".join([piece async for piece in attempts if isinstance(piece, bytes)])
        return Response(body, head.status, headers=headers)

    def _ask(self, keys: tuple[int, ...], wire: Wire) -> AsyncIterator[Head | bytes]:
        pieces: AsyncIterator[Head | bytes] = self._replicas.answer.remote(keys, wire)
        return pieces

    async def _wire(self, request: Request) -> Wire:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._body_bytes:
                raise ApiError(413, f"the body has more than {self._body_bytes} bytes", code="body_too_large")
        given = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        path = request.scope["path"]
        seeded = with_seed(bytes(body), self._draw) if _has_seed(path) else bytes(body)
        # What a replica's Host check is for, the web page that renames itself, cannot reach it here.
        return Wire(request.method, path, seeded, {**given, "host": "localhost"})


def _has_seed(path: str) -> bool:
    return path.endswith("/completions")


def application(asked: Asked) -> Any:
    """Replicas behind a front, bound together. The configuration is read here, so that its errors show."""
    config = asked.configuration()
    # More than a replica runs at once it may queue; what is beyond waits at the front.
    ongoing = config.engine.requests + config.server.queue
    scale: dict[str, Any] = {"num_replicas": asked.replicas}
    if asked.most > asked.replicas:
        follow = AutoscalingConfig(
            min_replicas=asked.replicas,
            max_replicas=asked.most,
            target_ongoing_requests=float(config.engine.requests),
        )
        scale = {"autoscaling_config": follow}
    routing = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"slack": asked.slack}
    )
    replicas = serve.deployment(
        name="replica",
        max_ongoing_requests=ongoing,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=float(config.server.drain_seconds),
        ray_actor_options={"num_cpus": asked.cpus},
        request_router_config=routing,
        **scale,
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=asked.front,
        max_ongoing_requests=config.server.connections,
        ray_actor_options={"num_cpus": 0},
    )(Front)
    return front.bind(replicas.bind(asked), config.server.body)
