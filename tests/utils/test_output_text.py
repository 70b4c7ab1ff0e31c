"""Text that is shown is never taken back, and ends where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.utils.output_text import OutputText, StopTexts

# Token ids to texts; 7 and 8 are the two halves of one character.
PIECES = ["a", "b", "ab", "ba", "", "aab", "c"]
HALVES = (7, 8)


class Detokenizer:
    """Joins pieces; a half character shows only with its other half."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.final = False

    def add_token(self, token: int) -> None:
        self.tokens.append(token)

    def finalize(self) -> None:
        self.final = True

    @property
    def text(self) -> str:
        out, i = "", 0
        while i < len(self.tokens):
            token = self.tokens[i]
            if token < len(PIECES):
                out += PIECES[token]
            elif tuple(self.tokens[i : i + 2]) == HALVES:
                out, i = out + "é", i + 1
            elif i + 1 < len(self.tokens) or self.final:
                out += "?"
            i += 1
        return out


def whole_text(tokens: Sequence[int]) -> str:
    detokenizer = Detokenizer()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def begins(tokens: Sequence[int]) -> list[int]:
    """Where the text of each token begins, as far as it was complete before it."""
    found = []
    detokenizer = Detokenizer()
    for token in tokens:
        found.append(len(detokenizer.text))
        detokenizer.add_token(token)
    return found


def first_stop(
    tokens: Sequence[int], stop: Sequence[str]
) -> tuple[int, int, str] | None:
    """Tokens until a stop text is complete, where it begins, and which it is."""
    for n in range(1, len(tokens) + 1):
        detokenizer = Detokenizer()
        for token in tokens[:n]:
            detokenizer.add_token(token)
        if n == len(tokens):
            detokenizer.finalize()
        text = detokenizer.text
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            at, _, which = min(found)
            return n, at, which
    return None


tokens_strategy = st.lists(st.integers(0, 8), min_size=1, max_size=14)
stops_strategy = st.lists(
    st.text(alphabet="abcé", min_size=1, max_size=4), max_size=3
).map(tuple)


@given(
    tokens=tokens_strategy,
    stop=stops_strategy,
    cuts=st.lists(st.integers(1, 4), min_size=14, max_size=14),
)
@example(tokens=[0, 1, 0], stop=("ab", "b"), cuts=[1] * 14)
@example(tokens=[0, 4, 1, 6], stop=("b",), cuts=[1] * 14)
@example(tokens=[0, 7, 8], stop=("é",), cuts=[1] * 14)
@example(tokens=[0, 7], stop=("?",), cuts=[1] * 14)
def test_whatever_the_rounds_the_text_ends_before_the_first_stop(
    tokens: list[int], stop: tuple[str, ...], cuts: list[int]
) -> None:
    params = SamplingParams(max_tokens=len(tokens), stop=stop)
    sequence = Request(
        0, "", (1,), params, frozenset(), OutputText(Detokenizer(), stop)
    )
    shown_text, shown_tokens, left = "", [], list(tokens)
    for cut in cuts:
        block, left = left[:cut], left[cut:]
        if not block or sequence.finish_reason is not None:
            break
        sequence.commit(block)
        new, text, _ = sequence.take()
        shown_tokens += new
        shown_text += text
        if sequence.finish_reason is None:
            assert not any(s in shown_text for s in stop)
    assert sequence.output is not None
    assert shown_text == sequence.output.text
    assert shown_tokens == sequence.tokens
    stopped = first_stop(tokens, stop)
    if stopped is None:
        assert sequence.finish_reason == "length"
        assert sequence.tokens == tokens
        assert shown_text == whole_text(tokens)
        return
    n, at, which = stopped
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", which)
    assert shown_text == whole_text(tokens[:n])[:at]
    kept = sum(begin < at for begin in begins(tokens[:n]))
    assert sequence.tokens == tokens[:kept]


@given(tokens=tokens_strategy, stop=stops_strategy)
def test_nothing_is_held_back_for_longer_than_needed(
    tokens: list[int], stop: tuple[str, ...]
) -> None:
    """What is withheld could be the beginning of a stop text, or of a character."""
    output = OutputText(Detokenizer(), stop)
    shown = ""
    for n, token in enumerate(tokens, 1):
        if output.add(token):
            break
        text, _ = output.take(n, ended=False)
        shown += text
        held = output.text[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in stop)


def test_each_character_is_looked_at_once_whatever_the_number_of_stop_texts() -> None:
    """Steps of the search are counted; 3,000 texts once took 3,000 searches a token."""
    texts = [f"{'a' * n}{m}" for n in range(1, 60) for m in range(2, 50)]
    found, steps = StopTexts(texts), 0
    after = found.after

    def counted(state: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return after(state, character)

    found.after = counted  # type: ignore[method-assign]
    output = OutputText(Detokenizer(), ("x",))
    output._stop = found
    for n in range(1, 301):
        assert not output.add(0)
        shown, _ = output.take(n, ended=False)
        # 59 letters may begin a stop text.
        assert len(shown) == int(n > 59)
    assert steps == 300
