"""What the app answers: requests for its own address, from its own page, of a bounded size, and with the token where
others can reach it.

A web page from elsewhere can send requests to a server on this machine, and by DNS rebinding even read the answers.
Such requests name another Host or another Origin, and are refused before anything else sees them.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COOKIE = "sightline_token"
STARTED = "/gradio_api/startup-events"  # Gradio's own request to itself
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class TooLarge(Exception):
    """A request's body exceeds the limit."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token(host: str) -> str | None:
    """None where only this machine can reach the server."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


def names_of(host: str) -> frozenset[str]:
    """The names under which the server may be addressed, besides numbers if others may reach it."""
    if is_loopback(host):
        return frozenset({*LOOPBACK, host})
    return frozenset({*LOOPBACK, host, socket.gethostname().lower(), socket.getfqdn().lower()})


class Guard:
    """Wraps an ASGI application."""

    def __init__(self, app: Any, *, host: str, token: str | None, most_bytes: int):
        self.app, self.token, self.most_bytes = app, token, most_bytes
        self.names, self.open = names_of(host), not is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self.refusal(scope, headers)
        if refusal is not None:
            await refuse(scope, send, *refusal)
        elif (given := self.token_in_query(scope)) is not None:
            await accept(send, given)
        else:
            await self.bounded(scope, receive, send, headers)

    def refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """The status and the reason, for a request that is not answered."""
        host = headers.get("host", "")
        if not self.is_own(host):
            return 403, f"this server is not called {host[:80]!r}"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, f"requests from {origin[:80]!r} are refused"
        if self.token is not None and scope["path"] != STARTED:
            given = self.token_in_query(scope) or self.token_in_cookie(headers)
            if given is None or not hmac.compare_digest(given.encode(), self.token.encode()):
                return 401, "open the address with the token that `sightline app` printed"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.most_bytes:
            return 413, f"more than {self.most_bytes >> 20} MiB"
        return None

    def is_own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.names:
            return True
        try:  # a number cannot be rebound to another one
            return self.open and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def token_in_query(self, scope: Scope) -> str | None:
        if self.token is None or scope["type"] != "http" or scope["path"] != "/":
            return None
        return next(iter(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", ())), None)

    @staticmethod
    def token_in_cookie(headers: dict[str, str]) -> str | None:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if found is None else found.value

    async def bounded(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        """The body may come in pieces without a length."""
        if scope["type"] == "websocket" or "content-length" in headers:
            await self.app(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most_bytes:
                raise TooLarge
            return message

        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, counted, watched)
        except TooLarge:
            if not began:
                await refuse(scope, send, 413, f"more than {self.most_bytes >> 20} MiB")


async def refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"sightline: {reason}\n".encode()})


async def accept(send: Send, token: str) -> None:
    """Keep the token in a cookie of this server alone, and take it out of the address."""
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode("latin-1"))]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
