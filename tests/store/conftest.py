"""Fixtures of the store's tests."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis import Redis
from support.private_server import PrivateServer
from support.proxy import Authority, Proxy
from support.roles import ACL, ROLES, Roles
from support.store import make_run, take

from ddrl.store import connection

MakeServer, Patch = Callable[..., PrivateServer], pytest.MonkeyPatch


@pytest.fixture
def run(client: Redis) -> str:
    """A run that has neither learner nor worker."""
    return make_run(client)


@pytest.fixture
def token(client: Redis, run: str) -> int:
    """The fencing token of the run's learner."""
    return take(client, run)


@pytest.fixture
def roles(make_server: MakeServer, tmp_path: Path, monkeypatch: Patch) -> Iterator[Roles]:
    path, users = tmp_path / "users.acl", ""
    path.touch()
    server = make_server("--aclfile", str(path))
    for role in ("default", *ROLES):
        digest = hashlib.sha256(f"password-of-{role}".encode()).hexdigest()
        line = (ACL / f"{role}.acl").read_text("utf-8")
        users += line.replace(f"#SHA256_OF_THE_PASSWORD_OF_{role.upper()}", f"#{digest}")
    path.write_text(f"{users}user admin on >admin ~* &* +@all\n")
    server.client.acl_load()
    authority = Authority(tmp_path / "ca.pem")
    monkeypatch.setenv(connection.CA_VARIABLE, str(authority.path))
    admin = redis.Redis(unix_socket_path=str(server.socket), username="admin", password="admin")
    with contextlib.closing(Proxy(server.url, authority.server())) as proxy, admin:
        yield Roles(proxy, admin)
