"""Who may read the dashboard: reading only, known host names, a token when it is bound beyond this machine.

Without a token the Host header must name this machine, so that a web page that points a name of its own at 127.0.0.1
(DNS rebinding) is refused. Does not encrypt: on an untrusted network use an SSH tunnel.
"""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
MIN_TOKEN = 16


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Rules:
    """What is asked of a request. `token` None: only that it names this machine."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    @property
    def cookie(self) -> str:
        """Its name: browsers share cookies between ports, so the port is in it."""
        return f"overnight-{self.port}"

    @property
    def pass_mark(self) -> str:
        """What the cookie holds: never the token itself."""
        return hashlib.sha256(f"overnight:{self.token}".encode()).hexdigest()

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this machine or the address that was bound."""
        name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdigit() else header
        name = name.strip("[]").rstrip(".").lower()
        return is_local(name) or name == self.host.lower()

    def lets_in(self, given: str) -> bool:
        """Whether this is the token."""
        return self.token is not None and secrets.compare_digest(given.encode(), self.token.encode())

    def remembers(self, header: str) -> bool:
        """Whether a Cookie header carries the pass."""
        try:
            found = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self.pass_mark.encode())


class Guard:
    """Stands before the application."""

    def __init__(self, app: App, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let a request through, answer it, or drop what is not HTTP."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_encoded(HEADERS)]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
            return
        status, words, headers = refusal
        start = {"type": "http.response.start", "status": status, "headers": _encoded(headers)}
        await send_guarded(start)
        await send({"type": "http.response.body", "body": words.encode()})

    def _refusal(self, scope: Message) -> tuple[int, str, dict[str, str]] | None:
        plain = {"content-type": "text/plain; charset=utf-8"}
        if scope["method"] not in {"GET", "HEAD"}:
            return 405, "The dashboard only shows: use GET.\n", {**plain, "allow": "GET, HEAD"}
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._rules.token is None:
            if self._rules.knows_host(headers.get("host", "")):
                return None
            return 421, "This dashboard answers to localhost only.\n", plain
        return self._token_refusal(scope, headers, plain)

    def _token_refusal(
        self, scope: Message, headers: dict[str, str], plain: dict[str, str]
    ) -> tuple[int, str, dict[str, str]] | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is not None and self._rules.lets_in(given):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            place = quote("/" + scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
            cookie = f"{self._rules.cookie}={self._rules.pass_mark}; HttpOnly; SameSite=Strict; Path=/"
            return 303, "", {"location": place, "set-cookie": cookie}
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._rules.lets_in(bearer) or self._rules.remembers(headers.get("cookie", "")):
            return None
        return 401, "Open the address that `overnight dashboard` printed: it holds the token.\n", plain


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
