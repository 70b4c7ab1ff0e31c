"""The command as reports and records name it."""

from __future__ import annotations

import shlex
import sys

from ..model_names import short


def command_line() -> str:
    """What was typed, absolute paths cut to their last part."""
    return shlex.join(["specdec", *map(short, sys.argv[1:])])
