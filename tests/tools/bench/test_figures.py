"""Figures and reports of raw lines that were made by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from specdec.tools.bench import figures as figures_module
from specdec.tools.bench.cells import Cell, Unit, cells_of, conditions_of
from specdec.tools.bench.figures import CellFigures, Figures, by_position
from specdec.tools.bench.job import JobRecord, RequestRecord, RoundTimes
from specdec.tools.bench.raw import PromptsRecord, Results, Start
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.report import findings, html_page, report
from specdec.utils.tables import percentile
from specdec.utils.validation import read_record

from .conftest import Tiny

MACHINE = {
    **dict.fromkeys(("cpu", "device", "mlx", "mlx_lm", "python"), "abacus"),
    "cores": 2,
    "memory_gib": 1.0,
    "backend": "cpu",
}
MIB = 2**20


def request(tokens: int = 4, *counts: int, **others: Any) -> RequestRecord:
    """One of (rounds, drafted, accepted)."""
    rounds, drafted, accepted = counts or (0, 0, 0)
    record = RequestRecord(
        prompt_tokens=3,
        tokens=tokens,
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        first=0.5,
        ended=1.0,
        digest="x",
    )
    return replace(record, **others)


def job(seconds: float, *requests: RequestRecord, **others: Any) -> JobRecord:
    return JobRecord(
        seconds=seconds,
        requests=list(requests) or [request(), request(first=1.0)],
        rounds=others.pop("rounds", []),
        peak_memory_bytes=3 * MIB,
        memory_before_bytes=MIB,
        **others,
    )


COUNTED = [request(6, 2, 4, 3), request(2, 3, 6, 0)]
TRACED = [(2, [(2, 2), (2, 0)]), (2, [(2, 1), (2, 0)]), (2, [(2, 0)])]


def made(recipe: Recipe, drafted: list[RequestRecord], repeat: int = 2) -> Figures:
    """mlx-lm at 8 then 16 tokens/s; plain at 1, 8 and 4; drafted at 2, 16 and 4."""
    (conditions,) = conditions_of(recipe)
    theirs, plain, ours, *_ = cells_of(recipe, conditions)
    prompts = PromptsRecord(digest="", found=5, tokens=[3, 4], categories=["a", "b"])
    results = Results(recipe.to_dict(), prompts)
    start = {"command": "by hand", "commit": "0" * 40, "date": "today"}
    results.take({"kind": "start", "machine": MACHINE, "load_average": 3.0, **start})
    speeds = {theirs: (1.0, 0.5, 0.5), plain: (8.0, 1.0, 2.0), ours: (4.0, 0.5, 2.0)}
    for cell, seconds in speeds.items():
        for number, each in enumerate(seconds[: repeat + 1]):
            counted = drafted if cell == ours else []
            traced = TRACED if cell == ours and drafted else []
            record = job(each, *counted, traced=traced)
            line = {"kind": "job", "cell": asdict(cell), "pass": number}
            results.take({**line, **as_json(record)})
    return Figures(results)


def as_json(record: JobRecord) -> dict[str, Any]:
    plain = asdict(record)
    plain["traced"] = [[k, [list(row) for row in rows]] for k, rows in plain["traced"]]
    return plain


@pytest.fixture
def figures(tiny: Tiny) -> Figures:
    return made(tiny("batch=2", "num_draft_tokens=2"), COUNTED)


def test_ratios_are_taken_pass_by_pass(figures: Figures) -> None:
    """A machine at half its speed in the second pass does not blur them."""
    (f,) = figures.drafted
    assert f.rates == {1: 16.0, 2: 4.0}
    assert f.ratios(figures.plain(f)) == [2.0, 1.0]
    assert f.ratios(figures.mlx_lm(f)) == [1.0, 0.25]
    assert f.ratios(None) == []
    assert f.cold is not None
    assert (f.rate, f.cold.rate) == (10.0, 2.0)
    assert f.peak_bytes == (3 * MIB, 2 * MIB)


def test_acceptance(figures: Figures) -> None:
    """One request accepts 3 of 4 in 2 rounds, the other none of 6 in 3."""
    (f,) = figures.drafted
    a = f.acceptance()
    assert (a.accepted, a.drafted, a.rate, a.rounds) == (3, 10, 0.3, 5)
    assert a.length == 1 + 3 / 5
    assert figures.categories == ["a", "b"]
    assert (f.acceptance("a").rate, f.acceptance("b").rate) == (0.75, 0)


def test_acceptance_by_position() -> None:
    """The share of rounds, where all draft alike; else it never rises."""
    rounds = [(3, 3), (3, 0), (3, 1), (3, 1)]
    assert by_position(rounds) == pytest.approx([3 / 4, 1 / 4, 1 / 4])
    # One of two rounds that draft one token accepts it: 4 of 6, then 1 of 3 of these.
    assert by_position([*rounds, (1, 1), (1, 0)]) == pytest.approx(
        [4 / 6, 2 / 9, 2 / 9]
    )
    assert by_position([]) == []


def test_the_report_says_what_was_found(figures: Figures) -> None:
    (line,) = findings(figures)
    assert line == (
        "- **batch 2**: random:tiny:1, k = 2: 1.50 times no draft (1.00 to 2.00), "
        "0.62 times mlx-lm without a draft; 3 of 10 draft tokens accepted, 1.60 tokens "
        "per row and round (n = 5)."
    )
    text = report(figures)
    assert "2 of 5 prompts of 3 to 4 tokens" in text
    assert "**The machine was shared**: load average 3.0 on 2 cores" in text
    name = "batch 2: specdec, random:tiny:1, k = 2"
    assert f"| a | {name} | 1 | 0.750 | 2.50 |" in text
    assert f"| b | {name} | 1 | 0.000 | 1.00 |" in text
    assert "| 1.60 | 0.300: .40 .20 |" in text


def test_names_of_others_stay_texts_in_the_page(figures: Figures) -> None:
    """A category or a title that runs in the browser of who opens the report."""
    figures.results.prompts.categories[0] = "<script>alert(1)</script>"
    text = report(figures)
    assert "<script>" in text
    page = html_page("</title><script>", text + "\n<img src=x onerror=a()>\n")
    assert page is not None
    assert "<script" not in page
    assert "<img" not in page


def test_where_nothing_was_drafted(tiny: Tiny) -> None:
    """No draft is announced, and a length of 1 means that nothing was accepted."""
    figures = made(tiny("batch=2", "num_draft_tokens=2"), [])
    assert findings(figures) == ["- **batch 2**: nothing was drafted."]
    (f,) = figures.drafted
    assert f.ratios(figures.plain(f))  # noise, which is credited nowhere
    text = report(figures)
    assert "| nothing drafted |" in text
    assert "times no draft" not in text
    assert (f.acceptance().length, f.acceptance().rate) == (1, 0)


def test_one_pass_has_no_range(tiny: Tiny) -> None:
    recipe = tiny("batch=2", "num_draft_tokens=2", "repeat=1")
    figures = made(recipe, COUNTED, repeat=1)
    figures.cells[figures.drafted[0].cell].can_be = lambda ratio: True  # type: ignore[method-assign]
    (line,) = findings(figures)
    assert "2.00 times no draft (one pass only), " in line
    assert " 1 interleaved pass after a first one" in report(figures)


def test_what_cannot_be_is_said(
    figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More times as fast than tokens a round: plain decoding was held up."""
    monkeypatch.setattr(figures_module, "NOISE", 0.9)  # 1.5 times, 1.6 tokens
    (line,) = findings(figures)
    assert line.startswith("- **batch 2**: random:tiny:1, k = 2: 1.50 times no draft ")
    assert "cannot be, at 1.60 tokens per row and round" in line


