"""What an observer of rounds is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from specdec.engine.round import Part, RoundObserver
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from tests.plain import AT_ONCE, BACKENDS, BEHIND, METAL, ask, engine_of, run_rows

PROMPTS = ((1, 2, 3), (4, 5, 6, 7, 8), (9, 10))
MAX_TOKENS = (9, 14, 5)


class Notes(RoundObserver):
    """Writes down all that it is shown."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.shapes: list[tuple[Part, int]] = []
        self.rows: dict[int, list[tuple[int, int, int]]] = {}

    def begun(self, num_draft_tokens: int) -> None:
        self.noted.append(("begun", num_draft_tokens))

    def built(self, part: Part, *arrays: mx.array) -> None:
        mx.eval(*arrays)
        self.shapes.append((part, int(arrays[0].shape[0])))
        self.noted.append(part)

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        self.noted.append(("read", num_draft_tokens, len(rows)))
        for s in rows:
            counts = (s.rounds, s.drafted, s.accepted)
            self.rows.setdefault(s.index, []).append(counts)


@BACKENDS
@pytest.mark.parametrize("k", [0, 2])
def test_an_observer_sees_every_round(
    tiny_model: Callable[..., Any], backend: Any, k: int
) -> None:
    """Counts add up to the result's, and watching changes no token."""
    target, draft = tiny_model(seed=1), tiny_model(seed=1, num_hidden_layers=1)

    def decode(observer: RoundObserver | None) -> tuple[Any, dict[int, Request]]:
        engine = engine_of(
            target,
            draft if k else None,
            batch_size=3,
            num_draft_tokens=k,
            backend=backend,
            observer=observer,
        )
        for i, (prompt, n) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True)):
            ask(engine, prompt, n, i)
        ended = {}
        while engine.busy:
            for output in engine.step():
                if output.ended:
                    ended[output.request.index] = output.request
        return engine.stats, ended

    _, expected = decode(None)
    notes = Notes()
    stats, rows = decode(notes)
    assert {i: s.tokens for i, s in rows.items()} == {
        i: s.tokens for i, s in expected.items()
    }
    for i, sequence in rows.items():
        # First what the prompt brought, then a round more each time.
        assert [n for n, _, _ in notes.rows[i]] == list(range(sequence.rounds + 1))
        assert notes.rows[i][-1][1:] == (sequence.drafted, sequence.accepted)
    reads = [t for t in notes.noted if t[0] == "read"]
    assert sum(n for _, _, n in reads) == stats.row_rounds + len(rows)
    assert max(k for _, k, _ in reads) == k
    # Each round: begun, its parts in order.
    orders = {("verify", "sampling"), *([("draft", "verify", "sampling")] if k else [])}
    seen, parts = set(), []
    for noted in [*notes.noted[1:], ("begun", 0)]:
        if isinstance(noted, str):
            parts.append(noted)
        elif noted[0] == "begun":
            seen.add(tuple(parts))
            parts = []
    assert seen == orders


@pytest.mark.parametrize("backend", [AT_ONCE, BEHIND, METAL])
@pytest.mark.parametrize("k", [0, 4])
def test_no_round_is_built_for_tokens_after_the_last(
    tiny_model: Callable[..., Any], backend: Any, k: int
) -> None:
    """Catches rounds, and draft tokens, that nobody will read.

    Where rounds are read late, a draft's may have accepted more than was known.
    """
    target, notes = tiny_model(seed=1), Notes()
    run_rows(
        target, target if k else None, [[1, 2, 3]], [SamplingParams(max_tokens=13)],
        num_draft_tokens=k, backend=backend, observer=notes,
    )  # fmt: skip
    lengths = [each[1] for each in notes.noted if each[0] == "begun"]
    assert lengths[0] == 0  # the prompt's last step
    if k == 0:
        assert lengths[1:] == [0] * 12
    elif backend is AT_ONCE:
        assert lengths[1:] == [4, 4, 1]
