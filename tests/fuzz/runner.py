"""Cases in processes of their own, and what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Seconds of work, and of waiting, that none of these small inputs can need.
MOST_SECONDS = 10
MOST_WAITING = 90


@dataclass(frozen=True)
class Found:
    """A fault: of one case, or of all that its process ran."""

    kinds: tuple[str, ...]
    seed: int
    count: int
    what: str

    @property
    def command(self) -> str:
        """What shows it again."""
        kinds = " ".join(self.kinds)
        return f"python -m tests.fuzz {kinds} --first {self.seed} --count {self.count}"

    def __str__(self) -> str:
        return f"{'+'.join(self.kinds)}, seed {self.seed}: {self.what}\n{self.command}"


def fuzz(
    kinds: Sequence[str],
    first: int,
    count: int,
    *,
    each: int = 250,
    plugin: str | None = None,
    show: Callable[[str], object] = lambda line: None,
) -> Iterator[Found]:
    """Run ``count`` seeds of every kind, going on after fault.

    Args:
        each: seeds in a process; what its cases leave behind is looked at once.
        plugin: a module with more kinds, for tests of this one.
    """
    seed, skip = first, 0
    while seed < first + count:
        n = min(each, first + count - seed)
        fault = run(kinds, seed, n, skip=skip, plugin=plugin)
        until = seed + n - 1 if fault is None else fault.seed
        show(f"seeds {seed} to {until}: {'nothing found' if fault is None else 'see'}")
        seed, skip = seed + n, 0
        if fault is None:
            continue
        yield fault
        if len(fault.kinds) == fault.count == 1:  # a case: on with the one after it
            at = fault.seed * len(kinds) + kinds.index(*fault.kinds) + 1
            seed, skip = divmod(at, len(kinds))


def run(
    kinds: Sequence[str],
    first: int,
    count: int,
    *,
    skip: int = 0,
    plugin: str | None = None,
    seconds: int = MOST_SECONDS,
    waiting: int = MOST_WAITING,
) -> Found | None:
    """Run cases in one process until the first fault, which is returned.

    Args:
        skip: kinds of the first seed to leave out, from the first on.
        plugin: a module with more kinds, in place of the others' library.
        seconds, waiting: of work and of time that a case may take.
    """
    more = ["--plugin", plugin] if plugin else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        # Here, so that it goes with a worker that is killed, too.
        tempfile.TemporaryDirectory(
            prefix="specdec-fuzz-", ignore_cleanup_errors=True
        ) as folder,
        tempfile.TemporaryFile() as errors,
    ):
        reader, writer = os.pipe()
        command = [
            sys.executable, "-m", "tests.fuzz.worker",
            "--pipe", str(writer), "--folder", folder,
            "--first", str(first), "--count", str(count), "--skip", str(skip),
            "--seconds", str(seconds), "--waiting", str(waiting), *more, *kinds,
        ]  # fmt: skip
        with os.fdopen(reader, encoding="utf-8") as pipe:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    env=environment, pass_fds=[writer],
                )  # fmt: skip
            finally:
                os.close(writer)
            lines = [json.loads(line) for line in pipe]
        code = process.wait()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip()
    return _found(lines, code, said, tuple(kinds), first, count)


def _found(
    lines: list[dict[str, Any]],
    code: int,
    said: str,
    kinds: tuple[str, ...],
    first: int,
    count: int,
) -> Found | None:
    last: dict[str, Any] = lines[-1] if lines else {}
    begins = [line for line in lines if "begin" in line]
    if "end" in last and code == 0 and not said:
        return None
    if not begins or "end" in last or "growth" in last:
        what = last.get("growth", f"the process ended with code {code}")
        return Found(kinds, first, count, f"{what}\n{said[-3000:]}".strip())
    what = last.get("fault", f"the process ended with code {code}\n{said[-6000:]}")
    return Found((begins[-1]["begin"],), begins[-1]["seed"], 1, str(what).strip())
