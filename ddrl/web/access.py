"""Access to the page: sessions behind a password, forms of this page only, headers that forbid all else."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "ddrl_session"
SESSION_S = 12 * 3600.0
MOST_SESSIONS = 1_000
MOST_NAME = 40
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # else browsers send no origin with a form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Session:
    """Someone who gave the password.

    Attributes:
        name: as they call themselves, for the journal.
        token: that their forms carry.
        ends: time.monotonic().
    """

    name: str
    token: str = field(default_factory=secrets.token_urlsafe)
    ends: float = field(default_factory=lambda: time.monotonic() + SESSION_S)


class Sessions:
    """The sessions of this process; they end with it.

    Args:
        password: empty: there are none, and everyone may look.
    """

    def __init__(self, password: str) -> None:
        self.has_password = bool(password)
        self._password, self._sessions = password.encode(), dict[str, Session]()

    def open(self, name: str, password: str) -> str | None:
        """Return the cookie of a new session; None if the password is wrong."""
        if not self.has_password or not hmac.compare_digest(password.encode(), self._password):
            return None
        while len(self._sessions) >= MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        cookie = secrets.token_urlsafe()
        shown = "".join(character for character in name if character.isprintable()).strip()
        self._sessions[cookie] = Session(shown[:MOST_NAME] or "someone")
        return cookie

    def of(self, request: Request) -> Session | None:
        """Return the session of a request, if it has one that has not ended."""
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        return session if session and session.ends > time.monotonic() else None

    def close(self, request: Request) -> None:
        """End the session of a request."""
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)


def is_from_here(request: Request) -> bool:
    """Return whether a form was sent by a page of this server."""
    return urlsplit(request.headers.get("origin", "")).netloc == request.headers.get("host")


def is_own_form(request: Request, token: object, session: Session) -> bool:
    """Return whether a form was sent by a page that the session has opened."""
    return is_from_here(request) and hmac.compare_digest(str(token).encode(), session.token.encode())


class SafeHeaders:
    """Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        is_page = not str(scope.get("path", "")).startswith("/static/")
        added = HEADERS | {"cache-control": "no-store" if is_page else "no-cache"}

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in added.items()]
            await send(message)

        await self._app(scope, receive, send_with)
