"""What counts as a tie, without models: nothing with a large gap ever does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.tools.parity import Divergence, Evidence, Scores, why_no_tie
from specdec.tools.parity.compare import Token, first_difference


def evidence(
    *,
    step: float = 0.1,
    verify: float = -0.1,
    noise: float = 0.1,
    logprob: float | None = 0.05,
) -> Evidence:
    return Evidence(
        step=Scores(batch_size=1, width=1, top2_gap=abs(step), gap=step),
        verify=Scores(batch_size=8, width=4, top2_gap=abs(verify), gap=verify),
        noise=noise,
        logprob_difference=logprob,
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"step": 0.2, "verify": 0.2}, None),  # twice the noise, and not more
        ({"step": 0.0, "verify": 0.0}, None),
        ({"logprob": None}, None),
        ({"logprob": -0.2}, None),
        ({"noise": 1e-6, "step": 1e-6, "verify": 0.0, "logprob": 0.0}, None),
        ({"step": 0.21}, "step gap 0.21"),
        ({"step": -0.21}, "step gap -0.21"),
        ({"verify": -0.21}, "verify gap -0.21"),
        ({"step": 3.0, "verify": -3.0}, "step gap 3"),
        ({"logprob": 0.21}, "log-probability is +0.21 off"),
        ({"logprob": -5.0}, "log-probability is -5 off"),
        ({"noise": 0.0}, "the two shapes agree"),
        ({"noise": 0.0, "step": 0.0, "verify": 0.0}, "the two shapes agree"),
        ({"noise": math.nan}, "the two shapes agree"),
        ({"step": math.nan}, "step gap nan"),
        ({"verify": math.inf}, "verify gap inf"),
        ({"logprob": math.nan}, "nan off"),
    ],
)
def test_ties_and_failures(changes: dict[str, Any], why: str | None) -> None:
    reason = why_no_tie(evidence(**changes))
    assert reason is None if why is None else why in str(reason)


@given(
    st.floats(allow_nan=True),
    st.floats(allow_nan=True),
    st.floats(allow_nan=True),
    st.none() | st.floats(allow_nan=True),
)
def test_a_gap_beyond_the_noise_is_never_a_tie(
    step: float, verify: float, noise: float, logprob: float | None
) -> None:
    measured = evidence(step=step, verify=verify, noise=noise, logprob=logprob)
    if why_no_tie(measured) is None:
        gaps = [abs(step), abs(verify), *([] if logprob is None else [abs(logprob)])]
        assert noise > 0
        assert max(gaps) <= 2 * noise


def test_a_divergence_says_what_it_is() -> None:
    where: dict[str, Any] = {"prompt": 1, "position": 2, "prefix_tokens": 9}
    where["plain"] = Token(5, "a")
    tie = Divergence(**where, engine=Token(6, "b"), evidence=evidence())
    assert (tie.kind, tie.reason) == ("tie", None)
    assert tie.to_dict()["evidence"]["gap_noise"] == pytest.approx(0.2)  # type: ignore[index]
    ended = Divergence(**where, engine=None, evidence=None)
    assert ended.kind == "failure"
    assert "ended" in str(ended.reason)


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 3], 1),
        ([1, 3], [1], 1),
        ([], [1], 0),
        ([2, 1], [1, 2], 0),
    ],
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at
