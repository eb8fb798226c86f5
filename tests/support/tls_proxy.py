"""TLS before a server that has none: a proxy that ends it, and the certificates for that."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from pathlib import Path
from urllib.parse import urlsplit

import trustme


class Authority:
    """A CA, whose own certificate is in a file.

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
        """What a server needs to prove that it is `name`; clients too must have a certificate if it asks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        times = {"not_before": long_ago, "not_after": long_ago + datetime.timedelta(days=1)}
        self._ca.issue_cert(name, **(times if expired else {})).configure_cert(context)
        if asks_client:
            context.verify_mode = ssl.CERT_REQUIRED
            self._ca.configure_trust(context)
        return context

    def client(self, folder: Path) -> tuple[Path, Path]:
        """Files of a client's certificate and key."""
        issued = self._ca.issue_cert("client")
        certificate, key = folder / "client.pem", folder / "client.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


class TlsProxy:
    """Ends TLS on a port of the loopback, and carries what was inside to a server's unix socket.

    Args:
        server_url: `unix://...` of the server behind it.
        context: the server's side.
    """

    def __init__(self, server_url: str, context: ssl.SSLContext) -> None:
        parts = urlsplit(server_url)
        self._path, self._context = parts.path, context
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        credentials = parts.netloc.rpartition("@")[0]
        self.address = f"{credentials + '@' if credentials else ''}localhost:{self.port}/0"
        self.url = f"rediss://{self.address}"
        self.num_connections = 0
        """That spoke TLS to its liking."""
        threading.Thread(target=self._accept, name="tls", daemon=True).start()

    def close(self) -> None:
        """End the port; connections end with their clients."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with (
            peer,
            server,
            contextlib.suppress(OSError),
            self._context.wrap_socket(peer, server_side=True) as inside,
        ):
            server.connect(self._path)
            self.num_connections += 1
            back = threading.Thread(target=_carry, args=(server, inside), daemon=True)
            back.start()
            _carry(inside, server)
            back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Until one of them ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
