"""Kill a process that writes entries, again and again; look at what it leaves.

    python -m tests.prefix.killed SOURCE FOLDER KILLS SEED

A child puts the entries of SOURCE into FOLDER, in a random order that respects
what stands on what, and is killed at a random moment. Without mlx, so that a
kill takes milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from specdec.prefix.disk import DiskTier
from specdec.prefix.files import is_entry, read_header, read_verified
from specdec.prefix.writer import Job

MANY = 1 << 30
# Lives end from before the first byte is written to behind the last one.
LONGEST_LIFE = 1.5  # of the time that a whole life takes on this machine


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
        write(folder, jobs)
        os._exit(0)
    return child


def whole_life(folder: Path, jobs: dict[str, Job]) -> float:
    """Seconds that a child takes that nobody kills; the folder is left empty."""
    start = time.perf_counter()
    os.waitpid(begin(folder, jobs), 0)
    seconds = time.perf_counter() - start
    for path in list(folder.iterdir()):
        path.unlink()
    return seconds


def kill_one(folder: Path, jobs: dict[str, Job], life: float) -> bool:
    """Let a child write for ``life`` seconds at most; whether that cut it short."""
    child = begin(folder, jobs)
    time.sleep(life)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    kills, draw = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    jobs = jobs_of(source)
    longest = LONGEST_LIFE * whole_life(folder, jobs)
    cut_short = partial = 0
    while cut_short < kills:
        cut_short += kill_one(folder, jobs, draw.uniform(0, longest))
        left = check(folder, jobs)
        partial += 0 < left < len(jobs)
        if left == len(jobs):  # nothing to write any more: forget some
            for path in list(folder.iterdir()):
                if draw.random() < 0.7 and is_entry(path.name):
                    path.unlink()
            # What has lost its parent goes when that is missed a second time.
            DiskTier(folder, MANY).refresh()
            check(folder, jobs)
    print(cut_short, partial)


if __name__ == "__main__":
    main()
