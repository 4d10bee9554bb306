"""Ctrl-C and SIGTERM: both end what runs by an exception, so that it clears up behind itself.

Where nothing can be raised Python drops it: every import runs such a callback, and so does the end
of many objects. Python prints the interrupt, "Exception ignored", and goes on as if nothing had
been.
"""

from __future__ import annotations

import signal
import sys
import threading

_AGAIN_S = 0.05  # by then what dropped it has returned

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Terminated(SystemExit):
    """SIGTERM came; the program's exit code is what a shell reports of one that it ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def hear_signals() -> None:
    """From now on SIGTERM raises, unless whoever started this has it ignored; and one of the two
    that was dropped comes once more, a moment later."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _hear_again


def _terminate(*_: object) -> None:
    raise Terminated


def _hear_again(dropped: UnraisableHookArgs) -> None:
    if dropped.exc_type not in (KeyboardInterrupt, Terminated):
        sys.__unraisablehook__(dropped)
        return
    number = signal.SIGTERM if dropped.exc_type is Terminated else signal.SIGINT
    again = threading.Timer(_AGAIN_S, _send, [number])
    again.daemon = True
    again.start()


def _send(number: signal.Signals) -> None:
    """To the main thread, out of whatever it waits for."""
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, number)
