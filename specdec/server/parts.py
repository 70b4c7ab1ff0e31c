"""Splits the text of an answer into reasoning, text and tool calls."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .encoding import Encoded
from .job import Call, Delta, Tools
from .tool_calls import CallFormat, format_of

log = logging.getLogger("specdec.server")


class Parts:
    """Splits the growing text of one choice into text, reasoning and calls.

    A marker counts where the model's form has it: a thought begins at the beginning of
    the answer or after a call, and calls need tools. Elsewhere it is text like any
    other. Text that could be the beginning of a marker is held back until the next text
    decides. What cannot be read as a call is text, as it was written.

    Args:
        choice: the choice's number.
        tokenizer: the target's tokenizer.
        encoded: the choice's prompt.
        tools: the functions that the choice may call.
        hides_special: special tokens are left out of text and thoughts.
    """

    def __init__(
        self,
        choice: int,
        tokenizer: TokenizerWrapper,
        encoded: Encoded,
        tools: Tools,
        hides_special: bool = False,
    ):
        self._choice = choice
        self._tools = tools
        self.calls = 0
        self.cut = False  # the last call is not whole
        self._format: CallFormat | None = None
        if tools.functions:
            self._format = format_of(tokenizer)
        self._edges, self._state = _edges(tokenizer, self._format)
        self._marks = (
            getattr(tokenizer, "think_start", None),
            getattr(tokenizer, "think_end", None),
        )
        if encoded.thinks and "reasoning" in self._edges:
            self._state = "reasoning"
        self._buffer = ""  # text that could begin a marker
        self._call = ""  # of a call that is being written, or of harmony's header
        self._opened = ""  # the marker before it
        self._thinking = False  # it was begun within a thought
        self._special: re.Pattern[str] | None = None
        if hides_special:
            added = getattr(tokenizer, "added_tokens_decoder", {}).values()
            special = {str(token) for token in added if token.special}
            special |= set(tokenizer.all_special_tokens)
            self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._blank = True  # no text since the beginning or the last call
        self._fresh = encoded.thinks  # nothing was shown since the last marker
        if encoded.opening:
            list(self.feed(encoded.opening))

    def feed(self, text: str) -> Iterator[Delta | Call]:
        """The parts that ``text`` adds."""
        self._buffer += text
        while True:
            if self._state == "normal" and self._blank and self._format:
                beginning = self._buffer.lstrip()
                if any(bare.startswith(beginning) for bare in self._format.bare):
                    break  # it could be a call without a marker
                if beginning.startswith(self._format.bare or ("\0",)):
                    self._begin_call("")
            markers = self._edges.get(self._state, {})
            at, marker = self._first(markers)
            if marker is None:
                at = len(self._buffer) - self._held(markers)
                ready, self._buffer = self._buffer[:at], self._buffer[at:]
                yield from self._part(ready)
                break
            before = self._buffer[:at]
            self._buffer = self._buffer[at + len(marker) :]
            yield from self._part(before)
            yield from self._turn(marker, markers[marker])

    def finish(self, *, cut: bool) -> Iterator[Delta | Call]:
        """The parts held back; ``cut``: a limit ended the answer, not the model."""
        text, self._buffer = self._buffer, ""
        bare = self._format is not None and self._format.bare
        if self._state == "normal" and self._blank and bare and text.strip() in bare:
            self._begin_call("")
        yield from self._part(text)
        if self._state == "tool":
            yield from self._called("", cut=cut)

    # -- markers -----------------------------------------------------------

    def _first(self, markers: Iterable[str]) -> tuple[int, str | None]:
        """The first marker in the buffer that counts there; the longest of several."""
        places = [
            (place.start(), -len(marker), marker)
            for marker in markers
            for place in re.finditer(re.escape(marker), self._buffer)
            if self._counts(marker, place.start())
        ]
        return (min(places)[0], min(places)[2]) if places else (-1, None)

    def _held(self, markers: Iterable[str]) -> int:
        """How many characters at the buffer's end could begin a marker."""
        size = len(self._buffer)
        sizes = [
            part
            for marker in markers
            for part in range(min(len(marker) - 1, size), 0, -1)
            if marker.startswith(self._buffer[size - part :])
            and self._counts(marker, size - part)
        ]
        return max(sizes, default=0)

    def _counts(self, marker: str, at: int) -> bool:
        if self._state == "tool":
            if marker == self._marks[1]:  # a call that is only thought about
                return self._thinking
            assert self._format is not None
            return not self._format.in_value(self._call + self._buffer[:at])
        # A marker with a bar is a token that no explanation has.
        if marker != self._marks[0] or "|" in marker or self._state == "header":
            return True
        return self._blank and not self._buffer[:at].strip()

    def _turn(self, marker: str, state: str) -> Iterator[Delta | Call]:
        if self._state == "tool":
            closed = marker if marker != self._marks[1] else ""
            yield from self._called(closed, cut=False)
            if closed and not self._fresh and state != "header":  # it was no call
                return
        elif self._state == "header" and state == "message":
            yield from self._message()
            return
        if state == "tool":
            self._begin_call(marker)
        else:
            self._state, self._call = state, ""
        self._fresh = True

    def _begin_call(self, marker: str) -> None:
        self._thinking = self._state == "reasoning"
        self._opened, self._state, self._call = marker, "tool", ""

    def _message(self) -> Iterator[Delta | Call]:
        """What a header of harmony says of the message after it."""
        header, self._call = self._call, ""
        self._fresh = True
        called = re.search(r"to=functions\.([\w.-]+)", header)
        if called and self._format is not None:
            self._begin_call(f"{header}<|message|>")
            self._call = f'{{"name": "{called[1]}", "arguments": '
        else:
            self._state = "reasoning" if "analysis" in header else "normal"
        yield from ()

    # -- parts -------------------------------------------------------------

    def _part(self, text: str) -> Iterator[Delta]:
        if self._state in ("tool", "header"):
            self._call += text
        else:
            yield from self._shown(text, thinking=self._state == "reasoning")

    def _shown(self, text: str, *, thinking: bool) -> Iterator[Delta]:
        # Models put blank lines around their markers; they are not part of the answer.
        text = text.lstrip("\n" if not self.calls else None) if self._fresh else text
        text = self._special.sub("", text) if self._special else text
        if not text:
            return
        self._fresh = False
        self._blank &= thinking or not text.strip()
        yield Delta(self._choice, "reasoning" if thinking else "text", text)

    def _called(self, closed: str, *, cut: bool) -> Iterator[Delta | Call]:
        """The calls in the text since the marker; ``closed``: the marker after it."""
        text, self._call = self._call, ""
        assert self._format is not None
        object_ = text
        if self._format.name == "harmony":
            text = text.partition('"arguments": ')[2]
            object_ += "}" if not cut else ""
        calls, rest = self._format.read(object_, self._tools.functions, cut=cut)
        self._state = "normal"
        if not calls:
            if self._thinking and closed:
                self._state = "reasoning"
            self._fresh = False
            yield from self._shown(
                f"{self._opened}{text}{closed}", thinking=self._thinking
            )
            return
        names = {tool["function"]["name"] for tool in self._tools.functions}
        for call in calls[:1] if self._tools.single else calls:
            if call.name not in names:
                log.warning("a model called %.100r, which is no tool", call.name)
            id_ = self._format.valid_id(call.id)
            yield Call(
                self._choice,
                self.calls,
                id_ or self._format.new_id(call.name, self.calls),
                call.name,
                call.arguments,
                cut=call.cut if calls[1:] else call.cut and self._opened + text,
            )
            self.calls += 1
            self.cut |= bool(call.cut)
        self._blank = self._fresh = True
        if not self._tools.single:
            yield from self._shown(rest, thinking=False)


