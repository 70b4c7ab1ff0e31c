"""Figures and reports of raw lines that were made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec.tools.bench import figures as figures_module
from specdec.tools.bench.cells import Cell, Conditions, cells_of, conditions_of
from specdec.tools.bench.counts import RoundCost
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.report import findings, report

Tiny = Callable[..., Recipe]

MACHINE = {
    "cpu": "abacus",
    "cores": 2,
    "memory_gib": 1.0,
    "backend": "cpu",
    "device": "abacus",
    "mlx": "0",
    "mlx_lm": "0",
    "python": "3",
}


def wave(tokens: int, seconds: float, **others: Any) -> dict[str, Any]:
    """A wave of two rows that decoded ``tokens`` in ``seconds``."""
    return {
        "rows": 2,
        "decode_tokens": tokens,
        "decode_seconds": seconds,
        "first_tokens": [0.5, 1.0],
        "step_ms": [10.0, 20.0, 90.0],
        "step_rows": [2, 2, 1],
        "requests": [[0, 0, 0, 4], [0, 0, 0, 4]],
        "rounds": [],
        **others,
    }


def taken_apart(draft: float, verify: float) -> dict[str, Any]:
    """A round: half a millisecond to build each part, the rest waited for."""
    parts = {"verify": [0.5, verify - 0.5], "sampling": [0.0, 1.0], "total": 20.0}
    return {**parts, "draft": [0.5, draft - 0.5]} if draft else parts


@pytest.fixture
def figures(tiny: Tiny) -> Figures:
    """Batch 2: plain at 10 then 5 tokens/s, drafted at 20 then 5."""
    counted = {
        "requests": [[2, 4, 3, 6], [3, 6, 0, 2]],
        "rounds": [[2, [[2, 2], [2, 0]]], [2, [[2, 1], [2, 0]]], [2, [[2, 0]]]],
    }
    return figures_of(tiny("batch=2"), counted, repeat=2)


def figures_of(recipe: Recipe, counted: dict[str, Any], *, repeat: int) -> Figures:
    """Those of the passes up to ``repeat``."""
    (conditions,) = conditions_of(recipe)
    theirs, plain, drafted = cells_of(recipe, conditions)
    prompts = {"tokens": [3, 4], "categories": ["a", "b"], "found": 5, "digest": ""}
    results = Results(recipe.to_dict(), prompts)
    start = {"command": "by hand", "commit": "0" * 40, "date": "today"}
    results.take({"kind": "start", "machine": MACHINE, "load_average": 3.0, **start})
    passes: list[tuple[Cell, int, dict[str, Any]]] = [
        (theirs, 0, wave(8, 1.0)),
        (theirs, 1, wave(8, 0.5)),
        (theirs, 2, wave(8, 0.5)),
        (plain, 0, wave(8, 8.0)),
        (plain, 1, wave(10, 1.0)),
        (plain, 2, wave(10, 2.0)),
        (drafted, 0, wave(8, 4.0, **counted)),
        (drafted, 1, wave(20, 1.0, **counted)),
        (drafted, 2, wave(10, 2.0, **counted)),
    ]
    for cell, number, record in passes:
        if number > repeat:
            continue
        results.take(
            {
                "kind": "pass",
                "cell": cell.to_dict(),
                "pass": number,
                "peak_memory_bytes": 3 * 2**20,
                "memory_before_bytes": 2**20,
                "waves": [record],
            }
        )
    for cell, apart in (
        (plain, taken_apart(0, 10.0)),
        (drafted, taken_apart(4.0, 15.0)),
    ):
        rounds = [apart, apart]
        line = {"kind": "profile", "cell": cell.to_dict(), "rounds": rounds}
        results.take(line)
    return Figures(results)


def test_ratios_are_taken_pass_by_pass(figures: Figures) -> None:
    """A machine at half its speed in the second pass does not blur them."""
    (f,) = figures.drafted
    assert f.ratios(figures.find(f.cell.plain)) == [2.0, 1.0]
    assert f.ratios(figures.find(f.cell.mlx_lm)) == [20 / 16, 5 / 16]
    assert f.ratios(None) == []
    assert f.rate == 12.5
    assert f.cold == 2.0


def test_steps_rows_and_memory(figures: Figures) -> None:
    (f,) = figures.drafted
    assert f.step_ms == [10.0, 20.0] * 2
    assert f.occupancy == 5 / 6
    assert f.first_token_ms == [500.0, 1000.0] * 2
    assert f.peak_bytes == (3 * 2**20, 2 * 2**20)


def test_three_means_of_acceptance(figures: Figures) -> None:
    """One request accepts 3 of 4 in 2 rounds, the other none of 6 in 3."""
    (f,) = figures.drafted
    a = f.acceptance()
    assert (a.accepted, a.drafted, a.rate) == (3, 10, 0.3)
    assert a.length == 1 + 3 / 5
    assert a.request_mean("rate") == 0.75 / 2
    assert a.request_mean("length") == (2.5 + 1.0) / 2
    assert a.token_mean("rate") == 0.75 * 6 / 8
    assert a.token_mean("length") == (2.5 * 6 + 1.0 * 2) / 8
    assert figures.categories == ["a", "b"]
    assert f.acceptance("a").rate == 0.75
    assert f.acceptance("b").rate == 0


def test_costs_and_predictions(figures: Figures) -> None:
    (f,) = figures.drafted
    assert f.cost == RoundCost(draft_step=0.2, verify=1.5, k=2)
    assert f.parts is not None
    shares = {
        "draft": 3.5 / 20,
        "verify": 14.5 / 20,
        "sampling": 1 / 20,
        "host": 1 / 20,
    }
    assert f.parts.shares == pytest.approx(shares)
    # Tried: 2 + 1 + 2 + 1 + 1 tokens; accepted: 3.
    a = 3 / 7
    assert f.predicted == pytest.approx((1 + a + a * a) / 1.9)
    ran = f.policies()["per-sequence trim (what ran)"]
    assert ran.speedup == pytest.approx((8 / (3 * 1.9)) / (5 / 3))


def test_where_nothing_was_drafted(tiny: Tiny) -> None:
    """No draft is announced, and a length of 1 means that nothing was accepted."""
    figures = figures_of(tiny("batch=2"), {}, repeat=2)
    assert findings(figures) == ["- **batch 2**: nothing was drafted."]
    (f,) = figures.drafted
    a = f.acceptance()
    assert (a.length, a.request_mean("length"), a.token_mean("length")) == (1, 1, 1)
    assert (a.rate, a.request_mean("rate"), a.token_mean("rate")) == (0, 0, 0)


def test_one_pass_has_no_range(tiny: Tiny) -> None:
    counted = {"requests": [[2, 4, 3, 6], [3, 6, 0, 2]]}
    figures = figures_of(tiny("batch=2", "repeat=1"), counted, repeat=1)
    (line,) = findings(figures)
    assert "2.00 times plain decoding at this batch (one pass only), " in line
    assert " 1 interleaved pass after a first one" in report(figures)


def test_the_report_says_what_was_found(figures: Figures) -> None:
    (line,) = findings(figures)
    assert line == (
        "- **batch 2**: fastest draft random:tiny:1, k = 2: 1.50 times plain "
        "decoding at this batch (1.00 to 2.00), 0.78 times mlx-lm's plain decoding; "
        "1.60 tokens per row and round."
    )
    text = report(figures)
    assert "2 of 5 prompts of 3 to 4 tokens" in text
    assert "**The machine was shared**: load average 3.0 on 2 cores" in text
    assert "| a | batch 2: specdec, random:tiny:1, k = 2 | 1 | 0.750 | 2.50 |" in text
    assert "| b | batch 2: specdec, random:tiny:1, k = 2 | 1 | 0.000 | 1.00 |" in text
    assert (
        "| batch 2: specdec, random:tiny:1, k = 2 | 3 (60%) | 1 (20%) | 1 (20%) |"
        in text
    )


def test_a_draft_is_named_by_the_last_part_of_its_path() -> None:
    """As the target is: where a folder lies is nobody's business."""
    where = Conditions()
    for draft, name in (("/a/b/Tiny-Draft", "Tiny-Draft"), ("self:4bit", "self:4bit")):
        cell = Cell(system="specdec", conditions=where, draft=draft, num_draft_tokens=2)
        assert cell.label == f"specdec, {name}, k = 2"


def test_what_cannot_be_is_said(
    figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More times as fast than tokens a round: plain decoding was held up."""
    monkeypatch.setattr(figures_module, "NOISE", 0.9)  # 1.5 times, 1.6 tokens
    (line,) = findings(figures)
    assert line.startswith("- **batch 2**: random:tiny:1, k = 2: 1.50 times plain ")
    assert "cannot be, at 1.60 tokens per row and round" in line
