"""One client's connection, with the limits of time that uvicorn has not: for a request that does
not become whole, and for an answer that is not read.
"""

from __future__ import annotations

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_S = 75.0
"""A request, headers and body, is whole by then. A late body is refused before, by the guard."""

UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""An answer that waits goes on as long as its client takes so much of it in every `UNREAD_S`."""

_log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """Ends with a client that is too slow, and its request with it.

    What an answer sends waits until all before it is in the kernel's buffer: here lies one part of
    an answer at most.
    """

    _receiving: asyncio.TimerHandle | None = None  # while there is no whole request
    _sending: asyncio.TimerHandle | None = None  # while the kernel's buffer is full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As a base class of uvicorn's has it, for transports that write."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._limit_request()

    def data_received(self, data: bytes) -> None:
        """Further bytes give a request no further time."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._limit_request()
        elif self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

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
            "A client read %d bytes of its answer in %g s: its request ends.", num_read, UNREAD_S
        )
        self.transport.abort()
