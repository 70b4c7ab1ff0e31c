"""Rates over the rounds in which every row was running."""

from __future__ import annotations

import pytest

from specdec.tools.bench.waves import Record, full_rate, full_rounds, quiet_rate


def record(*rounds: tuple[int, float, int, int]) -> Record:
    """One wave of two rows: (k, milliseconds, rows, accepted by each) of its rounds."""
    return {
        "waves": [
            {
                "rows": 2,
                "step_ms": [ms for _, ms, _, _ in rounds],
                "step_rows": [rows for _, _, rows, _ in rounds],
                "rounds": [[k, [[k, n]] * rows] for k, _, rows, n in rounds],
            }
        ]
    }


def test_first_rounds_and_those_of_fewer_rows_are_left_out() -> None:
    one = record((2, 90.0, 2, 0), (2, 10.0, 2, 1), (0, 5.0, 2, 0), (2, 7.0, 1, 2))
    assert full_rounds(one) == [(2, 10.0, 2, 4), (0, 5.0, 2, 2)]
    assert full_rate(one) == pytest.approx(6 / 0.015)


def test_other_load_does_not_count_in_the_quiet_rate() -> None:
    """Each round counts with its k's quickest ones, so that a mix of k stays one."""
    calm = record((0, 1.0, 2, 0), (0, 5.0, 2, 0), (2, 10.0, 2, 2), (2, 10.0, 2, 1))
    stalled = record((0, 1.0, 2, 0), (0, 9.0, 2, 0), (2, 80.0, 2, 2), (0, 9.0, 2, 0))
    tokens = 2 + 6 + 4 + 2 + 6 + 2
    assert quiet_rate([calm, stalled]) == pytest.approx(tokens / (3 * 10 + 3 * 5) * 1e3)


def test_nothing_ran() -> None:
    assert full_rate(record()) == 0.0
    assert quiet_rate([record()]) == 0.0
