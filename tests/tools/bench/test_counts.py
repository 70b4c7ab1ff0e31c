"""The arithmetic of accepted counts, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.tools.bench import counts
from specdec.tools.bench.counts import RoundCost

ROW = st.integers(0, 4).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int]]]]:
    """A few rounds of k = 1 to 3 with rows that may draft less."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        k = draw(st.integers(1, 3))
        rows = []
        for _ in range(draw(st.integers(1, 3))):
            drafted = draw(st.integers(0, k))
            rows.append((drafted, draw(st.integers(0, drafted))))
        made.append((k, rows))
    return made


@given(st.lists(ROW, max_size=30))
def test_positions_and_histogram_by_counting(rows: list[tuple[int, int]]) -> None:
    each = counts.positions(rows)
    for j, p in enumerate(each, 1):
        assert p.tried == sum(d >= j and a >= j - 1 for d, a in rows)
        assert p.accepted == sum(a >= j for _, a in rows)
    assert len(each) == max((d for d, _ in rows), default=0)
    found = counts.histogram(rows)
    assert found == [sum(a == n for _, a in rows) for n in range(len(found))]
    assert sum(found) == len(rows)
    chances = counts.unconditional(each)
    assert chances == sorted(chances, reverse=True)
    # Where all rows drafted alike, it is the share of them.
    alike = [(4, a) for d, a in rows if d == 4]
    shares = [sum(a >= j for _, a in alike) / len(alike) for j in range(1, 5) if alike]
    assert counts.unconditional(counts.positions(alike)) == pytest.approx(shares)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.75, 1.0])
def test_expected_tokens_by_enumeration(a: float, k: int) -> None:
    """Sum over where the first rejection is."""
    expected = sum(a**j * (1 - a) * (j + 1) for j in range(k)) + a**k * (k + 1)
    assert counts.expected_tokens(a, k) == pytest.approx(expected)


def test_expected_tokens_of_the_batch_minimum() -> None:
    """The minimum of B rows is as one row of acceptance a^B (design figures)."""
    assert counts.expected_tokens(0.75, 4) == pytest.approx(3.05, abs=0.005)
    assert counts.expected_tokens(0.75**4, 4) == pytest.approx(1.46, abs=0.005)
    assert counts.expected_tokens(0.75**8, 4) == pytest.approx(1.11, abs=0.005)


def test_short_rounds_do_not_raise_later_positions() -> None:
    """Of two rounds one had no room for a second token: 1/2, then 1/2 of 1."""
    each = counts.positions([(1, 0), (2, 2)])
    assert [p.conditional for p in each] == [0.5, 1.0]
    assert counts.unconditional(each) == [0.5, 0.5]


def test_chance_counts_tried_tokens_only() -> None:
    """Tokens after a rejection were never tried: 4 of 6 were, not 4 of 9."""
    assert counts.chance([(3, 1), (3, 0), (3, 3)]) == pytest.approx(4 / 6)
    assert counts.chance([]) == 0


@given(rounds())
def test_counterfactuals_by_brute_force(
    traced: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    cost = RoundCost(draft_step=0.3, verify=1.4, k=3)
    ran = counts.per_sequence(traced, cost)
    assert ran.tokens == sum(1 + a for _, rows in traced for _, a in rows)
    assert ran.draft_steps == sum(k for k, _ in traced)
    assert ran.cost == pytest.approx(sum(cost.of(k) for k, _ in traced))
    cut = counts.batch_minimum(traced, cost)
    assert cut.tokens == sum(
        len(rows) * (1 + min(a for _, a in rows)) for _, rows in traced
    )
    assert cut.cost == ran.cost

    def per_time(ks: tuple[int, ...]) -> float:
        tokens = sum(
            1 + min(a, k)
            for k, (_, rows) in zip(ks, traced, strict=True)
            for _, a in rows
        )
        return tokens / sum(cost.of(k) for k in ks)

    best = max(per_time(ks) for ks in product(*(range(k + 1) for k, _ in traced)))
    oracle = counts.oracle(traced, cost)
    assert oracle.cost is not None
    assert oracle.tokens / oracle.cost == pytest.approx(best)
    assert oracle.row_rounds == ran.row_rounds == cut.row_rounds
    # Without costs: nothing is drafted that no row accepts.
    free = counts.oracle(traced, None)
    assert free.tokens == ran.tokens
    assert free.draft_steps == sum(max(a for _, a in rows) for _, rows in traced)
    assert free.speedup is None


def test_speedup_is_over_a_plain_step_of_the_same_rows() -> None:
    """Two rows keep 3 + 1 tokens for the price of 2 plain steps, which give 4."""
    policy = counts.per_sequence([(2, [(2, 2), (2, 0)])], RoundCost(0.25, 1.5, 2))
    assert policy.cost == 2
    assert policy.speedup == pytest.approx(1.0)
    assert policy.tokens_per_round == 2


def test_a_verify_forward_grows_linearly() -> None:
    cost = RoundCost(draft_step=0.5, verify=2.0, k=4)
    assert [cost.of(k) for k in (0, 2, 4)] == [1.0, 2.5, 4.0]
