"""Several replicas of the server behind Ray Serve (extra `ray`); `build` is what `serve run` asks for.

serve run strata.interfaces.ray_serve:build config=server.yaml replicas=2
"""

from __future__ import annotations

from typing import Any


def build(arguments: dict[str, str]) -> Any:
    """The Ray Serve application. arguments: see `deployment.Asked`. Raises UsageError, and ConfigError."""
    from strata.interfaces.ray_serve.deployment import Asked, application  # ray is an extra

    return application(Asked.parse(arguments))
