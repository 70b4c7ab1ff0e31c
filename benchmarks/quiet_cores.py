"""Which processors of a shared machine are quickest just now, for ``taskset``.

    taskset -c $(python -m benchmarks.quiet_cores) python -m benchmarks.decode ...

Where a virtual machine's processors are shared with others, some run at half the speed
of their neighbours for minutes. A single thread launches all of a decode step's work,
so that it matters which one it runs on.
"""

from __future__ import annotations

import os
import statistics
import time

import click

LOOPS, ROUNDS = 100_000, 5


def spin() -> float:
    """Seconds that a loop takes."""
    start = time.perf_counter()
    n = LOOPS
    while n:
        n -= 1
    return time.perf_counter() - start


def quickest(count: int, among: range | None = None) -> list[int]:
    """The processors on which a loop was quickest, by the median of some rounds.

    Args:
        among: these alone, as far as the process may use them.
    """
    allowed = os.sched_getaffinity(0)
    processors = sorted(allowed if among is None else allowed & set(among))
    seconds: dict[int, list[float]] = {p: [] for p in processors}
    try:
        for _ in range(ROUNDS):
            for processor in processors:
                os.sched_setaffinity(0, {processor})
                seconds[processor].append(spin())
    finally:
        os.sched_setaffinity(0, allowed)
    order = sorted(processors, key=lambda p: statistics.median(seconds[p]))
    return sorted(order[:count])


@click.command(context_settings={"show_default": True})
@click.option("--count", default=4, type=click.IntRange(1))
@click.option("--first", default=0, help="Look from this processor on ...")
@click.option("--last", type=int, help="... up to this one.")
def main(count: int, first: int, last: int | None) -> None:
    """Print the numbers of the quickest processors, separated by commas."""
    among = range(first, 1 + (os.cpu_count() or 1) if last is None else last + 1)
    print(",".join(map(str, quickest(count, among))))


if __name__ == "__main__":
    main()
