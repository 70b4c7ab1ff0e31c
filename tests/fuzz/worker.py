"""The process that runs cases, and what it watches while it does.

It says on a pipe what it begins and what it found, and ends with the first fault: what
comes after one may have come of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specdec.prompts import templates
from specdec.utils import child

# Bytes that a case may take beside what the process has, and that all may leave.
MOST_BYTES = 400 << 20
# Where asking for memory fails; what is touched before that is over the other bound.
MOST_ADDRESSES = 2 << 30
MOST_LEFT = 48 << 20
MOST_LEFT_ARRAYS = 1 << 20
# Many cases have templates that never end.
TEMPLATE_SECONDS = 2
# Cases before anything is compared: caches of other libraries have filled.
WARM = 0.3
# Fewer cases than that say nothing of growth.
ENOUGH = 50


@dataclass
class Held:
    """What the process holds."""

    descriptors: int
    threads: int
    arrays: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        import mlx.core as mx

        for process in child._CHILDREN:  # or one has pipes at one of the looks alone
            process.close()
        gc.collect()
        mx.clear_cache()
        return cls(
            len(os.listdir("/dev/fd")),
            threading.active_count(),
            mx.get_active_memory(),
            _resident(),
        )

    def grown(self, before: Held) -> str | None:
        """What is more than it was by more than chance allows."""
        allowed = {
            "descriptors": 0,
            "threads": 1,
            "arrays": MOST_LEFT_ARRAYS,
            "resident": MOST_LEFT,
        }
        for name, more in allowed.items():
            old, new = getattr(before, name), getattr(self, name)
            if new > old + more:
                return f"{name} grew from {old} to {new}"
        return None


def _resident() -> int:
    """Bytes of memory; where there is no /proc, the most that it ever was."""
    resident = _status("VmRSS")
    return _most_resident() if resident is None else resident


def _most_resident() -> int:
    most = _status("VmHWM")
    if most is not None:
        return most
    # On Linux this would begin with the most of the process that started this one.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int | None:
    """Bytes under a name in Linux's status of the process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(t for t in status.read_text().splitlines() if t.startswith(name))
    return int(line.split()[1]) * 1024


def bound_memory() -> None:
    """Let what asks for too much fail at once, and not the machine."""
    data = _status("VmData")
    if data is not None:
        most = data + MOST_ADDRESSES
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def watched(run: Callable[[], None], seconds: int, waiting: int) -> None:
    """Run a case in bounded time, and look at the memory that it took."""
    from .case import fail

    resident, most = _resident(), _most_resident()
    # Not a limit of the system's: what a case starts would have it for good.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(waiting, exit=True)
    try:
        run()
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
    after = _most_resident()
    if after > most and after - resident > MOST_BYTES:
        fail(f"it took {(after - resident) >> 20} MiB")


def _written() -> str:
    """What went to standard output or error, a file here, past what a case looks at."""
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.fstat(2).st_size
    return os.pread(2, min(size, 3000), 0).decode("utf-8", "replace") if size else ""


def work(options: argparse.Namespace, say: Callable[..., None]) -> bool:
    """Run cases; whether nothing was found."""
    import mlx.core as mx

    from .case import KINDS, Case, World

    top = Path(tempfile.gettempdir())
    world = World(top.parent / "shared")
    world.folder.mkdir()
    seeds = range(options.first, options.first + options.count)
    steps = [(seed, name) for seed in seeds for name in options.kinds]
    steps = steps[options.skip :]
    warm = int(len(steps) * WARM)
    before: Held | None = None
    mx.set_cache_limit(1 << 20)
    for number, (seed, name) in enumerate(steps):
        if number == len(options.kinds):
            gc.freeze()  # libraries are there: each command ends with a collection
        if number == warm:
            before = Held.now()
        say(begin=name, seed=seed)
        # Each its own: a writer in the background may come late to the one before.
        place = top.parent / f"case-{number}"
        place.mkdir()
        os.chdir(place)
        case = Case(random.Random(f"{name} {seed}"), place, world)
        try:
            watched(partial(KINDS[name], case), options.seconds, options.waiting)
            if left := os.listdir(top):
                raise AssertionError(f"files are left in the temporary folder: {left}")
            if text := _written():
                raise AssertionError(f"it is written to the terminal: {text}")
        except BaseException as error:  # whatever it is, it is reported
            say(fault="".join(traceback.format_exception(error)))
            return False
        shutil.rmtree(place, ignore_errors=True)
    os.chdir(top)
    growth = before and len(steps) >= ENOUGH and Held.now().grown(before)
    if growth:
        say(growth=growth)
        return False
    world.close()
    left = [t.name for t in threading.enumerate() if not t.daemon]
    if left != [threading.main_thread().name]:
        say(growth=f"threads are left: {left}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--waiting", type=int, required=True)
    parser.add_argument("--plugin", help="a module to import before, with more kinds")
    parser.add_argument("kinds", nargs="+")
    options = parser.parse_args()
    pipe = os.fdopen(options.pipe, "w", encoding="utf-8")

    def say(**line: Any) -> None:
        pipe.write(json.dumps(line) + "\n")
        pipe.flush()

    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    temporary = options.folder / "tmp"
    temporary.mkdir()
    # Not TMPDIR: MLX's compiled kernels stay where the next process finds them.
    tempfile.tempdir = str(temporary)
    os.environ["XDG_CACHE_HOME"] = str(options.folder / "cache")
    __import__(options.plugin or "tests.fuzz.kinds")
    templates.SECONDS = TEMPLATE_SECONDS
    bound_memory()
    if not work(options, say):
        pipe.close()
        os._exit(1)  # whatever holds it
    say(end=True)


if __name__ == "__main__":
    main()
