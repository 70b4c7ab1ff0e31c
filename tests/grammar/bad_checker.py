"""A checker that takes too much for some grammars: time, memory or stack."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from specdec.utils.child import serve


def check(request: dict[str, Any]) -> str:
    """Do what the grammar's text says."""
    text = request["grammar"][1]
    if text.startswith("slow"):
        time.sleep(1000)
    if text == "large":
        bytearray(1 << 40)
    if text == "deep":
        os.kill(os.getpid(), signal.SIGSEGV)
    return ""


if __name__ == "__main__":
    serve(check, memory=1 << 30)