def test_a_draft_is_named_by_the_last_part_of_its_path() -> None:
    """As the target is: where a folder lies is nobody's business."""
    names = {"self:4bit": "self:4bit", "/a/b/Tiny-Draft": "Tiny-Draft"}
    for draft, name in names.items():
        cell = Cell(system="specdec", draft=draft, num_draft_tokens=2)
        assert cell.label == f"specdec, {name}, k = 2"
    assert Unit(cell, 1).label == "batch 1: specdec, Tiny-Draft, k = 2, pass 1"


def test_latencies_by_hand() -> None:
    """The first token's time counted among the others', or the other way round."""
    cell = Cell(system="specdec")
    prompts = PromptsRecord(digest="", found=1, tokens=[1], categories=[None])
    record = job(10, *[request(11, first=0.5, ended=1.5) for _ in range(8)])
    f = CellFigures(Results({}, prompts, passes={cell: {1: record}}), cell)
    assert set(f.first_token_ms) == {500.0}
    assert f.token_ms == pytest.approx([100.0] * 8)
    assert f.rates == {1: 8.8}


def test_the_time_of_rounds_is_that_of_quiet_ones_in_passes_that_count() -> None:
    """Rounds near a join, or of the first pass, in the time of a round."""

    def times(number: int, ms: float, near: int = 0, k: int = 2) -> RoundTimes:
        return RoundTimes(k=k, near_join=near, number=number, p50=ms)

    cell = Cell(system="specdec")
    prompts = PromptsRecord(digest="", found=1, tokens=[1], categories=[None])
    passes = {
        n: job(1, rounds=[times(5, ms), times(4, 1.0, k=1), times(9, 90.0, 1)])
        for n, ms in ((0, 50.0), (1, 10.0), (2, 20.0))
    }
    f = CellFigures(Results({}, prompts, passes={cell: passes}), cell)
    assert f.round_ms == 15.0


def test_an_issue_from_a_mac_names_its_system_and_version() -> None:
    """Where the package is installed there is no commit to ask for."""
    mac = {**MACHINE, "backend": "metal", "specdec": "0.2.0", "platform": "macOS-15"}
    start = {"command": "x", "commit": "unknown", "date": "today", "machine": mac}
    place = read_record(Start, start).place
    assert place.startswith("abacus (metal); abacus, 2 cores, 1.0 GiB, macOS-15; MLX")
    assert place.endswith("; specdec 0.2.0")


def test_percentiles_are_values_that_came() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (1, 10, 50, 99, 100)] == [1, 10, 50, 99, 100]
    assert percentile([3.0], 10) == percentile([3.0], 99) == 3.0
