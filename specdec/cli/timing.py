"""Times rounds on several devices: ``python -m specdec.cli.timing``.

A process of its own: whatever ends the ranks ends nothing that was measured before.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import EngineConfig
from ..utils.child import module_process
from ..utils.printable import shorten
from ..utils.process import cuda_devices, prepare_process
from .output import report, silence_third_parties
from .ranks import load

# Tokens of a prompt, and rounds that are timed.
_PROMPT, _ROUNDS = 8, 16


def count_devices() -> int:
    """The number of devices that the target could be divided between; 1: unknown."""
    from ..backend import defaults

    return len(cuda_devices()) if defaults().name == "cuda" else 1


def seconds_of_rounds(
    loading: Mapping[str, Any], batches: Sequence[tuple[int, int]], devices: int
) -> list[float] | str:
    """Seconds of a mean round, for each batch; or in one line, why there are none.

    Args:
        loading: arguments of :meth:`~specdec.SpecDecoder.from_pretrained`.
        batches: numbers of rows and of draft tokens.
        devices: the target is divided between so many.
    """
    from ..backend import defaults

    rows, lengths = zip(*batches, strict=True)
    config = EngineConfig(batch_size=max(rows), num_draft_tokens=max(1, *lengths))
    program, environment = module_process("specdec.cli.timing")
    if defaults().name == "cuda":  # this process sees one
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(cuda_devices())
    done = subprocess.run(
        program,
        env=environment,
        input=pickle.dumps(({**loading, "config": config}, batches, devices)),
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        seconds: list[float] = json.loads(done.stdout)
        return seconds
    lines = done.stderr.decode(errors="replace").split("specdec: error: ")
    return shorten(lines[-1].strip()) or f"exit code {done.returncode}"


def main() -> int:
    """Time rounds, and print their seconds as JSON; return the exit code."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare_process()
    loading, batches, devices = pickle.load(sys.stdin.buffer)
    silence_third_parties()
    try:
        from ..tools.bench.models import random_prompts
        from ..tools.decoding import time_rounds

        decoder, _ = load(devices, quiet=True, **loading)
        ids = min(decoder.bounds.vocab_size, len(decoder.tokenizer))
        seconds = [
            time_rounds(decoder, random_prompts(rows, _PROMPT, ids), k, _ROUNDS)
            for rows, k in batches
        ]
    except Exception as error:
        return report(error)
    json.dump(seconds, answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
