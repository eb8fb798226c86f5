"""A TCP port before a server, whose connections tests break in the ways that networks break them."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from urllib.parse import urlsplit


class Proxy:
    """A TCP port before a server, whose connections can be broken in the ways that networks break them.

    Args:
        server_url: `unix://...` or `redis://...` of the server behind it.
    """

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        self._target: str | tuple[str, int] = (
            parts.path if parts.scheme == "unix" else (parts.hostname or "127.0.0.1", parts.port or 6379)
        )
        self._listener = self._listen(0)
        self._port: int = self._listener.getsockname()[1]
        credentials = parts.netloc.rpartition("@")[0]
        self.url = f"redis://{credentials + '@' if credentials else ''}127.0.0.1:{self._port}/0"
        self._pairs: list[_Pair] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = self._closed = False
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Connections that still carry something."""
        return sum(pair.alive and not pair.dead for pair in self._pairs)

    def freeze(self) -> None:
        """Carry nothing, on old and new connections, until `thaw`; what was sent arrives then."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Carry on after `freeze`, accept again after `refuse`."""
        self._refusing = False
        self._flowing.set()

    def cut(self) -> int:
        """Make the connections of now half-open: no FIN, no RST, nothing arrives any more. New ones work."""
        cut = [pair for pair in self._pairs if pair.alive and not pair.dead]
        for pair in cut:
            pair.dead = True
        return len(cut)

    def refuse(self) -> None:
        """Reset the connections of now and refuse new ones until `thaw`."""
        self._refusing = True
        for pair in self._pairs:
            pair.close()

    def close(self) -> None:
        """End the proxy and its connections."""
        self._closed = True
        self._flowing.set()
        self._thread.join()
        self._listener.close()
        for pair in self._pairs:
            pair.close()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        return listener

    def _accept(self) -> None:
        while not self._closed:
            if self._refusing:
                self._listener.close()
                while self._refusing and not self._closed:
                    time.sleep(0.02)
                self._listener = self._listen(self._port)
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            try:
                pair = _Pair(client, self._target, self._flowing)
            except OSError:  # the server is away: so is the port
                client.close()
                continue
            self._pairs = [*(pair for pair in self._pairs if pair.alive), pair]
            if self._refusing:
                pair.close()


class _Pair:
    """A client's connection and the proxy's own to the server, with a thread that carries between them."""

    def __init__(
        self, client: socket.socket, target: str | tuple[str, int], flowing: threading.Event
    ) -> None:
        self._client = client
        self._server = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
        try:
            self._server.connect(target)
        except OSError:
            self._server.close()
            raise
        self._flowing = flowing
        self.alive, self.dead = True, False
        threading.Thread(target=self._carry, name="proxy-pair", daemon=True).start()

    def close(self) -> None:
        self.alive = False

    def _carry(self) -> None:
        other = {self._client: self._server, self._server: self._client}
        try:
            while self.alive:
                readable = select.select(list(other), [], [], 0.05)[0]
                self._flowing.wait()
                for source in readable:
                    data = source.recv(1 << 16)
                    if self.dead:
                        if source is self._client and not data:
                            return  # the client gave up
                        time.sleep(0 if data else 0.05)  # swallowed
                        continue
                    if not data:
                        return
                    other[source].sendall(data)
        except OSError:
            pass
        finally:
            self.alive = False
            for side in other:
                with contextlib.suppress(OSError):  # a reset, not a farewell
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                side.close()
