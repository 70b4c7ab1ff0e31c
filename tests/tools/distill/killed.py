"""Train with a checkpoint after every step, and be killed within one of them.

Arguments: TARGET OUT CHECKPOINTS. After so many, at the next, it kills itself: what
was learnt since is lost. Where a kill falls within the writing of a file is drawn in
``test_a_kill_at_any_call_leaves_a_checkpoint``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from specdec.utils.blas import load_blas

load_blas()  # as the tests do that compare the weights

from specdec.tools.distill import checkpoint, job  # noqa: E402

from .harness import options, run  # noqa: E402


def main() -> None:
    vars(job)["_CHECKPOINT_SECONDS"] = 0
    target, out = map(Path, sys.argv[1:3])
    left, save = int(sys.argv[3]), checkpoint.save

    def killing(*arguments: Any, **named: Any) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        save(*arguments, **named)

    vars(checkpoint)["save"] = killing
    run(options(target, out, resume=True))


if __name__ == "__main__":
    main()
