"""Lines between ranks of different hosts, on which bytes go behind the training: no collective, and nothing that grows.

A rank listens on one port, and calls those that it has something for. Messages over a process group would need one with
all ranks in it, whose threads cannot be told to stop while they wait for a message that never comes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ckpt.runtime.comm import Comm

log = logging.getLogger("ckpt")

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that says which network gloo uses; copies take the same."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class Lines:
    """A port that others call, and their addresses. Making one is collective, in an entered operation.

    Args:
        comm: all ranks.
        answer: called with each line that a peer opens, in a thread of its own; the line is closed behind it.

    Raises:
        ConfigError: this host has no address that others could call.
    """

    def __init__(self, comm: Comm, answer: Callable[[Connection], None]) -> None:
        # Whoever does not know the word cannot bring copies: it is told to the ranks of this job alone.
        self._word = comm.on_root("word", lambda: secrets.token_bytes(32))
        self._answer = answer
        self._listener = comm.run("listen", self._listen)
        said = comm.gather("addresses", lambda: msgspec.msgpack.encode(self._listener.address))
        self._addresses = [msgspec.msgpack.decode(one, type=tuple[str, int]) for one in said]
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="ckpt copies listen", daemon=True)
        self._thread.start()

    def _listen(self) -> Listener:
        try:
            return Listener((address_here(), 0), backlog=64)
        except OSError as error:
            raise ConfigError(f"peers: no address for others to call ({error}); {INTERFACE} names one") from error

    def call(self, rank: int) -> Connection:
        """Return a line to a rank.

        Raises:
            OSError: it does not answer.
        """
        try:
            return Client(self._addresses[rank], authkey=self._word)
        except (AuthenticationError, EOFError, ValueError) as error:  # the last: this host has no MD5 for the proof
            raise ConnectionError(f"rank {rank} does not take the call: {error}") from error

    def _accept(self) -> None:
        while not self._closed:
            try:
                line = self._listener.accept()
            except ConnectionError:
                continue  # somebody has hung up at once
            except OSError as error:
                if not self._closed:
                    log.warning("no more copies of log records can come here: %s", error)
                return
            if self._closed:
                line.close()
                return
            threading.Thread(target=self._serve, args=(line,), name="ckpt copies receive", daemon=True).start()

    def _serve(self, line: Connection) -> None:
        """Answer a call, once the caller has proved to be one of the job. A silent one keeps nobody waiting."""
        with line:
            try:
                deliver_challenge(line, self._word)
                answer_challenge(line, self._word)
            except (AuthenticationError, EOFError, OSError, ValueError):
                return
            self._answer(line)

    def close(self) -> None:
        """Take no more calls."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # wakes who waits for a call
                Client(self._listener.address).close()
            self._thread.join(1.0)
            self._listener.close()


def address_here() -> str:
    """Return the address of this host in the network that the job's ranks meet in.

    It is that of the interface that ``GLOO_SOCKET_IFNAME`` names first, else the one from which the rendezvous
    (``MASTER_ADDR``) is reached.

    Raises:
        OSError: there is none.
    """
    names = os.environ.get(INTERFACE, "").split(",")[0].strip()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        if names:
            found = fcntl.ioctl(one.fileno(), _GET_ADDRESS, struct.pack("256s", names[:15].encode()))
            return socket.inet_ntoa(found[20:24])
        # Nothing is sent: to connect a datagram socket is to ask the system for the way.
        one.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))
        address: str = one.getsockname()[0]
        return address
