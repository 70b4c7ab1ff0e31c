"""Compiles kernels before the first request, and reports progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("specdec.warm_up")

# Seconds after which progress is reported. Kernels that are compiled load faster.
PATIENCE = 1.0


class WarmUp:
    """Runs steps that compile kernels, and reports progress if they take long.

    Args:
        clock: gives the time in seconds.

    Attributes:
        seconds: the time that steps have taken so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds = 0.0
        self._clock = clock

    def run(
        self,
        steps: Sequence[Callable[[], object]],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run steps, each of which compiles something, while they are needed."""
        start = self._clock()
        slow = False
        try:
            for i, step in enumerate(steps):
                if not needed():
                    break
                slow = self._clock() - start > PATIENCE
                if slow:
                    log.info(
                        "compiling kernels for this GPU: %d of %d",
                        i + 1,
                        len(steps),
                        extra={"passing": True},
                    )
                step()
        finally:
            seconds = self._clock() - start
            self.seconds += seconds
        if slow or seconds > PATIENCE:
            log.info("kernels for this GPU were compiled in %.1f seconds", seconds)


#: The process has one, since kernels belong to the device, not to a decoder.
warm_up = WarmUp()
