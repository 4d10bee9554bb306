"""Ctrl-C, SIGTERM and SIGHUP end what runs by an exception, so that it clears up behind itself.

Where nothing can be raised Python drops it: every import runs such a callback, and so does the end
of many objects. Python prints the interrupt, "Exception ignored", and goes on as if nothing had
been. A library that tries what it imports, whatever that raises, goes on without a word.
"""

from __future__ import annotations

import signal
import sys
import threading

_ENDING = (signal.SIGTERM, signal.SIGHUP)  # sent by a service manager, and by a closed terminal
_AGAIN_S = 0.05  # by then what dropped it has returned

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Terminated(SystemExit):
    """A signal of `_ENDING` came; the exit code is what a shell reports of a program it ended."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def hear_signals() -> None:
    """From now on SIGTERM and SIGHUP raise, too, unless the parent process has them ignored; and
    one that was dropped comes once more, a moment later.
    """
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _hear)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)
    sys.unraisablehook = _hear_again


def end_if_asked() -> None:
    """Raises again for a signal that came; for where what it raised may have been caught."""
    if _heard:
        for again in _to_come:  # once is enough: another would end what clears up
            again.cancel()
        raise _raised_by(_heard[-1])


_heard: list[int] = []
_to_come: list[threading.Timer] = []


def _hear(number: int, _: object) -> None:
    _heard.append(number)
    raise _raised_by(number)


def _raised_by(number: int) -> BaseException:
    return Terminated(number) if number in _ENDING else KeyboardInterrupt()


def _hear_again(dropped: UnraisableHookArgs) -> None:
    if dropped.exc_type not in (KeyboardInterrupt, Terminated):
        sys.__unraisablehook__(dropped)
        return
    number = _heard[-1] if dropped.exc_type is Terminated else signal.SIGINT
    again = threading.Timer(_AGAIN_S, _send, [number])
    again.daemon = True
    _to_come.append(again)
    again.start()


def _send(number: int) -> None:
    """To the main thread, out of whatever it waits for."""
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, number)
