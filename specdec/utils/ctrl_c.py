"""Ctrl-C while the command is being imported. Only small modules are imported here."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

#: The exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130


def end_at_once() -> None:
    """Let Ctrl-C end the process with one line, unless it is ignored (``nohup``)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def end(*_: object) -> None:
    """End the process with one line, whatever it is doing."""
    with suppress(OSError):
        os.write(2, b"specdec: interrupted\n")
    os._exit(INTERRUPTED)
