"""Signal handlers that end the program by an exception, so that it cleans up.

Python drops an exception raised by a handler inside an import's callback or a finaliser: it prints
"Exception ignored" and continues. Some libraries swallow whatever their imports raise. A dropped
signal is therefore sent once more, a moment later.
"""

from __future__ import annotations

import signal
import sys
import threading

_ENDING = (signal.SIGTERM, signal.SIGHUP)  # sent by a service manager, and by a closed terminal
_AGAIN_S = 0.05  # by then the code that dropped it has returned

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Terminated(SystemExit):
    """Raised for a signal of `_ENDING`; the exit code is the one a shell would report."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def install_signal_handlers() -> None:
    """Make SIGTERM and SIGHUP raise, too, unless the parent process has them ignored.

    A signal whose exception was dropped is sent again a moment later.
    """
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
    sys.unraisablehook = _resend


def reraise_signal() -> None:
    """Raise again for a signal that came, where its exception may have been caught."""
    if _received:
        for again in _timers:  # a second one would interrupt the cleaning up
            again.cancel()
        raise _exception_of(_received[-1])


_received: list[int] = []
_timers: list[threading.Timer] = []


def _handle(number: int, _: object) -> None:
    _received.append(number)
    raise _exception_of(number)


def _exception_of(number: int) -> BaseException:
    return Terminated(number) if number in _ENDING else KeyboardInterrupt()


def _resend(dropped: UnraisableHookArgs) -> None:
    if dropped.exc_type not in (KeyboardInterrupt, Terminated):
        sys.__unraisablehook__(dropped)
        return
    number = _received[-1] if dropped.exc_type is Terminated else signal.SIGINT
    again = threading.Timer(_AGAIN_S, _send, [number])
    again.daemon = True
    _timers.append(again)
    again.start()


def _send(number: int) -> None:
    """Send a signal to the main thread, interrupting its system call."""
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, number)
