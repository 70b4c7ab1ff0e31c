"""Kill a process that writes entries, again and again; look at what it leaves.

    python -m tests.prefix_cache.killed SOURCE FOLDER KILLS SEED

A child puts the entries of SOURCE into FOLDER, in a random order that respects
what stands on what, and is killed at a random moment. Without mlx, so that a
kill takes milliseconds.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from specdec.prefix_cache.disk import DiskTier, Job
from specdec.prefix_cache.files import is_entry, read_header, read_verified

MANY = 1 << 30
# Lives end from before the first byte is written to after the last one.
LONGEST_LIFE = 1.5  # of the time that the last one took whom nobody killed ...
GROWTH = 1.1  # ... and longer with every one that was cut short since then


def jobs_of(source: Path) -> dict[str, Job]:
    """What writes the entries of a folder again; those of a prefix in order."""
    found = [read_header(path) for path in source.iterdir()]
    return {
        file.name: Job(
            file.kind,
            file.place,
            None if file.is_first else file.parent,
            read_verified(source / file.name),
        )
        for file in sorted(found, key=lambda file: file.start)
    }


def write(folder: Path, jobs: dict[str, Job]) -> None:
    disk = DiskTier(folder, MANY)
    for job in jobs.values():
        if disk.takes(job.kind, job.place, job.parent):
            disk.write(job)
    disk.flush()


def check(folder: Path, jobs: dict[str, Job]) -> int:
    """Open the store, as the next run would; the number of entries it serves."""
    disk = DiskTier(folder, MANY)
    for file in disk.files:
        assert disk.read(file) == jobs[file.name].data, file.name
    # No half file, and none that stands on what is not there.
    present = {path.name for path in folder.iterdir()}
    assert present == {file.name for file in disk.files}, present
    return len(present)


def begin(folder: Path, jobs: dict[str, Job]) -> int:
    """A child that writes them all."""
    child = os.fork()
    if child == 0:
        try:
            write(folder, jobs)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def kill_one(folder: Path, jobs: dict[str, Job], life: float) -> float | None:
    """Let a child write for ``life`` seconds at most.

    Returns: the seconds that it took, ``None`` where it was cut short.
    """
    child, start = begin(folder, jobs), time.perf_counter()
    while (seconds := time.perf_counter() - start) < life:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, status
            return seconds
        time.sleep(min(life - seconds, 0.0005))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert status == 0, status
    return seconds


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    kills, draw = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    jobs = jobs_of(source)
    longest, cut_short, partial = math.inf, 0, 0
    while cut_short < kills:
        before = sum(is_entry(path.name) for path in folder.iterdir())
        seconds = kill_one(folder, jobs, draw.random() * longest)
        # Not measured once for all: the machine may be busy just then, or afterwards.
        if seconds is None:
            cut_short, longest = cut_short + 1, GROWTH * longest
        else:
            longest = LONGEST_LIFE * seconds
        left = check(folder, jobs)
        partial += before < left < len(jobs)
        if left == len(jobs):  # nothing to write any more: forget some
            for path in list(folder.iterdir()):
                if draw.random() < 0.7 and is_entry(path.name):
                    path.unlink()
            # What has lost its parent goes when that is missed a second time.
            DiskTier(folder, MANY).refresh()
            check(folder, jobs)
    # The last ones may have been killed too early to leave what a run can use.
    while check(folder, jobs) < len(jobs) // 2:
        kill_one(folder, jobs, draw.random() * longest)
    print(cut_short, partial)


if __name__ == "__main__":
    main()
