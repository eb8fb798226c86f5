"""A TCP port before a server, with or without TLS, whose connections break as networks break them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import socket
import ssl
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trustme


class Tap:
    """Sees what a connection carries; this one does nothing with it."""

    def sent(self, data: bytes) -> bool:
        """See what the client sends; return whether the server gets it, else the connection is reset."""
        return True

    def received(self, data: bytes) -> bool:
        """See what the server sends; return whether the client gets it, else the connection is reset."""
        return True


class Proxy:
    """Carries connections to a server, and breaks them on request.

    Args:
        server_url: `unix://...` of the server behind it.
        context: the server's side of TLS; None: plain TCP.
        tap: makes the tap of each connection, an object with the methods of `Tap`.
    """

    def __init__(
        self,
        server_url: str,
        context: ssl.SSLContext | None = None,
        tap: Callable[[], Any] = Tap,
    ) -> None:
        self._tap, self._delay_s, self._loss = tap, 0.0, 0.0
        server = urlsplit(server_url)
        self._path, self._context, self._port = server.path, context, 0
        self._clients, self._cut = set[StreamWriter](), set[StreamWriter]()
        self.num_connections = 0
        """All that reached the server."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.accept()
        self.address = f"{server.netloc}localhost:{self._port}/0"
        self.url = f"{'rediss' if context else 'redis'}://{self.address}"

    def _run(self, action: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result()

    def accept(self) -> None:
        """Accept connections, again after `refuse`."""
        listening = asyncio.start_server(self._carry, "127.0.0.1", self._port, ssl=self._context)
        self._listener = self._run(listening)
        self._port = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Make the present connections half-open, and return their number; new ones work.

        Neither FIN nor RST is sent, and nothing arrives any more.
        """

        async def cut() -> int:
            before = len(self._cut)
            self._cut |= self._clients
            return len(self._cut) - before

        return int(self._run(cut()))

    def slow(self, delay_s: float, loss: float) -> None:
        """Delay whatever is carried; a share `loss` of it by 0.2 s more, as a packet that TCP sends again."""
        self._delay_s, self._loss = delay_s, loss

    def freeze(self, for_s: float) -> None:
        """Carry nothing for a time; connections stay open, and new ones are accepted."""
        self._loop.call_soon_threadsafe(time.sleep, for_s)

    def refuse(self) -> None:
        """Reset the present connections and refuse new ones until `accept`."""

        async def refuse() -> None:
            self._listener.close()
            for client in self._clients:
                client.transport.abort()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        self._run(refuse())

    def close(self) -> None:
        """End the proxy and its connections."""
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _carry(self, reader: StreamReader, client: StreamWriter) -> None:
        """Carry data both ways until one side ends, then reset both."""
        self._clients.add(client)
        linger = b"\1\0\0\0\0\0\0\0"  # the end is a reset
        client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        with contextlib.suppress(OSError):  # the server is away: so is the port
            server_reader, server = await asyncio.open_unix_connection(self._path)
            self.num_connections += 1
            tap = self._tap()
            sent = asyncio.create_task(self._copy(reader, server, client, tap.sent))
            received = asyncio.create_task(self._copy(server_reader, client, client, tap.received))
            await asyncio.wait((sent, received), return_when=asyncio.FIRST_COMPLETED)
            if client in self._cut:
                await sent  # the client of a half-open connection notices nothing
            server.transport.abort()
        client.transport.abort()
        self._clients.discard(client)
        self._cut.discard(client)

    async def _copy(
        self,
        source: StreamReader,
        target: StreamWriter,
        client: StreamWriter,
        see: Callable[[bytes], bool],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._delay_s:  # and sometimes as long as until a lost packet is sent again
                    is_lost = random.random() < self._loss
                    await asyncio.sleep(self._delay_s + 0.2 * is_lost)
                if client not in self._cut:
                    if not see(data):
                        return
                    target.write(data)
                    await target.drain()


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
        before, after = (past, past + datetime.timedelta(days=1)) if expired else (None, None)
        self._ca.issue_cert(name, not_before=before, not_after=after).configure_cert(context)
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
