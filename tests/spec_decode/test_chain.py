"""A lookup, and a model where it finds nothing, in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.models.layer_skip import SkippingModel
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    Drafter,
    DraftModel,
    DraftRows,
    NgramDrafter,
    NgramOptions,
    Proposals,
    Round,
)
from specdec.spec_decode.chain import ChainRows, continued
from specdec.spec_decode.draft_model import DraftModelRows
from tests.plain import AT_ONCE, BACKENDS, BEHIND, VOCAB, drafts_of, exact, greedy
from tests.spec_decode.repetitive import check_distribution, make_prompts


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0, num_hidden_layers=3)


@pytest.fixture(scope="module")
def drafts(target: Any, tiny_model: Callable[..., Any]) -> dict[str, Any]:
    return {
        "perfect": target,
        "layers": SkippingModel(target, (0, 2)),
        "small": tiny_model("llama", seed=5, vocab_size=VOCAB - 20),
    }


def in_chain(
    first: Drafter,
    draft: Any,
    backend: BackendDefaults,
    k: int,
    vocab_size: int = VOCAB,
) -> ChainDrafter:
    runner = ModelRunner(draft, "draft", EngineConfig(prefill_step_size=16), backend)
    second = DraftModel(runner, vocab_size=vocab_size, max_draft_tokens=k)
    return ChainDrafter(first, second)


def lookup() -> NgramDrafter:
    return NgramDrafter(NgramOptions(min_ngram=1, max_ngram=3))


@pytest.mark.parametrize(
    ("k", "batch_size", "backend"), [(1, 8, AT_ONCE), (4, 3, BEHIND)]
)
@pytest.mark.parametrize("draft", ["perfect", "layers", "small"])
def test_greedy_and_sampled_rows_equal_plain_decoding(
    target: Any,
    drafts: dict[str, Any],
    draft: str,
    k: int,
    batch_size: int,
    backend: BackendDefaults,
) -> None:
    prompts = make_prompts()
    params = [
        SamplingParams(max_tokens=23 + i % 3, temperature=t, seed=i)
        for i, t in enumerate((0.0, 0.0, 0.7, 1.0, 0.0, 1.3, 0.0, 0.5))
    ]
    rows = exact(
        target, None, prompts, params,
        batch_size=batch_size, num_draft_tokens=k, backend=backend,
        drafter=in_chain(lookup(), drafts[draft], backend, k),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    # Wrong lookups included, so that even a perfect model does not make all right.
    assert 0 < accepted < drafted


def test_a_ratio_rule_keeps_the_distribution(tiny_model: Callable[..., Any]) -> None:
    """Rows of n-grams have all probability on a token, beside rows that have not."""
    model = tiny_model("llama", seed=3, vocab_size=4, num_hidden_layers=3)
    accepted = check_distribution(
        model,
        in_chain(
            NgramDrafter(NgramOptions(min_ngram=2)),
            SkippingModel(model, (0, 2)),
            BEHIND,
            2,
            vocab_size=4,
        ),
        SamplingParams(temperature=1.0, verification="block"),
        BEHIND,
        prompt=[1, 2, 0, 3, 1, 2, 0, 1],
        vocab_size=4,
        num_rows=1024,
    )
    assert accepted > 100


class Oracle(Drafter):
    """Knows how each row goes on, and says 0 to k tokens of it; some are wrong."""

    def __init__(self, whole: dict[tuple[int, ...], list[int]]):
        whole = {(0,): [0], **whole}  # idle slots
        self.whole = {p: np.array([*w, *([0] * 16)]) for p, w in whole.items()}
        self.rng = random.Random(0)
        # What the rows of the newest round will have become.
        self.newest: list[list[int]] = []

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> OracleRows:
        return OracleRows(self, [self.whole[tuple(p)] for p in prompts])


class OracleRows(DraftRows):
    def __init__(self, drafter: Oracle, whole: list[Any]):
        self.drafter = drafter
        self.rng = drafter.rng
        self.whole = whole

    def propose(self, round_: Round) -> Proposals:
        k = round_.num_draft_tokens
        self.drafter.newest = [w[:-16].tolist() for w in self.whole]
        lengths: Any = round_.lengths.tolist()
        tokens = [
            [int(w[min(n + j, len(w) - 1)]) for j in range(k)]
            for w, n in zip(self.whole, lengths, strict=True)
        ]
        meant = [self.rng.randrange(k + 1) for _ in tokens]
        for row, n in zip(tokens, meant, strict=True):
            if n and self.rng.random() < 0.3:
                row[n - 1] = (row[n - 1] + 1) % VOCAB
        return Proposals(mx.array(tokens), lengths=mx.array(meant))

    def filter(self, rows: Sequence[int]) -> None:
        self.whole = [self.whole[i] for i in rows]

    def extend(self, other: OracleRows) -> None:
        self.whole = self.whole + other.whole


@BACKENDS
def test_the_models_cache_is_right_whoever_proposed(
    target: Any,
    drafts: dict[str, Any],
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lookups of any length, right and wrong: its own choices are as without them."""
    prompts = make_prompts()[:5]
    whole = [[*p, *greedy(target, p, 32)] for p in prompts]
    oracle = Oracle({tuple(p): w for p, w in zip(prompts, whole, strict=True)})
    checked: list[bool] = []
    propose = DraftModelRows.propose

    def spying(self: DraftModelRows, round_: Round) -> Proposals:
        proposals = propose(self, round_)
        if round_.given is None:
            return proposals
        lengths: Any = round_.lengths.tolist()
        tokens: Any = proposals.tokens.tolist()
        meant: Any = round_.given.meant.tolist()
        for prefix, n, row, given in zip(
            oracle.newest, lengths, tokens, meant, strict=True
        ):
            if n > len(prefix) - 1:
                continue
            logits = drafts["layers"](mx.array([[*prefix[:n], *row]]))[0, n - 1 : -1]
            choices: Any = mx.argmax(logits, axis=-1).tolist()
            checked.extend(
                a == b for a, b, g in zip(row, choices, given, strict=True) if not g
            )
        return proposals

    monkeypatch.setattr(DraftModelRows, "propose", spying)
    exact(
        target, None, prompts, 32, num_draft_tokens=4, backend=backend,
        drafter=in_chain(oracle, drafts["layers"], backend, 4),
    )  # fmt: skip
    assert len(checked) > 40
    assert all(checked)


