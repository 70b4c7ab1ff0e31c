"""Processes that run a module of this package. No mlx here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def module_process(
    name: str, arguments: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The program that runs a module as ``python -m``, and its environment."""
    return [sys.executable, "-P", "-m", name, *arguments], child_environment()


def child_environment() -> dict[str, str]:
    """The environment of a Python program that finds modules as this process does.

    With ``-P`` it finds none in the current folder. That may be a model's folder, whose
    code must not run.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, package])}
