"""Who comes in. A shared box has other users, who reach every port of loopback, and browsers run code of
strangers.

A URL with a token is printed, good for one visit. That visit gets a cookie, under a path that only who came
in knows: browsers send a cookie of 127.0.0.1 to every port of it, so to servers of other users too, but never
under that path. The name of the host must be loopback's own (a stranger's domain may resolve to 127.0.0.1),
and pages from elsewhere may ask nothing.
"""

import secrets
from collections import deque

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

_COOKIE = "lorad"
_VISITS = 8  # browsers that stay known: the latest

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self' {sockets}; frame-ancestors 'none'; base-uri "
    "'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}  # styles: the terminal's own script writes some
_UNKNOWN = (
    "401: lorad shows nothing here without the URL that `lorad tui --serve` printed. It is good for "
    "one visit: press enter in the terminal where that runs, and it prints another one.\n"
)
_HOST = "403: lorad answers as 127.0.0.1 or localhost, on its own port, and as nothing else.\n"
_ORIGIN = "403: pages from elsewhere may ask lorad nothing.\n"


class Door:
    """Guards one server. base: the path under which everything lies, without a slash at its end."""

    def __init__(self, port: int) -> None:
        self.base = f"/{secrets.token_urlsafe(16)}"
        self._port = port
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        sockets = " ".join(f"ws://{host}" for host in sorted(self._hosts))
        self._headers = {name: value.format(sockets=sockets) for name, value in _HEADERS.items()}
        self._token: str | None = None
        self._keys: deque[str] = deque(maxlen=_VISITS)

    def offer(self) -> str:
        """Return a URL that is good for one visit; the URL before is good for none."""
        self._token = secrets.token_urlsafe(32)
        return f"http://127.0.0.1:{self._port}/?token={self._token}"

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Hand on what may come in; 403 for a wrong host or origin, 401 for who holds no key.

        Who brings the token, which is then used up, gets a key.
        """
        origin = request.headers.get(hdrs.ORIGIN)
        if request.host not in self._hosts:
            return web.Response(status=403, text=_HOST)
        if origin is not None and origin != f"http://{request.host}":
            return web.Response(status=403, text=_ORIGIN)
        token = request.query.get("token", "") if request.path == "/" else ""
        is_get = request.method == hdrs.METH_GET
        if is_get and self._token is not None and _same(token, self._token):
            self._token = None
            key = secrets.token_urlsafe(32)
            self._keys.append(key)
            response = web.Response(status=303, headers={hdrs.LOCATION: f"{self.base}/"})
            response.set_cookie(_COOKIE, key, path=f"{self.base}/", httponly=True, samesite="Strict")
            return response
        brought = request.cookies.get(_COOKIE, "")
        if not any(_same(brought, key) for key in self._keys):
            return web.Response(status=401, text=_UNKNOWN)
        if hdrs.UPGRADE in request.headers and origin is None:
            return web.Response(status=403, text=_ORIGIN)
        return await handler(request)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say in every answer, also a refusal, what a browser may do with it."""
        response.headers.update(self._headers)


def _same(brought: str, ours: str) -> bool:
    """Compare in constant time."""
    return secrets.compare_digest(brought.encode(errors="replace"), ours.encode())
