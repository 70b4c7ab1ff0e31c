"""``python -m tests.fuzz``: run cases, and show what was found.

Without a kind, all of them. A failure names its seed, and the command that runs just
that case: ``python -m tests.fuzz gguf_file --first 17 --count 1``.
"""

from __future__ import annotations

import argparse
import sys
import time

from .kinds import KINDS
from .runner import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, metavar="SEEDS", help="of each kind")
    parser.add_argument("--cases", type=int, default=1000, help="of all kinds together")
    options = parser.parse_args()
    kinds = options.kinds or [*KINDS]
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: there is {', '.join(KINDS)}")
    count = options.count or -(-options.cases // len(kinds))
    begin = time.monotonic()
    faults = 0
    for each in fuzz(kinds, options.first, count, show=print):
        faults += 1
        print(f"\n{each}\n", flush=True)
    seconds = time.monotonic() - begin
    print(f"{count * len(kinds)} cases in {seconds:.0f} s, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
