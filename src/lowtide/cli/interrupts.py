"""Ctrl-C where Python would drop it: within a callback from which nothing can be raised.

Every import runs such a callback, and so does the end of many objects. Python prints the
interrupt, "Exception ignored", and goes on as if nothing had been.
"""

from __future__ import annotations

import signal
import sys
import threading

_AGAIN_S = 0.05  # by then what dropped it has returned

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def hear_dropped() -> None:
    """From now on a Ctrl-C that was dropped comes once more, a moment later."""
    sys.unraisablehook = _hear_again


def _hear_again(dropped: UnraisableHookArgs) -> None:
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(_AGAIN_S, _interrupt)
    again.daemon = True
    again.start()


def _interrupt() -> None:
    """The main thread, out of whatever it waits for."""
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)
