"""The report of whole jobs, and a block of it that fits into an issue. No mlx here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .cells import Cell
from .figures import Figures
from .job_figures import JobFigures, Jobs, job_rate
from .tables import markdown_table, percentile, show_spread

_MIB = 2**20
_NONE = "-"
# A share of the rounds too small for percentiles.
_FEW = 0.01

_SYSTEMS = {
    "mlx-lm step": "mlx-lm, generate_step",
    "mlx-lm batch": "mlx-lm, batch_generate",
}


def job_sections(figures: Figures, *, notes: bool = True) -> list[str]:
    """All sections that have something to say, each with its heading.

    Args:
        notes: say how to read each table, too.
    """
    jobs = Jobs(figures)
    made = (
        ("Whole jobs", _jobs(jobs), _JOBS),
        ("Rounds", _rounds(jobs), _ROUNDS),
        ("Requests that arrive one by one", _loads(jobs), _LOADS),
    )
    return [
        f"## {title}\n\n{text}" + (f"\n{note}\n" if notes else "")
        for title, text, note in made
        if text
    ]


def job_findings(figures: Figures) -> list[str]:
    """A line for each batch: the fastest system, and what auto comes to."""
    jobs, lines = Jobs(figures), []
    for f in jobs.at_once:
        against = f.ratios(jobs.plain(f))
        if f.cell.system != "specdec" or f.cell.draft is None or not against:
            continue
        ratio = statistics.median(against)
        text = f"- **{_name(jobs, f)}**: {ratio:.2f} times no draft"
        theirs = f.ratios(jobs.mlx_lm(f))
        if theirs:
            text += f", {statistics.median(theirs):.2f} times mlx-lm"
        lines.append(f"{text}, from the call to the last token.")
    return lines


_JOBS = (
    "From the call to the last token: prompts encoded, rows joining as others end, "
    "text made. *tokens/s*: median (smallest to largest) of the passes after the "
    "first. */ no draft* and */ mlx-lm*: pass by pass, at the same batch, over this "
    "engine without a draft and over mlx-lm without one. *first pass*: tokens/s and "
    "seconds of the first job in this process, compiling included; systems that come "
    "later find some of it done. *ms to first token*, and *ms per token* after it: of "
    "a request; half and 99 of 100 are below; all requests wait from the beginning. "
    "*tokens per round*: of a row, the extra token included. *as mlx-lm*: requests "
    "with exactly mlx-lm's tokens; in half precision a near tie may fall otherwise "
    "where shapes differ. *peak MiB*: above what was held before."
)
_ROUNDS = (
    "Milliseconds from one round's end to the next's, by draft length, medians over "
    "the passes that count. *near a join*: a row joined in this round, the one before "
    "or the one after; its prompt is taken in meanwhile. Ten, fifty and ninety of a "
    "hundred rounds are below *10%*, *50%* and *90%*. Lengths of fewer than one round "
    "in a hundred are left out."
)
_LOADS = (
    "Requests arrive at random (Poisson), at the same times for every system. *ms to "
    "first token* counts from a request's arrival, waiting for a row included. "
    "*waiting*: requests without a token when the last one arrived; a twentieth of "
    "all, and more than two, count as a queue."
)


def _name(jobs: Jobs, f: JobFigures) -> str:
    cell: Cell = f.cell
    system = _SYSTEMS.get(cell.system, cell.label)
    return f"{cell.conditions.label(jobs.figures.among)}: {system}"


def _jobs(jobs: Jobs) -> str:
    rows = []
    for f in jobs.at_once:
        plain, theirs = jobs.plain(f), jobs.mlx_lm(f)
        cold = f.cold
        rows.append(
            [
                _name(jobs, f),
                _spread(list(f.rates.values()), 1),
                _NONE if plain is f else _spread(f.ratios(plain), 2),
                _NONE if theirs is f else _spread(f.ratios(theirs), 2),
                _NONE
                if cold is None
                else f"{job_rate(cold):.1f} ({cold['seconds']:.1f} s)",
                _percentiles(f.first_token_ms, (50, 99), 0),
                _percentiles(f.token_ms, (50, 99), 1),
                f"{f.length:.2f}" if f.cell.draft and f.length else _NONE,
                _NONE if theirs is f else f.equal_to(theirs) or _NONE,
                f"{f.peak_bytes / _MIB:.0f}",
            ]
        )
    header = [
        "system",
        "tokens/s",
        "/ no draft",
        "/ mlx-lm",
        "first pass",
        "ms to first token",
        "ms per token",
        "tokens per round",
        "as mlx-lm",
        "peak MiB",
    ]
    return markdown_table(header, rows) if rows else ""


def _rounds(jobs: Jobs) -> str:
    rows = []
    for f in jobs.at_once:
        rounds = f.rounds
        few = _FEW * sum(r.number for r in rounds)
        for r in rounds:
            if r.number < few:
                continue
            rows.append(
                [
                    _name(jobs, f),
                    r.k,
                    "yes" if r.near_join else "no",
                    r.number,
                    *(f"{ms:.2f}" for ms in (r.p10, r.p50, r.p90, r.mean)),
                    f"{r.p90 / r.p10:.2f}" if r.p10 else _NONE,
                ]
            )
    header = [
        "system",
        "k",
        "near a join",
        "rounds",
        "10%",
        "50%",
        "90%",
        "mean",
        "90% / 10%",
    ]
    return markdown_table(header, rows) if rows else ""


def _loads(jobs: Jobs) -> str:
    rows = [
        [
            _name(jobs, f),
            f"{f.offered:.2f}",
            f"{f.completed:.2f}",
            _percentiles(f.first_token_ms, (50,), 0),
            _percentiles(f.first_token_ms, (99,), 0),
            _percentiles(f.token_ms, (50,), 1),
            _percentiles(f.token_ms, (99,), 1),
            f"{f.waiting}{' (queue)' if f.saturated else ''}",
        ]
        for f in jobs.under_load
    ]
    header = [
        "system",
        "arrive/s",
        "done/s",
        "ms to first token, 50%",
        "99%",
        "ms per token, 50%",
        "99%",
        "waiting",
    ]
    if not rows:
        return ""
    lines = [f"- {name}: {text}.\n" for name, text in jobs.saturation()]
    return markdown_table(header, rows) + "\n" + "".join(lines)


def _percentiles(values: Sequence[float], percents: Sequence[int], digits: int) -> str:
    if not values:
        return _NONE
    return " / ".join(f"{percentile(values, p):.{digits}f}" for p in percents)


def _spread(values: Sequence[float], digits: int) -> str:
    return show_spread(values, digits) if values else _NONE
