"""Results of ``specdec run``: text to standard output, JSON lines to a file.

With ``--resume``, results that the file already has are not decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..outputs import GenerationResult, StreamEvent
from ..prompts import Prompt, PromptRecord
from ..utils.printable import one_line
from .output import OutputFile, output_failed, write


class Sink:
    """Takes stream events; finished results are kept, whatever happens next.

    A single answer is streamed. Several are written whole, each under a header line, in
    the order of the prompts. Standard output gets nothing of a prompt that was refused,
    and it is written within ``aside(text)``. JSON lines are written in the order in
    which prompts finish.

    Args:
        done: indices of prompts whose results the file already has.

    Attributes:
        finished: number of results taken.
        errors: errors of prompts that ended with one, by the prompt's index.
        dropped: number of turns that will not come, as the answer before them failed or
            was cut.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRecord],
        output: OutputFile | None,
        aside: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        line_of: Callable[[GenerationResult, PromptRecord], dict[str, object]]
        | None = None,
        done: Collection[int] = (),
    ) -> None:
        self._prompts = prompts
        self._output = output
        self._aside = aside
        self._line_of = line_of or line_of_result
        # Several answers, each under a header.
        self._several = len(prompts) > 1 or any(record.turns for record in prompts)
        self._waiting: dict[int, list[GenerationResult]] = {}
        self._next = 0
        self._line_open = False
        self._stdout_failed = False
        self._ended: set[int] = set()  # prompts that get no more answers
        self.finished = 0
        self.errors: dict[int, str] = {}
        self.dropped = 0
        self._done = frozenset(done)

    def take(self, event: StreamEvent) -> None:
        """Write the results that an event completes.

        Raises:
            click.ClickException: the file, or standard output, cannot be written.
        """
        if not self._several:
            self._write(event.text)
        if event.result is None:
            return
        self.finished += 1
        if event.result.finish_reason == "error":
            self.errors[event.index] = event.result.error or "no reason was given"
        left = len(self._prompts[event.index].turns) - event.turn
        if not left or event.result.finish_reason not in ("stop", "length"):
            self._ended.add(event.index)
            self.dropped += left
        self._waiting.setdefault(event.index, []).append(event.result)
        if self._output is not None:
            record = self._prompts[event.index]
            self._output.write(self._line_of(event.result, record))
        if not self._several:
            if self._line_open or not _has_nothing(event.result):
                self._write("\n")
            return
        while self._next in self._waiting or self._next in self._done:
            if self._next not in self._done:
                self._write_blocks(self._next)
                if self._next not in self._ended:
                    return
            self._next += 1

    def close(self) -> None:
        """Write the finished results that waited for an earlier prompt."""
        if self._several:
            for index in sorted(self._waiting):
                self._write_blocks(index)
        if self._line_open:
            self._write("\n")

    def _write_blocks(self, index: int) -> None:
        """Write a prompt's answers that have waited, each under its header."""
        record = self._prompts[index]
        for result in self._waiting[index]:
            if _has_nothing(result):
                continue
            prompt, number = record.prompt, str(index)
            if record.turns:
                prompt = (record.prompt, *record.turns)[result.turn]
                number = f"{index}.{result.turn}"
            self._write(f"== [{number}] {_title(prompt)}\n{result.text}\n\n")
        self._waiting[index].clear()

    def _write(self, text: str) -> None:
        if self._stdout_failed:
            return
        try:
            with self._aside(text):
                write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._stdout_failed = True
            raise output_failed(error) from error
        if text:
            self._line_open = not text.endswith("\n")


def _has_nothing(result: GenerationResult) -> bool:
    """Whether a prompt was refused, or failed before it had a text."""
    return result.finish_reason == "error" and not result.text


def line_of_result(result: GenerationResult, record: PromptRecord) -> dict[str, object]:
    """A result's line of ``--output``."""
    fields = result.to_dict()
    if record.turns:
        fields = {"index": result.index, "turn": result.turn, **fields}
    if record.id is not None:
        fields = {"index": result.index, "id": record.id, **fields}
    return fields


def _title(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        text = prompt
    else:
        last = prompt[-1]
        text = f"{len(prompt)} ids"
        if isinstance(last, dict):
            content = last.get("content")
            if isinstance(content, list):  # parts: images have no text
                content = " ".join(str(part.get("text", "")) for part in content)
            text = str(content or f"{last['role']}, without text")
    return one_line(" ".join(text.split()), 70, end=False)
