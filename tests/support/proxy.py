"""A TCP port before a server, with or without TLS, whose connections break as networks break them."""

from __future__ import annotations

import contextlib
import datetime
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import trustme


class Proxy:
    """Carries connections to a server, and breaks them on request.

    Args:
        server_url: `unix://...` or `redis://...` of the server behind it.
        context: the server's side of TLS; None: plain TCP.
    """

    def __init__(self, server_url: str, context: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(server_url)
        self._target: str | tuple[str, int] = (
            parts.path if parts.scheme == "unix" else (parts.hostname or "127.0.0.1", parts.port or 6379)
        )
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port: int = self._listener.getsockname()[1]
        credentials, at, _ = parts.netloc.rpartition("@")
        self.address = f"{credentials}{at}{'localhost' if context else '127.0.0.1'}:{port}/0"
        self.url = f"{'rediss' if context else 'redis'}://{self.address}"
        self.num_connections = 0
        """All that reached the server."""
        self._pairs: list[_Pair] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name="proxy", daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Carry nothing, on old and new connections, until `thaw`; what was sent arrives then."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Carry on after `freeze`, accept again after `refuse`."""
        self._refusing = False
        self._flowing.set()

    def cut(self) -> int:
        """Make the present connections half-open, and return their number; new ones work.

        Neither FIN nor RST is sent, and nothing arrives any more.
        """
        open_pairs = [pair for pair in self._pairs if pair.is_open and not pair.is_cut]
        for pair in open_pairs:
            pair.is_cut = True
        return len(open_pairs)

    def refuse(self) -> None:
        """Reset the present connections and refuse new ones until `thaw`."""
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

    def _accept_all(self) -> None:
        address = self._listener.getsockname()
        while not self._closed:
            if self._refusing:
                self._listener.close()
                while self._refusing and not self._closed:
                    time.sleep(0.02)
                self._listener = socket.create_server(address, backlog=128)
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
        try:
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            server.connect(self._target)
        except OSError:  # no TLS, or the server is away: so is the port
            client.close()
            server.close()
            return
        self.num_connections += 1
        pair = _Pair(client, server, self._flowing)
        self._pairs = [*(pair for pair in self._pairs if pair.is_open), pair]
        if self._refusing:
            pair.close()
        pair.carry()


class _Pair:
    """A client's connection and the proxy's connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket, flowing: threading.Event) -> None:
        self._client, self._server, self._flowing = client, server, flowing
        self.is_open, self.is_cut = True, False

    def carry(self) -> None:
        """Carry data both ways until one side ends or `close` is called, then close both sides."""
        back = threading.Thread(target=self._copy, args=(self._server, self._client), daemon=True)
        back.start()
        self._copy(self._client, self._server)
        self.close()
        back.join()
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):  # a reset, not an orderly end
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            side.close()

    def close(self) -> None:
        """End both directions; nothing is sent to either side."""
        self.is_open = False
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(side, socket.SHUT_RD)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(1 << 16)
                self._flowing.wait()
                if not data or not self.is_open:
                    break
                if not self.is_cut:
                    target.sendall(data)
        if source is self._server and not self.is_cut:  # the client of a half-open connection notices nothing
            self.close()


class Authority:
    """A certificate authority, whose own certificate is in a file.

    Args:
        path: of that file.
    """

    def __init__(self, path: Path) -> None:
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(str(path))
        self.path = path

    def server(
        self, name: str = "localhost", *, expired: bool = False, asks_client: bool = False
    ) -> ssl.SSLContext:
        """Return a server's side of TLS with a certificate for `name`; clients need one too if it asks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        times = {"not_before": past, "not_after": past + datetime.timedelta(days=1)}
        self._ca.issue_cert(name, **(times if expired else {})).configure_cert(context)
        if asks_client:
            context.verify_mode = ssl.CERT_REQUIRED
            self._ca.configure_trust(context)
        return context

    def client(self, folder: Path) -> tuple[Path, Path]:
        """Return files of a client's certificate and key."""
        issued = self._ca.issue_cert("client")
        certificate, key = folder / "client.pem", folder / "client.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key
