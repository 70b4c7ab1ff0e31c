"""The device fails while prompts are prefilled: that ends one request at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from specdec import SamplingParams, SpecDecoder
from specdec.backend import BackendDefaults
from specdec.engine.rehearsal import Rehearsal
from specdec.models.runner import ModelRows
from tests.plain import AT_ONCE, BACKENDS, ask, engine_of, greedy, run_rows
from tests.test_decoder import loaded

PROMPTS = [[5, 6, 7], [8] * 40, [9, 10, 11, 12] * 9, [14, 15] * 19, [17, 18, 19]]
#: Only the prompt that is never decoded has it.
LARGE = 60


def failing(
    patch: pytest.MonkeyPatch, fails: Callable[[mx.array], bool], *, late: bool = False
) -> list[int]:
    """Have chunks of prompts fail, when they are built or when they are computed.

    Returns:
        How many rows each chunk that failed had.
    """
    right, wait, failed, due = ModelRows._padded_forward, mx.synchronize, [], [False]

    def forward(self: ModelRows, tokens: mx.array, *args: Any, **more: Any) -> mx.array:
        if tokens.shape[1] > 2 and fails(tokens):
            failed.append(tokens.shape[0])
            if not late:
                raise RuntimeError("[malloc] Unable to allocate 9 bytes.")
            due[0] = True
        return right(self, tokens, *args, **more)

    def synchronize(*stream: Any) -> None:
        wait(*stream)
        if due[0]:
            due[0] = False
            raise RuntimeError("[malloc] Unable to allocate 9 bytes.")

    patch.setattr(ModelRows, "_padded_forward", forward)
    patch.setattr(mx, "synchronize", synchronize)
    return failed


def has_large(tokens: mx.array) -> bool:
    return bool((tokens == LARGE).any().item())


@BACKENDS
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("with_draft", [False, True])
def test_rows_that_do_not_fit_together_join_alone(
    target: Any,
    drafts: dict[str, Any],
    late: bool,
    with_draft: bool,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is lost, whether the error comes at once or when the host waits."""
    draft = drafts["near"] if with_draft else None
    wanted = [greedy(target, p, 12) for p in PROMPTS]
    failed = failing(monkeypatch, lambda tokens: tokens.shape[0] > 1, late=late)
    params = [SamplingParams(max_tokens=12)] * len(PROMPTS)
    rows = run_rows(target, draft, PROMPTS, params, batch_size=4, backend=backend)
    assert failed
    assert [row.error for row in rows] == [None] * len(PROMPTS)
    assert [row.tokens for row in rows] == wanted


@BACKENDS
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_request_whose_prompt_fails_ends_alone(
    target: Any,
    batch_size: int,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those beside it, those that run and those that wait get all of their tokens."""
    prompts = [*PROMPTS[:3], [LARGE] * 50, *PROMPTS[3:]]
    wanted = [greedy(target, p, 12) for p in PROMPTS]
    failing(monkeypatch, has_large)
    rows = run_rows(
        target, None, prompts, [SamplingParams(max_tokens=12)] * len(prompts),
        batch_size=batch_size, backend=backend,
    )  # fmt: skip
    lost = rows.pop(3)
    assert lost.error == (
        "it cannot be decoded (RuntimeError: [malloc] Unable to allocate 9 bytes.)"
    )
    assert (lost.tokens, lost.finish_reason) == ([], "error")
    assert [row.tokens for row in rows] == wanted


@BACKENDS
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("most", [32, 64, 200])
def test_a_prompt_alone_tries_smaller_chunks(
    target: Any,
    late: bool,
    most: int,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt is lost that a smaller chunk lets in; others get small ones too."""
    prompts = [[5, 6, 7], [8, 9] * 150, [10] * 30]
    wanted = [greedy(target, p, 12) for p in prompts]
    failed = failing(monkeypatch, lambda tokens: tokens.shape[1] > most, late=late)
    rows = run_rows(
        target, None, prompts, [SamplingParams(max_tokens=12)] * 3,
        batch_size=1, backend=backend, prefill_step_size=256,
    )  # fmt: skip
    assert len(failed) == (2 if most < 64 else 1)
    assert [row.error for row in rows] == [None] * 3
    assert [row.tokens for row in rows] == wanted
    assert [row.prefill_step is None for row in rows] == [True, False, True]


def test_a_device_that_fails_at_anything_ends_the_engine(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server would go on refusing each request, and nobody would replace it."""
    failing(monkeypatch, has_large)

    def broken(*arrays: Any) -> None:
        raise RuntimeError("the device is lost")

    engine = engine_of(target)
    ask(engine, (LARGE,) * 50, 12)
    monkeypatch.setattr(mx, "eval", broken)
    with pytest.raises(RuntimeError, match="malloc"):
        engine.step()


def test_ranks_fail_together(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may not have met the error, and would decode other rows."""
    failing(monkeypatch, has_large)
    engine = engine_of(target)
    engine._rehearsal = Rehearsal(AT_ONCE, alone=False)
    ask(engine, (LARGE,) * 50, 12)
    with pytest.raises(RuntimeError, match="malloc"):
        engine.step()


def test_a_server_goes_on(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's prompt is not the end of all others' answers."""
    failing(monkeypatch, has_large)
    decoder = SpecDecoder(loaded(target))
    prompts, params = [[5, 6, 7], [LARGE] * 50, [8, 9]], SamplingParams(max_tokens=12)

    async def serve() -> list[Any]:
        async with decoder.serve() as server:
            answers = (server.generate(prompt, params) for prompt in prompts)
            first = await asyncio.gather(*answers)
            return [*first, await server.generate([3, 4], params)]

    results = asyncio.run(serve())
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length"]
    for i, prompt in ((0, [5, 6, 7]), (2, [8, 9]), (3, [3, 4])):
        assert results[i].token_ids == greedy(target, prompt, 12)
