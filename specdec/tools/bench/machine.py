"""The machine, the versions and the commit of a measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from ... import backend
from ...utils.blas import usable_cores

ROOT = Path(__file__).resolve().parents[3]


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if match:
            return match.group(1).strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """The machine, and the versions of the software on it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **backend.describe(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
    }


def load_average() -> float | None:
    """The system's load average over the last minute; ``None`` if it is not known."""
    try:
        return round(os.getloadavg()[0], 1)
    except (AttributeError, OSError):
        return None


def origin(command: str) -> dict[str, Any]:
    """The head of a raw result: command, commit, time and machine."""
    return {
        "command": command,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "load_average": load_average(),
    }


def commit() -> str:
    """The commit measured, from ``SPECDEC_COMMIT`` if set, else from git.

    The variable is for a copy without its repository.
    """
    if variable := os.environ.get("SPECDEC_COMMIT"):
        return variable
    try:
        # Fails if the package lies in another project's repository.
        _git("ls-files", "--error-unmatch", "specdec/__init__.py")
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", "specdec", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
