"""Prompt lookup in whole runs: exact, honest about what it drafted, bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import ConfigError
from specdec.backend import BackendDefaults
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    NgramDrafter,
    NgramOptions,
    Proposals,
    Round,
    ngram_search,
)
from specdec.spec_decode.ngram import NgramRows
from specdec.spec_decode.ngram_search import longest_match
from tests.plain import AT_ONCE, BACKENDS, BEHIND, drafts_of, exact, greedy, run_rows
from tests.scripted import Script
from tests.spec_decode.repetitive import check_distribution, make_prompts


def drafter(**options: Any) -> NgramDrafter:
    return NgramDrafter(NgramOptions(**{"min_ngram": 1, "max_ngram": 3, **options}))


@pytest.mark.parametrize(
    ("k", "batch_size", "backend"),
    [(1, 8, AT_ONCE), (4, 3, AT_ONCE), (4, 3, BEHIND), (7, 1, BEHIND)],
)
def test_greedy_equals_mlx_lm(
    target: Any, k: int, batch_size: int, backend: BackendDefaults
) -> None:
    rows = exact(
        target, None, make_prompts(), [31 + i % 3 for i in range(8)],
        batch_size=batch_size, num_draft_tokens=k, backend=backend, drafter=drafter(),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert 0 < accepted < drafted
    # Rounds without a match count no draft.
    counts = [(r.num_draft_tokens_per_pos, r.rounds) for r in rows]
    assert all(found[0] < rounds for found, rounds in counts if found)


@BACKENDS
def test_sampled_rows_equal_plain_decoding(
    target: Any, backend: BackendDefaults
) -> None:
    params = [
        SamplingParams(max_tokens=30, temperature=t, seed=100 + i)
        for i, t in enumerate((0.0, 0.3, 0.6, 1.5, 0.0, 0.4, 0.2, 2.0))
    ]
    rows = exact(
        target, None, make_prompts(1), params,
        batch_size=5, backend=backend, drafter=drafter(),
    )  # fmt: skip
    assert sum(r.accepted for r in rows if r.params.temperature) > 0


@pytest.mark.parametrize(
    ("verification", "backend"), [("rejection", AT_ONCE), ("block", BEHIND)]
)
def test_ratio_rules_keep_the_distribution(
    verification: Any, backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    """All of a proposal's probability is on it; rows without one just draw."""
    accepted = check_distribution(
        tiny_model("llama", seed=3, vocab_size=4),
        drafter(),
        SamplingParams(temperature=1.0, verification=verification),
        backend,
        prompt=[1, 2, 0, 3],
        vocab_size=4,
    )
    assert accepted > 100


@pytest.mark.parametrize(
    ("seed", "backend"), [(0, AT_ONCE), (0, BEHIND), (1, AT_ONCE), (2, BEHIND)]
)
def test_rows_that_join_and_leave_change_nothing_for_the_others(
    target: Any, backend: BackendDefaults, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [rng.choice(make_prompts(seed))[:40] for _ in range(14)]
    params = [
        SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 17, 40)),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.3)),
            seed=rng.randrange(100),
            num_draft_tokens=rng.choice((None, None, 0, 1)),
        )
        for _ in prompts
    ]
    eos = frozenset({rng.randrange(97)})
    rows = exact(
        target,
        None,
        prompts,
        params,
        batch_size=rng.choice((2, 3, 5)),
        num_draft_tokens=rng.choice((1, 3)),
        backend=backend,
        prefill_step_size=rng.choice((4, 16)),
        eos=eos,
        drafter=drafter(),
    )
    assert not any(r.drafted for r in rows if r.params.num_draft_tokens == 0)


@pytest.mark.parametrize(
    ("lengths", "backend"),
    [
        ((300, 3, 3), AT_ONCE),
        ((300, 3, 3), BEHIND),
        ((3, 300, 3), BEHIND),
        ((600, 300, 3), AT_ONCE),
        ((600, 3, 300), BEHIND),
        ((253, 3, 600, 3), AT_ONCE),
    ],
)
def test_a_row_joins_after_a_longer_one_has_left(
    target: Any, backend: BackendDefaults, lengths: tuple[int, ...]
) -> None:
    """The ring stays as large as the longer row made it; the new row's is small."""
    prompts = [([3 * i + 5, 3 * i + 6, 3 * i + 7] * 200)[:n] for i, n in
               enumerate(lengths)]  # fmt: skip
    tokens = (4, 24, 12, 6)[: len(lengths)]
    drafter = NgramDrafter()
    exact(target, None, prompts, tokens, batch_size=2, backend=backend, drafter=drafter)


