"""One client's connection, with time limits that uvicorn lacks: for requests that stay incomplete
and answers that are not read.
"""

from __future__ import annotations

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 1024
"""More are closed as they are made."""

RECEIVE_S = 75.0
"""A request, headers and body, is whole by then. A late body is refused before, by the guard."""

UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""An answer that waits goes on while all of it, or so much, enters the kernel's buffer in every
`UNREAD_S`. The kernel takes more only once a part of its buffer has been read."""

_log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """Ends with a client that is too slow, and its request with it.

    What an answer sends waits until all before it is in the kernel's buffer, so at most one part of
    an answer is buffered in this process.
    """

    _receiving: asyncio.TimerHandle | None = None  # while there is no whole request
    _sending: asyncio.TimerHandle | None = None  # while the kernel's buffer is full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As a base class of uvicorn's has it, for transports that write."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=0)
        self._limit_request()

    def data_received(self, data: bytes) -> None:
        """Further bytes give a request no further time."""
        super().data_received(data)
        state = self.conn.their_state
        # What was refused before it was whole has ended now: the next has a time of its own.
        is_between = state is h11.IDLE and not self.conn.trailing_data[0]
        if self._receiving is not None and (is_between or state not in (h11.IDLE, h11.SEND_BODY)):
            self._receiving.cancel()
            self._receiving = None
        if state in (h11.IDLE, h11.SEND_BODY):
            self._limit_request()

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
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()

    def _limit_request(self) -> None:
        if self._receiving is None:
            self._receiving = self.loop.call_later(RECEIVE_S, self.transport.abort)

    def _limit_answer(self) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(UNREAD_S, self._check_reader, num_waiting)

    def _check_reader(self, num_before: int) -> None:
        num_read = num_before - self.transport.get_write_buffer_size()
        if num_read >= MIN_READ_BYTES:
            self._limit_answer()
            return
        _log.warning(
            "A client is too slow: %d bytes were sent to it in %g s; its request ends.",
            num_read,
            UNREAD_S,
        )
        self.transport.abort()
