"""A server with the users of workers/acl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from support.proxy import Proxy

ACL = Path(__file__).parents[2] / "workers" / "acl"
ROLES = ("worker", "learner", "operator")


@dataclass(frozen=True)
class Roles:
    """A server with the example users, behind TLS, and an administrator of it."""

    proxy: Proxy
    admin: redis.Redis

    def url(self, role: str) -> str:
        """Return the URL by which a role reaches the server."""
        return f"rediss://ddrl-{role}:password-of-{role}@{self.proxy.address}"

    def denied(self) -> list[str]:
        """Return what was denied since the last call: user, reason, command or key."""
        rows: Any = self.admin.acl_log(count=100)
        self.admin.acl_log_reset()
        said = "{username}: {reason} {object} ({client-info[cmd]})"
        return [said.format(**row) for row in rows]