@BACKENDS
def test_lookups_add_to_what_is_accepted(
    backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    """A target that goes round in circles, and a draft that knows nothing of it."""
    target = tiny_model("llama", seed=0, num_hidden_layers=1)
    out = target.model.layers[0].self_attn.o_proj
    out.weight = mx.zeros_like(out.weight)
    draft = tiny_model("llama", seed=5)
    prompts = make_prompts()[:3]
    rounds = []
    for drafter in (None, in_chain(lookup(), draft, backend, 4)):
        alone = draft if drafter is None else None
        rows = exact(
            target, alone, prompts, 60,
            num_draft_tokens=4, backend=backend, drafter=drafter,
        )  # fmt: skip
        rounds.append(sum(r.rounds for r in rows))
    assert rounds[1] < 0.6 * rounds[0]


@pytest.mark.parametrize(
    ("contexts", "chained"),
    [((None, None), None), ((50, None), 50), ((None, 40), 40), ((30, 40), 30)],
)
def test_the_smaller_context_holds(
    contexts: tuple[int | None, int | None], chained: int | None
) -> None:
    """A row that outgrows one of the two is not drafted for any more."""
    first, second = Oracle({}), Oracle({})
    first.context_length, second.context_length = contexts
    assert ChainDrafter(first, second).context_length == chained


@pytest.mark.parametrize(
    ("most", "chained"),
    [((8, 3), 8), ((3, 8), 8), ((None, 3), None), ((3, None), None)],
)
def test_the_larger_of_both_counts(
    most: tuple[int | None, int | None], chained: int | None
) -> None:
    """What one can propose, or has to catch up with, is left out."""
    first, second = Oracle({}), Oracle({})
    first.max_proposals, second.max_proposals = most
    assert ChainDrafter(first, second).max_proposals == chained
    rows: Any = [SimpleNamespace(backlog=n or 0) for n in most]
    assert ChainRows(rows[0], rows[1], (0, 0)).backlog == max(n or 0 for n in most)


def test_the_second_goes_on_where_the_first_ends() -> None:
    """What it proposes beyond the first's end counts."""
    first = Proposals(mx.array([[1, 2], [3, 4]]), lengths=mx.array([1, 0]))
    second = Proposals(mx.array([[5, 6], [7, 8]]), lengths=mx.array([2, 1]))
    both = continued(first, second, VOCAB)
    assert both.tokens.tolist() == [[1, 6], [7, 8]]
    assert both.lengths is not None
    assert both.lengths.tolist() == [2, 1]
