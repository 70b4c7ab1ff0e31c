"""What is compiled before the first request: done step by step, and reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("specdec.warm_up")

# Seconds of steps after which they are reported: what was compiled before takes less.
PATIENCE = 1.0


class WarmUp:
    """Runs what compiles, and reports how far it is where that takes long.

    Args:
        clock: seconds.

    Attributes:
        seconds: that steps have taken so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds = 0.0
        self._clock = clock

    def run(self, steps: Sequence[Callable[[], object]]) -> None:
        """Run the steps, each of which has something compiled."""
        begun = self._clock()
        slow = False
        try:
            for i, step in enumerate(steps):
                slow = self._clock() - begun > PATIENCE
                if slow:
                    log.info(
                        "compiling kernels for this GPU: %d of %d",
                        i + 1,
                        len(steps),
                        extra={"passing": True},
                    )
                step()
        finally:
            seconds = self._clock() - begun
            self.seconds += seconds
        if slow or seconds > PATIENCE:
            log.info("kernels for this GPU were compiled in %.1f seconds", seconds)


#: Of this process: kernels belong to the device, not to a decoder.
warm_up = WarmUp()
