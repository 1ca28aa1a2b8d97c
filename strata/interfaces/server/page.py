"""The page at /: a few plain files of the package, sent as they are."""

from __future__ import annotations

import functools
import mimetypes
from pathlib import Path

from starlette.responses import Response

_FOLDER = Path(__file__).parent / "web"
# Nothing but the page's own files and this server; no inline scripts or styles; no frame around it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@functools.cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type of every file, by its path on the server; the page itself is "/"."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        where = "/" if path.name == "index.html" else f"/page/{path.name}"
        found[where] = path.read_bytes(), kind
    return found


def page_response(content: bytes, kind: str) -> Response:
    """A file with the headers that keep others' scripts out."""
    return Response(content, media_type=kind, headers=_HEADERS)
