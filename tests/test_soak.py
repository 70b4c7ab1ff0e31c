"""A bounded part of the soak, and that it finds what it is there to find."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec.engine.batch import DecodeBatch
from specdec.engine.engine import Engine
from specdec.engine.round import BatchRound
from specdec.models.runner import ModelRows
from specdec.utils.output_text import OutputText
from tests.soak import KINDS, soak

WORLDS = len(KINDS) + 2
REQUESTS = 12  # in each


@pytest.fixture(autouse=True)
def _all_is_collected() -> Iterator[None]:
    """Bytes are counted: nothing that was there before the tests keeps any."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow  # where much is alive: garbage is looked for again and again
def test_random_requests_come_and_go() -> None:
    """The long run is ``scripts/soak``."""
    counts = soak(0, lambda done: done.worlds < WORLDS, requests=REQUESTS)
    assert counts.worlds == WORLDS
    assert counts.rows == REQUESTS * WORLDS
    assert min(counts.cancelled, counts.failed, counts.interrupted) > 0
    assert counts.accepted > 50
    assert min(counts.auto_plain, counts.auto_drafting) > 20


def rows_stay(self: Engine) -> None:
    if self._running is not None:
        self._running.retire()


_plan = DecodeBatch.plan


def limits_of_the_batch(self: DecodeBatch) -> BatchRound | None:
    """Every row may accept what any row may."""
    if (plan := _plan(self)) is None:
        return None
    most = plan.num_draft_tokens
    return replace(plan, limits=tuple([min(n, 0) or most for n in plan.limits]))


_trim = ModelRows.trim_per_sequence


_spoilt: weakref.WeakSet[ModelRows] = weakref.WeakSet()


def trims_too_little(self: ModelRows, n: Any, at_most: int, *fewest: int) -> None:
    """Once for each batch: rows that grow and grow would be written past the end."""
    counts = mx.array(n)
    if self not in _spoilt and at_most > 1:
        _spoilt.add(self)
        counts = mx.where(counts > 1, counts - 1, counts)
    _trim(self, counts, at_most, *fewest)


def holds_nothing_back(self: OutputText) -> int:
    return 0


@pytest.mark.parametrize(
    ("owner", "name", "fault", "seed", "requests"),
    [
        (Engine, "_retire", rows_stay, 3, 10),
        (DecodeBatch, "plan", limits_of_the_batch, 10, 25),
        (ModelRows, "trim_per_sequence", trims_too_little, 30, 10),
        (OutputText, "_held_back", holds_nothing_back, 30, 10),
    ],
    ids=["rows-stay", "limits", "trim", "held-back"],
)
def test_it_finds_planted_faults(
    owner: Any,
    name: str,
    fault: Any,
    seed: int,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By most seeds; these find it in the first world."""
    monkeypatch.setattr(owner, name, fault)
    # Room for what rows keep too much: past the end is other memory.
    room = DecodeBatch._max_length
    monkeypatch.setattr(DecodeBatch, "_max_length", lambda self: room(self) + 16)
    with pytest.raises(AssertionError):
        soak(seed, lambda done: done.worlds < WORLDS, requests=requests)
