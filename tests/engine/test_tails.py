"""Drafts whose caches have a tail: bytes that rounds hold, and the same proposals.

MLX copies an array that a command in flight still reads. Bytes are counted on the CPU,
which copies where Metal does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, backend
from specdec.cache import make_batch_caches
from specdec.cuda.attention_patch import usual_calls
from specdec.cuda.split_attention import Split
from specdec.models import metal_kernels
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode.draft_model import DraftModelRows
from tests.models.architectures import build
from tests.plain import METAL, VOCAB, drafts_of, exact, run_rows
from tests.scripted import Script

from .test_copies import held

USUAL, TAILS = (replace(METAL, tail=n) for n in (0, 8))
_rng = random.Random(7)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(n)] for n in (1, 40, 7, 30, 2, 70, 3)]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=0.8 * (n % 2), seed=n)
    for n in (20, 31, 9, 26, 2, 33, 14)
]


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails pay from 24 tokens of all rows on."""
    monkeypatch.setattr(metal_kernels, "tail_from", lambda model: 24)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of each attention to a base and a tail."""
    seen: list[int] = []
    usual = Split.attention

    def attention(self: Split, queries: mx.array, *how: Any) -> mx.array:
        seen.append(queries.shape[2])
        return usual(self, queries, *how)

    monkeypatch.setattr(Split, "attention", attention)
    return seen


def proposals(
    patch: pytest.MonkeyPatch, target: Any, draft: Any, **options: Any
) -> tuple[list[Any], tuple[int, int]]:
    """What a draft proposes in each round, and how much of it is accepted."""
    noted: list[mx.array] = []
    usual = DraftModelRows.propose

    def propose(self: DraftModelRows, round_: Any) -> Any:
        proposed = usual(self, round_)
        noted.append(mx.where(round_.active[:, None], proposed.tokens, -1))
        return proposed

    with patch.context() as place:
        place.setattr(DraftModelRows, "propose", propose)
        script = random.Random(3)
        rows = exact(
            target, draft, PROMPTS, PARAMS, batch_size=3, num_draft_tokens=4,
            length=Script(lambda number: script.choice((0, 1, 2, 4, 4))), **options,
        )  # fmt: skip
    return [each.tolist() for each in noted], drafts_of(rows)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"prefix_cache_memory": 2**24, "prefill_step_size": 7}),
        ("gemma3_text", {}),
        ("gemma2", {}),
    ],
)
def test_a_draft_proposes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    split: list[int],
    target: Any,
    drafts: dict[str, Any],
    kind: str,
    options: dict[str, Any],
) -> None:
    """Rows of different lengths that join, leave, rest and grow; windows, too.

    Code of its own that reads keys gets caches without a tail.
    """
    draft = drafts["near"] if kind == "llama" else build(kind)
    usual = proposals(monkeypatch, target, draft, backend=USUAL, **options)
    assert not split
    assert usual == proposals(monkeypatch, target, draft, backend=TAILS, **options)
    assert bool(split) == (kind != "gemma2")
    assert set(split) <= {1, 2, 3, 4, 5}
    usual_calls(draft)


@pytest.mark.parametrize("start", [0, 30])
def test_packed_caches_have_no_tail(
    tiny_model: Callable[..., Any], split: list[int], start: int
) -> None:
    """One that is packed once rows are long has a tail until then."""
    target, draft = (tiny_model("llama", seed=n, head_dim=32) for n in (0, 0))
    packed: dict[str, Any] = {
        "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start,
    }  # fmt: skip
    texts = []
    for each in (USUAL, TAILS):
        rows = run_rows(
            target, draft, PROMPTS[:3], PARAMS[:3], backend=each, batch_size=3, **packed
        )
        texts.append([row.tokens for row in rows])
        assert not split or (each is TAILS and start)
    assert texts[0] == texts[1]
    assert bool(split) == bool(start)


@pytest.mark.parametrize("kind", ["gemma3n", "afm7", "falcon_h1"])
def test_layers_that_share_keys_or_have_states_see_the_same(
    split: list[int], kind: str
) -> None:
    """Those that share keys read them without a write."""
    runner = ModelRunner(build(kind), "draft", EngineConfig(), TAILS).with_tails()
    logits: list[list[mx.array]] = []
    split.clear()  # of the check
    for tail in (0, 8):
        options = replace(runner.options, max_write=40, tail=tail)
        caches = make_batch_caches(runner.model, 3, options)
        logits.append([])
        for width, trims in (
            (20, [3, 0, 7]),
            (2, [0, 1, 0]),
            (1, [0] * 3),
            (4, [1] * 3),
        ):
            tokens = mx.arange(3 * width).reshape(3, width)
            logits[-1].append(runner.model(tokens, cache=caches))
            for cache in caches:
                cache.trim_per_sequence(trims)
        assert bool(split) == bool(tail)
    for usual, ours in zip(*logits, strict=True):
        assert mx.allclose(usual, ours, rtol=1e-5, atol=1e-5)


def test_a_draft_holds_its_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tail, the k forwards of a round hold k of them."""
    few = replace(backend.defaults("cpu"), costs_by_token=False, static_shapes=True)
    usual = held_with(monkeypatch, few)
    ours = held_with(monkeypatch, replace(few, tail=32))
    caches = 1 + 2  # the target's layer and the draft's
    assert ours < 1.15 * caches < usual - 1


def held_with(patch: pytest.MonkeyPatch, settings: backend.BackendDefaults) -> float:
    with patch.context() as place:
        place.setattr(backend, "defaults", lambda name=None: settings)
        return held(1, 4)
