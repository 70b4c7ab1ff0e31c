"""Train with a checkpoint behind every step, until somebody kills the process.

Arguments: TARGET OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specdec.distill import job

from .harness import options, run


def main() -> None:
    vars(job)["_CHECKPOINT_SECONDS"] = 0
    target, out = map(Path, sys.argv[1:])
    run(options(target, out, resume=True))


if __name__ == "__main__":
    main()
