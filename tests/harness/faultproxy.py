"""An HTTP proxy before an S3 server that fails as networks and servers do. Standard library only, in a thread.

::

    with FaultProxy(weed.port) as proxy:
        proxy.add(r"^PUT .*partNumber=3", "answer", status=503, code="SlowDown", times=2)
        store = S3Store.from_url(f"s3://bucket?endpoint={proxy.url}")

A rule's pattern is searched in the request's head (its first line and headers), so a rule can ask for a header. The
``Host`` header is passed through: signatures stay valid.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

ACTS = {
    "answer": "an error answer (status, code) without asking the server; status 200 is S3's error within a success",
    "answer after": "the same after the server has done what was asked",
    "reset": "the connection is reset before anything is forwarded",
    "reset mid": "the server gets the first `at` bytes of the body, then both connections are reset",
    "lose": "the server does what was asked, and the connection is reset instead of its answer",
    "truncate": "the answer's body ends after `at` bytes",
    "corrupt": "byte `at` of the answer's body is another",
    "corrupt up": "byte `at` of the request's body is another",
    "stall": "no answer, until the client gives up",
    "strip": "the header `code` is taken out of the request",
}
PIECE = 1 << 18


@dataclass
class Rule:
    """What happens to requests that match. ``hits``: how often it did; ``skip``: matches that are let through first."""

    pattern: re.Pattern[str]
    act: str
    times: int
    skip: int
    at: int
    status: int
    code: str
    hits: int = 0


@dataclass
class FaultProxy:
    """A running proxy to 127.0.0.1:``upstream``.

    ``latency``: seconds before each request; ``bandwidth``: bytes a second in each direction of all connections (0: as
    fast as it goes). ``seen``: the heads of all requests.
    """

    upstream: int
    latency: float = 0.0
    bandwidth: int = 0
    rules: list[Rule] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def add(
        self, pattern: str, act: str, *, times: int = 1, skip: int = 0, at: int = 0, status: int = 503, code: str = ""
    ) -> Rule:
        """Add a rule; the first that matches and is not used up acts."""
        if act not in ACTS:
            raise ValueError(f"act {act!r}, expected one of {sorted(ACTS)}")
        rule = Rule(re.compile(pattern, re.MULTILINE | re.IGNORECASE), act, times, skip, at, status, code)
        self.rules.append(rule)
        return rule

    def count(self, pattern: str) -> int:
        """Return how many requests there were whose head has this."""
        return sum(bool(re.search(pattern, head, re.MULTILINE | re.IGNORECASE)) for head in self.seen)

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        started = threading.Event()
        self.free_at = {"up": 0.0, "down": 0.0}

        async def serve() -> None:
            self.loop, self.done = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
            self.port = int(server.sockets[0].getsockname()[1])
            started.set()
            await self.done.wait()
            server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self.thread.start()
        if not started.wait(30):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.done.set)
        self.thread.join(30)

    # --------------------------------------------------------------------------------------------- in the proxy's loop

    def _rule(self, head: str) -> Rule | None:
        for rule in self.rules:
            if rule.times > 0 and rule.pattern.search(head):
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                rule.hits += 1
                return rule
        return None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # a side, or the proxy, is gone
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass on one request; return whether the connection may carry another."""
        raw = await reader.readuntil(b"\r\n\r\n")
        head = raw.decode("latin-1")
        rule = self._rule(head)
        act = rule.act if rule else ""
        self.seen.append(head)
        if self.latency:
            await asyncio.sleep(self.latency)
        if act == "reset":
            return _reset(writer)
        if act == "stall":
            while await reader.read(PIECE):
                pass
            return False
        if rule and act == "answer":
            if "100-continue" not in head.lower():
                await reader.readexactly(_length(head) or 0)
            return await _answer(writer, rule)
        if rule and act == "strip":
            raw = re.sub(rf"(?im)^{re.escape(rule.code)}:.*\r\n", "", head).encode("latin-1")
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20)
        try:
            up_writer.write(raw)
            return await self._exchange(rule, head, (reader, writer), (up_reader, up_writer))
        finally:
            up_writer.close()

    async def _exchange(
        self,
        rule: Rule | None,
        head: str,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        act, at = (rule.act, rule.at) if rule else ("", 0)
        length = _length(head) or 0
        stop = at if act == "reset mid" else None
        flip = at if act == "corrupt up" else None
        sending = asyncio.ensure_future(self._copy(client[0], server[1], length, "up", stop, flip))
        try:
            if act == "reset mid":
                # The server may answer "continue" first; a client that waits for it would never send anything.
                if "100-continue" in head.lower():
                    client[1].write(await server[0].readuntil(b"\r\n\r\n"))
                await sending
                _reset(server[1])
                return _reset(client[1])
            while True:
                raw = await server[0].readuntil(b"\r\n\r\n")
                if not raw.startswith(b"HTTP/1.1 100"):
                    break
                client[1].write(raw)
            early = not sending.done() and "100-continue" in head.lower() and length > 0
            if early:  # a final answer without "continue": the client will not send the body
                await asyncio.sleep(0)
                sending.cancel()
            else:
                await sending
        finally:
            sending.cancel()
        answer = raw.decode("latin-1")
        if act == "lose":
            return _reset(client[1])  # the head of the answer is there: it was done
        if rule and act == "answer after":
            return await _answer(client[1], rule)
        client[1].write(raw)
        has_body = not head.startswith("HEAD ") and not re.match(r"HTTP/1\.1 (204|304)", answer)
        whole = await self._body(answer, server[0], client[1], act, at) if has_body else True
        await client[1].drain()
        return whole and not early and "connection: close" not in answer.lower()

    async def _body(
        self, answer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, act: str, at: int
    ) -> bool:
        if "transfer-encoding: chunked" in answer.lower():
            while True:
                line = await reader.readline()
                writer.write(line)
                size = int(line.split(b";")[0], 16)
                writer.write(await reader.readexactly(size + 2))
                if not size:
                    return True
        length = _length(answer)
        stop = at if act == "truncate" else None
        return await self._copy(reader, writer, length, "down", stop, at if act == "corrupt" else None)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        length: int | None,
        way: str,
        stop: int | None,
        flip: int | None,
    ) -> bool:
        """Copy ``length`` bytes (None: to the end); return whether all of a known length have been copied."""
        done = 0
        limit = length if stop is None else stop
        while limit is None or done < limit:
            data = await reader.read(PIECE if limit is None else min(PIECE, limit - done))
            if not data:
                break
            if flip is not None and done <= flip < done + len(data):
                data = data[: flip - done] + bytes([data[flip - done] ^ 1]) + data[flip - done + 1 :]
            await self._wait_for_bandwidth(way, len(data))
            writer.write(data)
            await writer.drain()
            done += len(data)
        return length is not None and done == length

    async def _wait_for_bandwidth(self, way: str, nbytes: int) -> None:
        if self.bandwidth:
            now = time.monotonic()
            self.free_at[way] = max(self.free_at[way], now) + nbytes / self.bandwidth
            await asyncio.sleep(self.free_at[way] - now)


def _length(head: str) -> int | None:
    found = re.search(r"(?im)^content-length: *(\d+)", head)
    return int(found[1]) if found else None


async def _answer(writer: asyncio.StreamWriter, rule: Rule) -> bool:
    code = f"<Code>{rule.code}</Code><Message>injected</Message>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{code}</Error>' if rule.code else ""
    writer.write(
        f"HTTP/1.1 {rule.status} injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n{body}".encode()
    )
    await writer.drain()
    return False


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close with RST, as a peer does that has crashed."""
    with suppress(OSError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
