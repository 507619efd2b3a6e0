"""A network between a client and a server on loopback that breaks on demand."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["pass", "refuse", "cut request", "cut answer", "stall", "503"]
MODES: tuple[Mode, ...] = ("refuse", "cut request", "cut answer", "stall", "503")
_ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"


class Proxy:
    """Forwards connections to `port`. `mode` counts for connections that send something from then on."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.mode: Mode = "pass"
        self._lifted = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: Mode) -> None:
        self.mode = mode
        if mode == "pass":
            self._lifted.set()
        else:
            self._lifted.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target), timeout=30)
        except OSError:
            _reset(client)
            return
        threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
        try:
            while data := client.recv(1 << 16):
                mode = self.mode
                if mode == "refuse":
                    break
                if mode == "503":
                    client.sendall(_ANSWER)
                    break
                if mode == "stall":
                    self._lifted.wait(10)
                    break
                if mode == "cut request":
                    server.sendall(data[: len(data) // 2])
                    break
                server.sendall(data)
        except OSError:
            pass
        finally:
            _reset(client)
            server.close()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                if self.mode == "cut answer":  # it took effect, and nobody will know
                    break
                client.sendall(data)
        except OSError:
            pass
        finally:
            _reset(client)
            server.close()


def _reset(connection: socket.socket) -> None:
    """Close with RST, not with a polite end."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
