"""The process that renders chat templates: a line in, a line out."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

#: Bytes that the process may take beside those that it begins with. macOS has no such
#: bound.
_MEMORY = 1 << 30
#: Most characters of a text, beyond any context.
_CHARACTERS = 1 << 26


def _serve(requests: IO[bytes], answers: IO[bytes], seconds: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    for line in requests:
        # Nobody handles the signal: it ends the process, whatever that is doing.
        signal.alarm(seconds)
        try:
            rendered, _ = render_jinja_template(**json.loads(line))
            answer = {"text": rendered[0]}
            if len(rendered[0]) > _CHARACTERS:
                answer = {"error": _too_much()}
        except MemoryError:
            answer = {"error": _too_much()}
        except Exception as error:  # a template raises what its author chose
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
    # What libraries print is no answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _serve(sys.stdin.buffer, answers, int(sys.argv[1]))


if __name__ == "__main__":
    _main()
