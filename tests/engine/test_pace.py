"""A long prompt that joins does not stop the rows that decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, repeat
from typing import Any

import mlx.core as mx
import pytest

from specdec.engine.engine import Engine
from specdec.models.pace import Pace
from specdec.models.runner import ModelRows
from specdec.request import Request
from tests.plain import BEHIND, ask, engine_of, finish, greedy

BY_LAYERS = replace(BEHIND, prefills_by_layers=True)
LONG = [7, 8, 9] * 70


def steps(pace: Pace, *chunks: tuple[int, float]) -> list[int]:
    """Steps after chunks of one row, by width and seconds."""
    widths = []
    for width, seconds in chunks:
        pace.take(1, width, seconds)
        widths.append(pace.step)
    return widths


def pace_of(most: int) -> Pace:
    """A pace that has met every shape."""
    pace = Pace(most)
    for width in (8, 32, 64, 128, 256, 512):
        pace.take(1, width, 9.0)
    return pace


def test_steps_follow_the_time_that_chunks_take() -> None:
    """Chunks stay narrow after one slow one, become wider than allowed, or vanish."""
    pace = pace_of(512)
    assert steps(pace, (512, 0.07), (512, 0.2), (256, 0.2), (128, 0.07)) == [
        512, 256, 128, 128,
    ]  # fmt: skip
    assert steps(pace, (128, 0.01), (256, 0.01), (512, 0.01)) == [256, 512, 512]
    assert steps(pace, *[(512, 9.0)] * 6)[-2:] == [32, 32]
    assert steps(pace_of(8), (8, 9.0)) == [8]


def test_what_says_nothing_of_the_width_is_not_learnt() -> None:
    """A short rest of a prompt widens chunks, or compiling narrows them."""
    pace = pace_of(512)
    steps(pace, (512, 0.2))
    assert steps(pace, (32, 0.01), (128, 0.01)) == [256, 256]
    assert steps(Pace(512), (512, 9.0), (256, 9.0), (512, 0.06)) == [512, 512, 512]


TAKE = Pace.take


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    """Let chunks take so long, all shapes having been met."""

    def take(self: Pace, num_rows: int, width: int, _: float) -> None:
        self._shapes.add((num_rows, width))
        TAKE(self, num_rows, width, next(seconds))

    monkeypatch.setattr(Pace, "take", take)


def widths_of(monkeypatch: pytest.MonkeyPatch, most: int = 10**6) -> list[int]:
    """Widths of prefill chunks from now on; wider ones than ``most`` fail."""
    widths: list[int] = []
    right = ModelRows._padded_forward

    def forward(self: ModelRows, tokens: mx.array, *args: Any, **more: Any) -> mx.array:
        if tokens.shape[1] > 2:
            widths.append(tokens.shape[1])
        if tokens.shape[1] > most:
            raise RuntimeError("out of memory")
        return right(self, tokens, *args, **more)

    monkeypatch.setattr(ModelRows, "_padded_forward", forward)
    return widths


@pytest.mark.parametrize("beside", [True, False])
def test_a_slow_chunk_is_followed_by_narrower_ones(
    target: Any, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where rows decode; the tokens are the same."""
    widths = widths_of(monkeypatch)
    slow(monkeypatch, repeat(9.0))
    engine = engine_of(target, None, backend=BY_LAYERS, prefill_step_size=128)
    short = ask(engine, (5, 6), 60)
    while beside and len(short.tokens) < 5:
        engine.step()
    widths.clear()
    long = ask(engine, LONG, 9, 1)
    finish(engine)
    wide = [width for width in widths if width > 31]
    assert wide[:3] == ([128, 64, 32] if beside else [128, 128])
    assert long.tokens == greedy(target, LONG, 9)
    assert short.tokens == greedy(target, [5, 6], 60)


@pytest.mark.parametrize("windowed", [False, True])
def test_prompts_fit_their_caches_at_any_pace(
    tiny_model: Any, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings made for a narrow chunk refuse wider ones; padding passes a cache's end."""
    window = {"sliding_window": 24, "sliding_window_pattern": 2}
    model = tiny_model("gemma3_text", **window) if windowed else tiny_model("llama")
    errors: list[Exception] = []
    part = Engine._part

    def noted(self: Engine, requests: list[Request], error: Exception) -> None:
        errors.append(error)
        part(self, requests, error)

    monkeypatch.setattr(Engine, "_part", noted)
    # Chunks of 128, 64, 32, 64 and 128 tokens: the last begins within a bucket.
    slow(monkeypatch, cycle((9.0, 9.0, 0.01, 0.01, 0.01)))
    engine = engine_of(model, None, backend=BY_LAYERS, prefill_step_size=128)
    decoding = ask(engine, (5, 6), 200)
    while len(decoding.tokens) < 5:
        engine.step()
    for number, size in enumerate((370, 380, 390), start=1):
        if windowed:  # the last prompt was slow, and this one begins with a fast chunk
            engine._pace.step = 32
            slow(monkeypatch, repeat(0.01))
        joining = ask(engine, tuple(LONG * 2)[:size], 2, number)
        while joining.finish_reason is None:
            engine.step()
        assert joining.tokens == greedy(model, joining.prompt_tokens, 2)
    assert not errors
    assert decoding.finish_reason is None


def test_a_narrow_chunk_that_fails_is_not_tried_wider(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the widest is more than what has failed."""
    engine = engine_of(target, None, backend=BY_LAYERS, prefill_step_size=512)
    short = ask(engine, (5, 6), 60)
    while len(short.tokens) < 5:
        engine.step()
    engine._pace.step = 64
    widths = widths_of(monkeypatch, most=32)
    long = ask(engine, LONG, 9, 1)
    finish(engine)
    assert max(widths) == 64
    assert long.tokens == greedy(target, LONG, 9)
