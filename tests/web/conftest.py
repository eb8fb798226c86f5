"""The page on a port of its own, and a client that sends what a browser sends."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlencode

import pytest
import uvicorn
from redis import Redis

from ddrl.web import app, command

PASSWORD = "open sesame"


@dataclass
class Answer:
    """An answer of the page."""

    code: int
    headers: dict[str, str]
    text: str


@dataclass
class Visitor:
    """Someone with a browser, who has the cookies that the page gave."""

    port: int
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        own = {"origin": f"http://localhost:{self.port}", "content-type": "application/x-www-form-urlencoded"}
        return self.send("POST", path, urlencode(form), own | headers)

    def send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {"host": f"localhost:{self.port}"} | headers
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            if cookie := answer.headers.get("set-cookie"):
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value
            return Answer(answer.status, dict(answer.headers.items()), answer.read().decode())
        finally:
            connection.close()

    def log_in(self, name: str = "Ada", password: str = PASSWORD) -> Answer:
        return self.post("/login", {"name": name, "password": password, "to": "/"})


@pytest.fixture
def serve(client: Redis) -> Iterator[Callable[..., Visitor]]:
    """Starts the page with options of `app.create`; returns a visitor."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**options: object) -> Visitor:
        bound = command._bind("127.0.0.1", 0)
        made = app.create(client, **{"hosts": command.LOOPBACK} | options)  # type: ignore[arg-type]
        server = uvicorn.Server(uvicorn.Config(made, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        started.append((server, thread))
        return Visitor(bound.getsockname()[1])

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(30)


@pytest.fixture
def visitor(serve: Callable[..., Visitor]) -> Visitor:
    """The page as `ddrl web` starts it."""
    return serve()
