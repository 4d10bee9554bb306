"""A client connection with time limits that uvicorn lacks.

The limits cover incomplete requests and answers that the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowtide.serve import open_files
from lowtide.serve.request_log import LIMIT, LimitedLog

MAX_CONNECTIONS = 1024
"""A connection beyond this, or beyond what the limit of open files leaves room for, replaces the
longest idle one that waits for its client."""

FIRST_BYTE_S = 10.0
"""Time limit for a connection's first byte."""

RECEIVE_S = 75.0
"""Time limit for a whole request. The guard refuses a late body earlier, with an answer."""

UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""A blocked answer continues if all of it, or this much, enters the kernel's buffer in each
`UNREAD_S`. The kernel accepts more only after the client has read part of its buffer."""

PART_BYTES = 16 << 10
"""Bytes of a request parsed in one turn of the event loop; they may hold thousands of chunks."""

PROBE_S = 0.1, 5.0
"""Delay of the first and of later checks that a half-closed client is still there."""

KEEPALIVE_S = 5
"""Silence before TCP keep-alive probes; for HTTP/1.0, which has no interim answers."""

_TCP_CLOSE = 7  # a state of Linux's tcp_info

_log = logging.getLogger(__name__)


class Flow(FlowControl):
    """Flow control in which an answer also waits after a failed write, till its end is known.

    A burst of parts would otherwise all be written to a client that has gone, and asyncio would
    say so for each.
    """

    _is_paused = False

    @property
    def write_paused(self) -> bool:
        return self._is_paused or self._transport.is_closing()

    @write_paused.setter
    def write_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    async def drain(self) -> None:
        if self._transport.is_closing():
            await asyncio.sleep(0)  # `connection_lost` is called in between
        await super().drain()


class Connection(H11Protocol):
    """HTTP connection that aborts, with its request, if the client is too slow.

    An answer's next part waits until all earlier ones are in the kernel's buffer, so this process
    buffers at most one part.
    """

    _receiving: asyncio.TimerHandle | None = None  # while there is no whole request
    _sending: asyncio.TimerHandle | None = None  # while the kernel's buffer is full
    _probing: asyncio.TimerHandle | None = None  # while half-closed
    _feeding: asyncio.Handle | None = None  # while there is `_unread`
    _heard_s = 0.0  # when the last bytes came, on the loop's clock
    _heard_any = False
    _is_half = False  # the client has closed its sending half

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._unread = bytearray()
        self.logger = LimitedLog(self.logger)  # type: ignore[assignment]
        self.access_log = False  # where the program that hosts it has a log, too: it shows queries

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limits, and make room if there are too many connections."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._heard_s = self.loop.time()
        most = min(MAX_CONNECTIONS, open_files.max_connections())
        if len(self.connections) > most and not self._make_room():
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)
        self._limit_request(min(FIRST_BYTE_S, RECEIVE_S))

    def data_received(self, data: bytes) -> None:
        """Parse bytes in parts; further bytes do not extend the request's time limit."""
        if not self._heard_any:
            self._heard_any = True
            self._limit_request(RECEIVE_S)
        self._heard_s = self.loop.time()
        if self._unread or len(data) > PART_BYTES:
            self._unread += data
            self._feed_soon()
        else:
            self._feed(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep answering whole requests: a client that sends no more may still read.

        Only writing shows that the client has gone. So interim (102) answers are written until the
        real one begins. HTTP/1.0 has none; there TCP keep-alive notices within about a minute.
        """
        self._is_half = True
        return bool(self._unread) or self._goes_on()

    def on_response_complete(self) -> None:
        """Close a half-closed connection after the last request that has come."""
        super().on_response_complete()
        if self._is_half and not self._unread and not self._goes_on():
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the time limit for reading the answer: the kernel's buffer is full."""
        super().pause_writing()
        self._limit_answer()

    def resume_writing(self) -> None:
        """Stop the time limit: everything has been handed to the kernel."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        super().connection_lost(exc)
        self._unread.clear()
        for timer in (self._receiving, self._sending, self._probing, self._feeding):
            if timer is not None:
                timer.cancel()

    @property
    def _is_answering(self) -> bool:
        """True while a whole request has come and its answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def _make_room(self) -> bool:
        """Abort the longest idle connection. Return False if all are being answered."""
        silent = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and not each._is_answering
        ]
        if not silent:
            return False
        longest = min(silent, key=lambda each: each._heard_s)
        longest.transport.abort()
        self.connections.discard(longest)  # now, not when the loop gets to it
        return True

    def _feed_soon(self) -> None:
        if self._feeding is None:
            self._feeding = self.loop.call_soon(self._feed_part)

    def _feed_part(self) -> None:
        self._feeding = None
        if self.transport.is_closing():
            self._unread.clear()
            return
        part = bytes(self._unread[:PART_BYTES])
        del self._unread[:PART_BYTES]
        if self._unread:
            self._feed_soon()
        self._feed(part)
        if self._is_half and not self._unread and not self._goes_on():
            self.transport.close()

    def _goes_on(self) -> bool:
        """Return True if a half-closed connection still has a request to answer."""
        if self._is_answering and self._probing is None:
            if self.scope["http_version"] == "1.0":
                self._keep_alive()
            self._probe(PROBE_S[0])
        return self._is_answering

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        # What was refused before it was whole has ended now: the next has a time of its own.
        is_between = state is h11.IDLE and not self.conn.trailing_data[0]
        if self._receiving is not None and (is_between or state not in (h11.IDLE, h11.SEND_BODY)):
            self._receiving.cancel()
            self._receiving = None
        if state in (h11.IDLE, h11.SEND_BODY) and self._receiving is None:
            self._limit_request(RECEIVE_S)

    def _probe(self, wait_s: float) -> None:
        """Write an interim answer, which a client skips, and which fails if the client has gone."""
        self._probing = None
        if self.transport.is_closing() or not self._is_answering:
            return
        if self.scope["http_version"] == "1.0":
            if self._is_reset():
                self.transport.abort()
                return
        elif not self.cycle.response_started:
            event = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(event) or b"")
        self._probing = self.loop.call_later(wait_s, self._probe, PROBE_S[1])

    def _keep_alive(self) -> None:
        """Turn on TCP keep-alive."""
        tcp, peer = socket.IPPROTO_TCP, self.transport.get_extra_info("socket")
        with suppress(OSError):  # no TCP
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                peer.setsockopt(tcp, name, KEEPALIVE_S)

    def _is_reset(self) -> bool:
        """Return True if the client's kernel has reset the connection.

        The event loop cannot see that, because it no longer reads from this socket.
        """
        peer = self.transport.get_extra_info("socket")
        try:
            state = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:  # no TCP
            return False
        return bool(state[0] == _TCP_CLOSE)

    def _limit_request(self, limit_s: float) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = self.loop.call_later(limit_s, self.transport.abort)

    def _limit_answer(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(UNREAD_S, self._check_reader, num_waiting)

    def _check_reader(self, num_before: int) -> None:
        num_read = num_before - self.transport.get_write_buffer_size()
        if num_read >= MIN_READ_BYTES:
            self._limit_answer()
            return
        if LIMIT.allows("Clients that are too slow"):
            _log.warning(
                "A client is too slow: %d bytes were sent to it in %g s; its request ends.",
                num_read,
                UNREAD_S,
            )
        self.transport.abort()
