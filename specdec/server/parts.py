"""Splits the text of an answer into reasoning, text and tool calls."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ..errors import reason_of
from .encoding import Encoded
from .job import Call, Piece, Tokens, Tools

log = logging.getLogger("specdec.server")


class Parts:
    """Splits the growing text of one choice into text, reasoning and calls.

    Markers of mlx-lm's tokenizers separate reasoning and tool calls. Text that could
    be the beginning of a marker is held back until the next text decides. A call that
    cannot be parsed becomes text: nothing that was generated is lost.

    Args:
        choice: the choice's number.
        tokenizer: the target's tokenizer.
        encoded: the choice's prompt.
        tools: the functions that the choice may call.
    """

    def __init__(self, choice: int, tokenizer: Any, encoded: Encoded, tools: Tools):
        self._choice = choice
        self._tokenizer = tokenizer
        self._tools = tools
        self.calls = 0
        self._call = ""  # the text of a call that is being written
        self._fresh = False  # nothing was shown since the last marker
        self._state: Any = None
        marked = any(
            getattr(tokenizer, name, False)
            for name in ("has_thinking", "has_tool_calling", "structural_markers")
        )
        if marked:
            machine = make_text_state_machine(tokenizer)
            initial = "reasoning" if encoded.thinks else "normal"
            self._state = machine.make_state(
                tokenizer.response_initial_state or initial
            )
            self._fresh = encoded.thinks
            if encoded.begun:
                list(self.feed(encoded.begun))

    def feed(self, text: str, tokens: Tokens | None = None) -> Iterator[Piece | Call]:
        """The parts that ``text`` adds; ``tokens`` belong to it."""
        if self._state is None:
            if text or tokens:
                yield Piece(self._choice, "text", text, tokens)
            return
        before = self._state[0]
        self._state, segments = TextStateMachine.split(self._state, text)
        for at, (kind, part) in enumerate(segments):
            if at:
                yield from self._turn(before, kind)
            before = kind
            yield from self._part(kind, part)
        if tokens:
            yield Piece(self._choice, "text", "", tokens)

    def finish(self, *, whole: bool) -> Iterator[Piece | Call]:
        """The parts held back; ``whole``: a call that is being written is complete."""
        if self._state is None:
            return
        self._state, text, kind = TextStateMachine.flush(self._state)
        yield from self._part(kind, text)
        if kind == "tool":
            yield from self._called(whole=whole)

    def _turn(self, before: str, after: str) -> Iterator[Piece | Call]:
        self._fresh = True
        if before == "tool":
            yield from self._called(whole=True)

    def _part(self, kind: str, text: str) -> Iterator[Piece | Call]:
        if kind == "tool":
            self._call += text
            return
        # Models put blank lines around their markers; they are not part of the answer.
        shown = text.lstrip("\n" if not self.calls else None) if self._fresh else text
        if not shown:
            return
        self._fresh = False
        is_reasoning = kind == "reasoning"
        yield Piece(self._choice, "reasoning" if is_reasoning else "text", shown)

    def _called(self, *, whole: bool) -> Iterator[Piece | Call]:
        text, self._call = self._call, ""
        start, end = self._tokenizer.tool_call_start, self._tokenizer.tool_call_end
        calls = self._parsed(text)
        if not calls:
            written = f"{start}{text}{end if whole else ''}"
            yield Piece(self._choice, "text", written)
        for call in calls:
            made = call.get("id")
            yield Call(
                self._choice,
                self.calls,
                made if isinstance(made, str) and made else f"call_{uuid.uuid4().hex}",
                call["name"],
                json.dumps(call["arguments"], ensure_ascii=False),
            )
            self.calls += 1

    def _parsed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """The calls in a text; none if the request has no tools."""
        if not self._tools.functions:
            return []
        try:
            parsed = self._tokenizer.tool_parser(text, list(self._tools.functions))
        except Exception as error:  # the text is a model's
            log.info("a tool call cannot be parsed: %s", reason_of(error))
            return []
        calls = parsed if isinstance(parsed, list) else [parsed]
        if self._tools.single:
            calls = calls[:1]
        for call in calls:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return []
            arguments = call.get("arguments", {})
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    return []
            call["arguments"] = arguments
        return calls
