"""One client's connection, with time limits that uvicorn lacks.

They hold for requests that stay incomplete and answers that are not read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowtide.serve.request_log import LIMIT, LimitedLog

MAX_CONNECTIONS = 1024
"""For one more the longest silent one goes that waits for nothing but its client."""

FIRST_BYTE_S = 10.0
"""The first byte has come by then."""

RECEIVE_S = 75.0
"""A request, headers and body, is whole by then. A late body is refused before, by the guard."""

UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""An answer that waits goes on while all of it, or so much, enters the kernel's buffer in every
`UNREAD_S`. The kernel takes more only once a part of its buffer has been read."""

PART_BYTES = 16 << 10
"""What is read of a request before the event loop has another turn: it may be in thousands of
chunks."""

PROBE_S = 0.1, 5.0
"""Time to the first look whether a client that sends no more is still there, and between looks."""

KEEPALIVE_S = 5
"""Silence after which the kernel asks the client's (HTTP/1.0, which has no interim answers)."""

_TCP_CLOSE = 7  # a state of Linux's tcp_info

_log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """Ends with a client that is too slow, and its request with it.

    What an answer sends waits until all before it is in the kernel's buffer, so at most one part of
    an answer is buffered in this process.
    """

    _receiving: asyncio.TimerHandle | None = None  # while there is no whole request
    _sending: asyncio.TimerHandle | None = None  # while the kernel's buffer is full
    _probing: asyncio.TimerHandle | None = None  # while its client sends no more
    _feeding: asyncio.Handle | None = None  # while there is `_unread`
    _heard_s = 0.0  # of its last bytes, on the loop's clock
    _heard_any = False
    _is_half = False  # its client sends no more

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._unread = bytearray()
        self.logger = LimitedLog(self.logger)  # type: ignore[assignment]
        self.access_log = False  # where the program that hosts it has a log, too: it shows queries

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As a base class of uvicorn's has it, for transports that write."""
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)
        self._limit_request(min(FIRST_BYTE_S, RECEIVE_S))

    def data_received(self, data: bytes) -> None:
        """Further bytes give a request no further time."""
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
        """Go on with the answer to a whole request: the client sends no more, but may still read.

        Only writing tells whether it has gone, so interim answers precede one that has not begun.
        Over HTTP/1.0 the kernel's probes tell, once the client's kernel has forgotten it: within
        about a minute.
        """
        self._is_half = self._is_answering
        if self._is_half and self._probing is None:
            if self.scope["http_version"] == "1.0":
                self._keep_alive()
            self._probe(PROBE_S[0])
        return self._is_half

    def on_response_complete(self) -> None:
        """What sends no more asks no more."""
        super().on_response_complete()
        if self._is_half:
            self.transport.close()

    def pause_writing(self) -> None:
        """The kernel's buffer is full."""
        super().pause_writing()
        self._limit_answer()

    def resume_writing(self) -> None:
        """All has left."""
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        super().connection_lost(exc)
        self._unread.clear()
        for timer in (self._receiving, self._sending, self._probing, self._feeding):
            if timer is not None:
                timer.cancel()

    @property
    def _is_answering(self) -> bool:
        """Whether it has brought a whole request whose answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def _make_room(self) -> bool:
        """Ends the longest silent of the others. False: each waits for an answer."""
        silent = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and not each._is_answering
        ]
        if not silent:
            return False
        longest = min(silent, key=lambda each: each._heard_s)
        longest.transport.abort()
        self.connections.discard(longest)  # now, and not when the loop comes to it
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
        """Write what a client that is there skips, and one that has gone answers with a reset."""
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
        """Have the kernel probe the client."""
        tcp, peer = socket.IPPROTO_TCP, self.transport.get_extra_info("socket")
        with suppress(OSError):  # no TCP
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                peer.setsockopt(tcp, name, KEEPALIVE_S)

    def _is_reset(self) -> bool:
        """Return whether the client's kernel knows the connection no more.

        The event loop does not see it: it no longer reads from this socket.
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