@BACKENDS
def test_the_work_of_a_round_is_bounded(
    target: Any, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the rows, at most max_history tokens are searched; few shapes."""
    capacities: set[int] = set()

    def noted(ring: mx.array, lengths: mx.array, **options: Any) -> Any:
        capacities.add(ring.shape[1])
        return longest_match(ring, lengths, **options)

    monkeypatch.setattr(ngram_search, "longest_match", noted)
    prompts = [make_prompts(i)[4] * n for i, n in enumerate((1, 4, 9))]
    exact(
        target, None, prompts, [300, 40, 50],
        backend=backend, drafter=drafter(max_history=400), prefill_step_size=128,
    )  # fmt: skip
    assert 400 in capacities
    assert capacities <= {256, 400}


def test_no_graph_grows_while_nothing_is_drafted(
    target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What rounds leave to be written is computed when some have come together."""
    writes: list[int] = []
    commit, file = NgramRows.commit, tmp_path / "graph.dot"

    def noted(self: NgramRows, round_: Round, accepted: Any) -> None:
        # Of the rounds before it: this one is not handed over yet.
        mx.export_to_dot(str(file), self._ring)
        writes.append(file.read_text("utf-8").count('"ScatterAxis"'))
        commit(self, round_, accepted)

    monkeypatch.setattr(NgramRows, "commit", noted)
    script = Script(lambda number: 2 * (number == 0))
    exact(target, None, [[1, 2]], 40, drafter=drafter(), length=script)
    assert len(writes) > 30
    assert max(writes) < 8
    assert writes.count(0) <= len(writes) // 8 + 1


@BACKENDS
def test_a_row_that_repeats_itself_is_followed(
    backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    """A target that looks at one token only goes round in circles."""
    target = tiny_model("llama", seed=0, num_hidden_layers=1)
    out = target.model.layers[0].self_attn.o_proj
    out.weight = mx.zeros_like(out.weight)
    whole = greedy(target, [5, 6, 7], 200)
    first = next(i for i, t in enumerate(whole) if t in whole[:i])
    (row,) = exact(
        target, None, [[5, 6, 7]], 200,
        num_draft_tokens=7, backend=backend, drafter=drafter(min_ngram=2),
    )  # fmt: skip
    # From the second token of the second time round, all of it.
    assert row.rounds <= first + 2 + (200 - first) / 8
    assert row.accepted > 0.85 * (200 - first - 2)


@BACKENDS
def test_the_lookup_sees_every_committed_token(
    target: Any, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring holds prompt and output, whatever was kept of a round."""
    prompts = make_prompts()
    expected = [[*p, *greedy(target, p, 40)] for p in prompts]
    seen: list[list[int]] = []
    propose = NgramRows.propose

    def watching(self: NgramRows, round_: Round) -> Proposals:
        proposals = propose(self, round_)
        newest = round_.recent[:, -1]  # comes with the round
        arrays: list[Any] = [round_.lengths, round_.active, self._ring, newest]
        for n, active, ring, token in zip(*(a.tolist() for a in arrays), strict=True):
            seen.append([*ring[: n - 1], token] if active else [])
        return proposals

    monkeypatch.setattr(NgramRows, "propose", watching)
    run_rows(
        target, None, prompts, [SamplingParams(max_tokens=40)] * 8,
        backend=backend, drafter=drafter(),
    )  # fmt: skip
    assert len(seen) > 50
    for tokens in seen:
        assert any(tokens == e[: len(tokens)] for e in expected)


@pytest.mark.parametrize(
    "options",
    [{"min_ngram": 0}, {"min_ngram": 4, "max_ngram": 3}, {"max_history": 10},
     {"max_ngram": 256}],
)  # fmt: skip
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        NgramOptions(**options)