def _edges(
    tokenizer: TokenizerWrapper, calls: CallFormat | None
) -> tuple[dict[str, dict[str, str]], str]:
    """The markers of each state and the states after them; the first state."""
    if (calls is not None and calls.name == "harmony") or _is_harmony(tokenizer):
        ends = {"<|end|>": "header", "<|return|>": "header", "<|start|>": "header"}
        return {
            "header": {"<|message|>": "message"},
            "tool": {"<|call|>": "header", **ends},
            **dict.fromkeys(("reasoning", "normal"), ends),
        }, "header"
    edges: dict[str, dict[str, str]] = {"normal": {}}
    if getattr(tokenizer, "has_thinking", False):
        edges["normal"][tokenizer.think_start] = "reasoning"
        edges["reasoning"] = {tokenizer.think_end: "normal"}
    transitions = getattr(tokenizer, "response_transitions", None) or {}
    for state, pairs in transitions.items():
        more = {m: to for m, to in pairs if to != "tool" or calls is not None}
        edges.setdefault(state, {}).update(more)
    for marker in getattr(tokenizer, "structural_markers", ()) or ():
        edges["normal"][marker] = "normal"
    if calls is not None:
        # A form of answers that leads to calls says where they start.
        if not any(to == "tool" for pairs in transitions.values() for _, to in pairs):
            edges["normal"][calls.start] = "tool"
        if "reasoning" in edges:
            edges["reasoning"][calls.start] = "tool"
        edges["tool"] = {calls.end: "normal"} if calls.end else {}
        if "reasoning" in edges and getattr(tokenizer, "has_thinking", False):
            edges["tool"][tokenizer.think_end] = "normal"
    return edges, getattr(tokenizer, "response_initial_state", None) or "normal"


def _is_harmony(tokenizer: TokenizerWrapper) -> bool:
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and "<|channel|>" in template
