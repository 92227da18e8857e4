"""The chat page: one document without external parts, built from the files of the folder `page`."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

SCRIPTS = ("event_stream.js", "answer.js", "conversation.js", "markdown.js", "elements.js", "view.js", "chat.js")
"""The parts of the page's script, in their order."""
POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The browser applies only this style, runs only this script, sends requests only to this server, and parses no text as
HTML."""


async def chat_page(_: Request) -> Response:
    """Return the chat page."""
    page, policy = _build()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(page, media_type="text/html", headers=headers)


@cache
def _build() -> tuple[str, str]:
    """Return the page and its content security policy."""
    style = _read("style.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    page = _read("page.html").replace("{{style}}", style).replace("{{script}}", script)
    return page, POLICY.format(style=_hash(style), script=_hash(script))


def _read(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text()


def _hash(text: str) -> str:
    """Return the hash of an inline style or script, for the policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
