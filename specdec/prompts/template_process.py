"""The process that renders chat templates: it answers each input line with a line."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

#: Bytes that the process may allocate after its start. macOS has no such limit.
_MEMORY = 1 << 30
#: The most characters of a text: more than any context holds.
_CHARACTERS = 1 << 26


def _serve(requests: IO[bytes], answers: IO[bytes], seconds: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in requests:
        # The signal has no handler, so it ends the process, whatever that is doing.
        signal.alarm(seconds)
        try:
            rendered, _ = render_jinja_template(**json.loads(line))
            answer = {"text": rendered[0]}
            if len(rendered[0]) > _CHARACTERS:
                answer = {"error": _too_much()}
        except MemoryError:
            answer = {"error": _too_much()}
        except Exception as error:  # a template may raise anything
            answer = {"error": str(error)[:_CHARACTERS]}
        data = json.dumps(answer).encode()
        signal.alarm(0)
        answers.write(data + b"\n")
        answers.flush()


def _too_much() -> str:
    return "it takes too much memory: use another model, or --ignore-chat-template"


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # there is no /proc, or no such limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # Output that libraries print must not be taken for an answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _serve(sys.stdin.buffer, answers, int(sys.argv[1]))


if __name__ == "__main__":
    _main()
