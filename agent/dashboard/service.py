"""The web server: routes to views, on one socket, until Ctrl-C. Read-only; the guard stands before every route."""

import errno
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.dashboard.access import MIN_TOKEN, Guard, Rules, is_local
from agent.dashboard.feed import Feed
from agent.dashboard.shelf import Shelf
from agent.dashboard.views import Views
from agent.errors import InputError, MachineError, OvernightError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

TOKEN_VARIABLE = "OVERNIGHT_DASHBOARD_TOKEN"  # noqa: S105 - a name
ASSETS = {"overnight.css": "text/css", "dashboard.js": "text/javascript"}
MISSING = "The dashboard needs starlette and uvicorn: pip install 'overnight[dashboard]'."


@dataclass(frozen=True)
class Bound:
    """A listening socket, and who may read through it."""

    socket: socket.socket
    rules: Rules

    @property
    def address(self) -> str:
        """What to open in a browser, with the token where one is needed."""
        host = f"[{self.rules.host}]" if ":" in self.rules.host else self.rules.host
        return f"http://{host}:{self.rules.port}/" + (f"?token={self.rules.token}" if self.rules.token else "")


def check_extra() -> None:
    """Raises MachineError naming the extra where the web server is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MachineError(MISSING) from error


def bind(host: str, port: int, token: str | None) -> Bound:
    """Take the address; raises InputError or MachineError naming what is in the way, and the remedy."""
    if token is not None and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable()):
        raise InputError(f"{TOKEN_VARIABLE} must be at least {MIN_TOKEN} plain characters.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host} is no address of this machine: use 127.0.0.1.") from error
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise _bind_failure(error, host, port) from error
    needed = None if is_local(host) else secrets.token_urlsafe(24)
    return Bound(listening, Rules(host, int(listening.getsockname()[1]), token or needed))


def _bind_failure(error: OSError, host: str, port: int) -> OvernightError:
    if error.errno == errno.EADDRINUSE:
        return MachineError(f"Port {port} is in use: choose another with --port, or --port 0 for any free one.")
    if error.errno == errno.EADDRNOTAVAIL:
        return InputError(f"--host {host} is no address of this machine: use 127.0.0.1.")
    return MachineError(f"--host {host} --port {port} cannot be used ({error.strerror}): choose another --port.")


def serve(shelf: Shelf, bound: Bound, ready: Callable[[], None]) -> None:
    """Call `ready` once a signal would end it well, then answer until SIGINT or SIGTERM."""
    import uvicorn

    server: Any = None

    def end(*_: object) -> None:
        server.should_exit = True

    app = Guard(application(shelf, lambda: bool(server.should_exit)), bound.rules)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # its lines would hold the token
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=32 * 1024,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)  # uvicorn raises a signal again when it has ended: that is no failure
    ready()
    server.run(sockets=[bound.socket])


def application(shelf: Shelf, ending: Callable[[], bool]) -> "Starlette":
    """The routes."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from agent.morning.page import asset
    from agent.morning.writing import night_json

    views, feed = Views(shelf), Feed(shelf, ending)

    def page(make: Callable[["Request"], str]) -> Callable[["Request"], "Response"]:
        def answer(request: "Request") -> "Response":
            try:
                return HTMLResponse(make(request))
            except InputError as error:
                return HTMLResponse(views.message("Not found", str(error)), 404)
            except OvernightError as error:
                return HTMLResponse(views.message("Cannot be read now", str(error)), 503)

        return answer

    def static(request: "Request") -> "Response":
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response(asset(name), media_type=ASSETS[name])

    def data(request: "Request") -> "Response":
        try:
            return JSONResponse(night_json(shelf.night(request.path_params["name"])))
        except OvernightError as error:
            return JSONResponse({"error": str(error)}, 404 if isinstance(error, InputError) else 503)

    async def events(_request: "Request") -> "Response":
        if feed.full:
            return PlainTextResponse("Too many pages are listening: close some.\n", 503)
        return StreamingResponse(feed.events(), media_type="text/event-stream")

    def missing(_request: "Request", _error: Exception) -> "Response":
        return HTMLResponse(views.message("Not found", "There is no such page."), 404)

    one = "/session/{name}/experiment/{number:int}"
    return Starlette(
        routes=[
            Route("/", page(lambda _: views.home())),
            Route("/kernels", page(lambda asked: views.kernels(_text(asked, "target"), _text(asked, "device")))),
            Route("/search", page(lambda asked: views.search(_text(asked, "q")))),
            Route("/compare", page(lambda asked: views.compare(_text(asked, "a"), _text(asked, "b")))),
            Route(
                "/session/{name}",
                page(lambda asked: views.session(_name(asked), everything="all" in asked.query_params)),
            ),
            Route(one, page(lambda asked: views.experiment(_name(asked), _number(asked)))),
            Route(one + "/body", page(lambda asked: views.experiment(_name(asked), _number(asked), body_only=True))),
            Route("/api/sessions", lambda _: JSONResponse(shelf.names())),
            Route("/api/session/{name}", data),
            Route("/static/{name}", static),
            Route("/events", events),
        ],
        exception_handlers={404: missing},
    )


def _text(request: "Request", name: str) -> str:
    return str(request.query_params.get(name, ""))


def _name(request: "Request") -> str:
    return str(request.path_params["name"])


def _number(request: "Request") -> int:
    return int(request.path_params["number"])
