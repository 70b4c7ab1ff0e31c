"""Whether other programs use the cores while times are taken."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from ..utils.printable import counted

# Samples of what else runs, seconds between them, and the share of the cores above
# which the machine is called busy.
_SAMPLES, _PAUSE, _BUSY = 10, 0.03, 0.25


def others_running() -> list[float]:
    """How many other threads run or wait for a core, sampled; empty if unknown."""
    samples = []
    for _ in range(_SAMPLES):
        time.sleep(_PAUSE)
        try:
            facts = Path("/proc/loadavg").read_text("ascii").split()
        except OSError:  # no Linux
            return []
        samples.append(max(0.0, float(facts[3].partition("/")[0]) - 1))
    return samples


def busy_note(others: Sequence[float], cores: int | None = None) -> str:
    """What samples of :func:`others_running` say of times; empty: nothing.

    Args:
        cores: those of the machine; ``None``: of this one.
    """
    cores = cores or os.cpu_count() or 1
    busy = sum(others) / max(1, len(others))
    if busy <= _BUSY * cores:
        return ""
    return (
        f"This machine is busy: on average {busy:.1f} other threads wanted its "
        f"{counted(cores, 'core')}. So these times say little."
    )
