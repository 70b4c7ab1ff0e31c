"""Chat templates of models, rendered in a process of their own.

A template comes with a model and is a program: ``{{ 'a' * 10**10 }}`` takes all memory,
and two nested loops never end. transformers keeps a template from files and from
Python's internals, but bounds neither memory nor time. So templates render in a child
process, which is ended when a template takes too long. The child lives as long as its
parent. If it ends for another reason, it is replaced once.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from ..errors import PromptError
from ..utils.child import module_process

#: Seconds that one rendering may take; real ones take milliseconds.
SECONDS = 10
#: Additional seconds for the process's start: it takes one or two, or many if busy.
_START_SECONDS = 60
_PROGRAM = f"{__package__}.template_process"


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool = False,
    answer: bool = True,
) -> str:
    """Chat messages as the text that the model continues.

    Args:
        config: more variables for the template.
        tools: the tools that the model may call.
        continued: the last message is the beginning of the answer.
        answer: what begins an answer follows the messages.

    A Python function that renders messages, mlx-lm's or the user's own, is called in
    this process.

    Raises:
        PromptError: the template refuses the messages, or takes too long or too much
            memory.
        Exception: whatever such a function raises.
    """
    options: dict[str, Any] = {
        **config,
        "add_generation_prompt": answer and not continued,
    }
    if continued:
        options["continue_final_message"] = True
    if tools is not None:
        options["tools"] = list(tools)
    template = template_of(tokenizer, tools=tools)
    if template is None:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    # The same variables as in mlx-lm and transformers.
    known = dict(tokenizer.special_tokens_map)
    if hasattr(tokenizer, "has_thinking"):
        known["enable_thinking"] = tokenizer.has_thinking
    return _CHILD.render(
        {
            **known,
            **options,
            "conversations": [
                [{k: v for k, v in m.items() if v is not None} for m in messages]
            ],
            "chat_template": template,
        }
    )


def template_of(
    tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """The template that transformers would render; ``None``: something else renders."""
    # mlx-lm's wrapper passes this on to transformers' tokenizer.
    get = getattr(tokenizer, "get_chat_template", None)
    inner = getattr(get, "__self__", None)
    if get is None or inner is None or inner.chat_template is None:
        return None
    if "apply_chat_template" in vars(tokenizer):  # the user's own
        return None
    apply = getattr(type(inner), "apply_chat_template", None)
    if getattr(apply, "__module__", None) != "transformers.tokenization_utils_base":
        return None
    if inner.init_kwargs.get("chat_template_type"):  # mlx-lm has a function
        return None
    return str(get() if tools is None else get(tools=list(tools)))


class _Child:
    """The child process, started at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> str:
        """Render with these arguments of ``render_jinja_template``.

        Raises:
            PromptError: the rendering failed.
        """
        line = json.dumps(request, default=_plain).encode() + b"\n"
        with self._lock:
            try:
                answer = self._ask(line)
            except BaseException:  # perhaps interrupted: the next answer is stale
                self._stop()
                raise
        if "text" not in answer:
            raise PromptError(answer["error"])
        return str(answer["text"])

    def start(self) -> None:
        """Start the process early: it takes a second, in which other work can go on."""
        with self._lock, suppress(PromptError):
            self._started()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, line: bytes) -> dict[str, Any]:
        for _ in range(2):  # something else may have ended the first one
            process = self._started()
            answer = _exchange(process, line, SECONDS + _START_SECONDS)
            if answer is not None and answer.endswith(b"\n"):
                return dict(json.loads(answer))
            if answer is not None:  # it is ending, and its exit code says why
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_START_SECONDS)
            self._stop()
            if process.returncode == -signal.SIGALRM:
                why = f"it takes longer than {SECONDS} seconds"
                break
        else:
            why = f"the process that renders it failed twice ({process.returncode})"
        return {"error": f"{why}: use another model, or --ignore-chat-template"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._process
            self._stop()
        program, environment = module_process(_PROGRAM, [str(SECONDS)])
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd=os.sep,  # imports would fail if its folder were removed
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise PromptError(
                f"Python cannot be started to render it ({error.strerror}): use "
                "--ignore-chat-template"
            ) from error
        self._owner = os.getpid()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():  # a fork's
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _exchange(
    process: subprocess.Popen[bytes], line: bytes, seconds: float
) -> bytes | None:
    """Send a line, and read the line that answers it.

    Returns:
        The answer: less than a line if the process ended; ``None`` if it did not
        answer in time.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    end = time.monotonic() + seconds
    answer = bytearray()
    left = memoryview(line)
    with selectors.DefaultSelector() as ready:
        os.set_blocking(process.stdin.fileno(), False)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ)
        while not answer.endswith(b"\n"):
            if not (found := ready.select(end - time.monotonic())):
                return None
            for key, _ in found:
                if key.fileobj is process.stdout:
                    if not (data := os.read(key.fd, 1 << 16)):
                        return bytes(answer)
                    answer += data
                    continue
                try:
                    left = left[os.write(key.fd, left) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    ready.unregister(process.stdin)
    return bytes(answer)


_CHILD = _Child()
atexit.register(_CHILD.close)
#: Call this when a chat template will be rendered soon.
start = _CHILD.start


def _plain(value: object) -> object:
    """A value that JSON lacks, in the form that transformers passes to templates."""
    if isinstance(value, Mapping):
        return dict(value)
    return f"<{type(value).__name__}>"
