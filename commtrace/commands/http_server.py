"""Pages and numbers of a run over HTTP: to this host alone, or to others with a token, and read only.

What is served is a WSGI application; `serve` puts a guard before it, whoever wrote it. Requests name no files: an
application knows the few paths that it answers.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import parse_qs, quote, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from commtrace.errors import CommtraceError, warn

from .option_types import LOOPBACK

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

Headers: TypeAlias = Mapping[str, str]

_LOCAL_NAMES: Final = frozenset({"localhost", LOOPBACK, "[::1]"})
_REQUEST_SECONDS: Final = 10.0
"""Time in which a client must have sent its request."""
_ANSWER_SECONDS: Final = 60.0
"""Time in which a client must have taken the answer."""
_MAX_CONNECTIONS: Final = 512
_TOKEN_BYTES: Final = 24
_HEADERS: Final = {
    "Server": "commtrace",  # the server's own would name the version of Python
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer: no other site embeds it, and no browser keeps it."""


class Server:
    """A server in threads of its own.

    Attributes:
        url: The address to open, with the token if one is required.
    """

    def __init__(self, server: _Server, token: str | None) -> None:
        host, port = server.server_address[:2]
        name = str(host)
        if ipaddress.ip_address(name).is_unspecified:
            name = socket.gethostname()
        shown = f"[{name}]" if ":" in name else name
        self.url = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


@contextlib.contextmanager
def serve(
    app: WSGIApplication, port: int, address: str, token: str | None, *, requires_token: bool
) -> Iterator[Server]:
    """Serve an application to GET and HEAD.

    Args:
        app: Answers GET.
        port: Its port.
        address: Its address. At one of this host alone, requests for other host names are refused: a page of another
            site, whose name was made to point here, could read the answers.
        token: Requests must carry it: once as `?token=`, then in the cookie that is set, or as
            `Authorization: Bearer`. None: no token.
        requires_token: Whether a token is made if none is given and other hosts can reach the address.

    Raises:
        CommtraceError: The address or port is not to be had.
    """
    try:
        server = _Server(address, port)
    except OSError as error:
        raise CommtraceError(f"{address} port {port}: {error.strerror or error}; choose another") from None
    host = ipaddress.ip_address(server.server_name)
    if token is None and requires_token and not host.is_loopback:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
    names = {*_LOCAL_NAMES, address.lower(), f"[{address.lower()}]"} if host.is_loopback else None
    server.set_app(_guarded(app, names, token, f"commtrace-{server.server_port}"))
    with server:
        serving = threading.Thread(target=server.serve_forever, name="commtrace-http", daemon=True)
        serving.start()
        try:
            yield Server(server, token)
        finally:
            server.shutdown()
            serving.join()


def answer(
    start: StartResponse, status: str, text: str | bytes, kind: str = "text/plain", headers: Headers | None = None
) -> list[bytes]:
    """Begin an answer of a WSGI application, and return its body."""
    body = text.encode() if isinstance(text, str) else text
    own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
    start(status, [*own.items(), *(headers or {}).items()])
    return [body]


# ---- what is refused -----------------------------------------------------------------------------------------------


def _guarded(app: WSGIApplication, names: set[str] | None, token: str | None, cookie: str) -> WSGIApplication:
    """Return an application that answers requests for one of these host names, with the token, that only read."""

    def guard(environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        def with_headers(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> object:
            return start(status, [*headers, *_HEADERS.items()])

        begin: StartResponse = with_headers  # type: ignore[assignment]
        body = _refusal(environ, begin, names, token, cookie)
        if body is None:
            try:
                body = [*app({**environ, "REQUEST_METHOD": "GET"}, begin)]
            except Exception as error:  # a traceback would be printed into the screen of `top`
                warn(f"{environ['PATH_INFO']}: {error!r}")
                body = answer(begin, "500 Internal Server Error", "The answer could not be made.\n")
        return [] if environ["REQUEST_METHOD"] == "HEAD" else body

    return guard


def _refusal(
    environ: WSGIEnvironment, start: StartResponse, names: set[str] | None, token: str | None, cookie: str
) -> list[bytes] | None:
    """Return the body of an answer that refuses a request, or moves its token to a cookie; None: it may go on."""
    if names is not None and _host_name(environ) not in names:
        return answer(start, "421 Misdirected Request", "This server answers requests for this host alone.\n")
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return answer(start, "405 Method Not Allowed", "Read only.\n", headers={"Allow": "GET, HEAD"})
    if token is None or _carries(environ, token, cookie):
        return None
    query = parse_qs(environ.get("QUERY_STRING", ""))
    if any(_equal(value, token) for value in query.pop("token", ())):
        # Not in the address from now on, which browsers keep in their history.
        path = "/" + quote(environ["PATH_INFO"].lstrip("/"), safe="/", encoding="latin-1")
        location = path + (f"?{urlencode(query, doseq=True)}" if query else "")
        kept = f"{cookie}={token}; HttpOnly; SameSite=Lax; Path=/"
        return answer(start, "303 See Other", "", headers={"Location": location, "Set-Cookie": kept})
    text = "Open the address with the ?token= that the command has printed, or send Authorization: Bearer.\n"
    return answer(start, "401 Unauthorized", text, headers={"WWW-Authenticate": "Bearer"})


def _host_name(environ: WSGIEnvironment) -> str:
    """Return the host name of the request, without its port: a tunnel may have another one."""
    name: str = environ.get("HTTP_HOST", "")
    return re.sub(r":\d*\Z", "", name).lower()


def _carries(environ: WSGIEnvironment, token: str, cookie: str) -> bool:
    """Return whether a request has the token in a header."""
    scheme, _, credentials = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() == "bearer" and _equal(credentials.strip(), token):
        return True
    with contextlib.suppress(CookieError):
        cookies = SimpleCookie(environ.get("HTTP_COOKIE", ""))
        return cookie in cookies and _equal(cookies[cookie].value, token)
    return False


def _equal(given: str, token: str) -> bool:
    """Compare in a time that does not depend on how much of the token is right."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


# ---- connections ---------------------------------------------------------------------------------------------------


class _Handler(WSGIRequestHandler):
    """A request, of which nothing is printed."""

    server: _Server
    timeout = _ANSWER_SECONDS
    """Also the time for all of an answer: socket.sendall counts it so."""

    def parse_request(self) -> bool:
        """Note that the request is complete."""
        is_complete = super().parse_request()
        self.server.has_request(self.connection)
        return is_complete

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def get_stderr(self) -> io.StringIO:
        """Return where the traceback of a client that went away is written."""
        return io.StringIO()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, which has a time limit, so that slow clients keep no others waiting."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, port: int) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, place = found[0]
        self._lock = threading.Lock()
        self._awaited: dict[socket.socket, float] = {}
        """Connections without a complete request, and when they are closed."""
        self._count = 0
        super().__init__((str(place[0]), port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking for the name of the address, for which a resolver may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Begin a connection, unless there are too many."""
        with self._lock:
            is_refused = self._count >= _MAX_CONNECTIONS
            if not is_refused:
                self._count += 1
                self._awaited[request] = time.monotonic() + _REQUEST_SECONDS
        if is_refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_request(request)
            with self._lock:
                self._count -= 1

    def has_request(self, request: socket.socket) -> None:
        """Note that a request is complete, or given up."""
        with self._lock:
            self._awaited.pop(request, None)

    def service_actions(self) -> None:
        """End connections whose request takes too long. A timeout of the socket would begin anew with each byte."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._awaited.items() if until < now]
            for request in late:
                del self._awaited[request]
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go away."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            warn(f"a request failed: {error!r}")
