"""A client that goes while many parts of its answer are ready together."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from scripted_serving import ScriptedService, listening
from serving import asked
from whole import wait_until

from lowtide.parsing.pieces import Piece, Text

NUM_PIECES = 200


class Burst(list[Piece]):
    """Pieces that are ready together; a client resets its connection as the first are sent."""

    client: socket.socket

    def __iter__(self) -> Iterator[Piece]:
        for number, piece in enumerate(super().__iter__()):
            if number == 3:
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.client.close()
            yield piece


def test_nothing_more_is_written_to_it(caplog: pytest.LogCaptureFixture) -> None:
    """Else asyncio says on standard error that a send failed, in the middle of the log."""
    service = ScriptedService([])
    service.script = burst = Burst([Text(str(number)) for number in range(NUM_PIECES)])
    with caplog.at_level(logging.WARNING), listening(service) as url, suppress(OSError):
        body = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}
        with asked(url, "/v1/chat/completions", **body) as burst.client:
            wait_until(lambda: service.num_closed == 1)
    assert service.num_closed == 1
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
