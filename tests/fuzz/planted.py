"""Kinds of input whose use goes wrong, to see that it is found."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from .case import Case, kind

_kept: list[Any] = []


@kind
def raises_at_seed_3(case: Case) -> None:
    if case.rng.random() == _first_draw("raises_at_seed_3 3"):
        raise TypeError("nobody expected it")


@kind
def goes_on_for_ever(case: Case) -> None:
    while True:
        pass


@kind
def waits_for_ever(case: Case) -> None:
    os.mkfifo("fifo")
    Path("fifo").read_bytes()


@kind
def dies(case: Case) -> None:
    ctypes.string_at(0)


@kind
def takes_memory(case: Case) -> None:
    bytes(1 << 20).replace(b"\0", b"a") * 500


@kind
def leaves_a_file_open(case: Case) -> None:
    _kept.append(os.open("/dev/null", os.O_RDONLY))


@kind
def leaves_arrays(case: Case) -> None:
    _kept.append(mx.zeros((100_000,)) + 1)
    mx.eval(_kept)


@kind
def leaves_threads(case: Case) -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@kind
def writes_to_the_terminal(case: Case) -> None:
    print("not asked for", file=sys.stderr)


@kind
def starts_a_process(case: Case) -> None:
    program = "import resource as r; print(r.getrlimit(r.RLIMIT_CPU)[0])"
    command = [sys.executable, "-S", "-c", program]
    limit = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(limit.stdout) == resource.RLIM_INFINITY


@kind
def does_nothing(case: Case) -> None:
    pass


def _first_draw(seed: str) -> float:
    return random.Random(seed).random()
