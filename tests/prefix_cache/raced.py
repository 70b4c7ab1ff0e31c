"""Two processes write the same entries into one folder at once, again and again.

    python -m tests.prefix_cache.raced SOURCE FOLDER RACES SEED

Each puts the entries of SOURCE into FOLDER, one of them with a budget that has place
for half of them, so that it removes what the other writes and looks for.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from specdec.prefix_cache.disk import DiskTier, Job

from .killed import MANY, jobs_of


def run(folder: Path, jobs: dict[str, Job], budget: int, seed: int) -> None:
    """Write, and read what is found: what is served is right."""
    draw = random.Random(seed)
    disk = DiskTier(folder, budget)
    for job in jobs.values():
        if disk.takes(job.kind, job.place, job.parent):
            disk.write(job)
        if draw.random() < 0.3:
            disk.refresh()
            for file in list(disk.files):
                data = disk.read(file)
                assert data is None or data == jobs[file.name].data, file.name
    disk.flush()


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    races, seed = int(sys.argv[3]), int(sys.argv[4])
    jobs = jobs_of(source)
    half = sum(len(job.data) for job in jobs.values()) // 2
    both = 0
    for race in range(races):
        children = []
        for i, budget in enumerate((MANY, half if race % 2 else MANY)):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    run(folder, jobs, budget, seed + 2 * race + i)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            _, status = os.waitpid(child, 0)
            assert status == 0, f"race {race}: a process failed"
        # As the next run finds it: whole, and nothing that stands on what is gone.
        disk = DiskTier(folder, MANY)
        disk.refresh()
        for file in list(disk.files):
            assert disk.read(file) == jobs[file.name].data, file.name
        both += len(disk.files) == len(jobs)
        for path in list(folder.iterdir()):
            path.unlink()
    print(both)


if __name__ == "__main__":
    main()
