"""The tables of a report, made from figures as Markdown. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...utils.tables import markdown_table, percentile, show_spread
from .counts import histogram, positions, unconditional
from .figures import PARTS, CellFigures, Figures
from .job import RoundTimes

MIB = 2**20
NONE = "-"
# Draft lengths with less than this share of a cell's rounds are left out.
_FEW = 0.01

T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """A table with a title and a note on how to read it.

    Args:
        in_issues: whether the block to paste into an issue has the table, too.
    """

    title: str
    table: str
    note: str
    in_issues: bool = False


def sections(figures: Figures) -> list[Section]:
    """All sections whose tables have rows, the most important one first."""
    made = (
        Section("Speed", _speed(figures), _SPEED, True),
        Section("Requests that arrive one by one", _loads(figures), _LOADS, True),
        Section("Latency and memory", _latency(figures), _LATENCY, True),
        Section("Times of rounds", _rounds(figures), _ROUNDS, True),
        Section("Acceptance", _acceptance(figures), _ACCEPTANCE, True),
        Section("Acceptance by position", _positions(figures), _POSITIONS),
        Section("Accepted tokens in a round", _histogram(figures), _HISTOGRAM),
        Section("Costs of a round", _costs(figures), _COSTS),
        Section("Predicted and measured speed-up", _predicted(figures), _PREDICTED),
        Section("The same rounds, used otherwise", _policies(figures), _POLICIES),
        Section("By category", _categories(figures), ""),
    )
    return [section for section in made if section.table]


def _table(items: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> str:
    """A table with a row for each item and a cell for each column; "" without items."""
    rows = [[show(item) for show in columns.values()] for item in items]
    return markdown_table(list(columns), rows) if rows else ""


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _spread(values: Sequence[float], digits: int) -> str:
    return show_spread(values, digits) if values else NONE


def _percentiles(values: Sequence[float], digits: int) -> str:
    if not values:
        return NONE
    return " / ".join(f"{percentile(values, p):.{digits}f}" for p in (50, 99))


# -- speed ---------------------------------------------------------------------

_SPEED = (
    "Tokens per second from the call to the last token: prompts encoded, drafts' "
    "prompts too, rows joining as others end, text made. Median (smallest to largest) "
    "of the passes that count. */ no draft* and */ mlx-lm*: pass by pass, at the same "
    "batch, over this engine without a draft and over mlx-lm without one. *tokens per "
    "round*: of a row, the extra token included. *as mlx-lm*: requests with exactly "
    "mlx-lm's tokens; in half precision a near tie may fall otherwise where shapes "
    "differ."
)


def _speed(figures: Figures) -> str:
    def over(f: CellFigures, other: CellFigures | None) -> str:
        if f.idle_draft and other is figures.plain(f):
            return "nothing drafted"
        return NONE if other is f else _spread(f.ratios(other), 2)

    def tokens_per_round(f: CellFigures) -> str:
        return f"{f.acceptance().length:.2f}" if f.cell.draft else NONE

    return _table(
        figures.at_once,
        {
            "system": lambda f: figures.name(f.cell),
            "tokens/s": lambda f: _spread(list(f.rates.values()), 1),
            "/ no draft": lambda f: over(f, figures.plain(f)),
            "/ mlx-lm": lambda f: over(f, figures.mlx_lm(f)),
            "tokens per round": tokens_per_round,
            "as mlx-lm": lambda f: (
                NONE
                if figures.mlx_lm(f) is f
                else f.equal_to(figures.mlx_lm(f)) or NONE
            ),
        },
    )


_LATENCY = (
    "*first pass*: tokens/s and seconds of the first job in this process, compiling "
    "included; systems that come later find some of it done. *ms to first token*, and "
    "*ms per token* after it: of a request; half and 99 of 100 are below; all requests "
    "wait from the beginning. *ms per round*: median of the commonest draft length, "
    "away from joins. *peak MiB*: at the most, and above what was held before."
)


def _latency(figures: Figures) -> str:
    def cold(f: CellFigures) -> str:
        first = f.cold
        return NONE if first is None else f"{first.rate:.1f} ({first.seconds:.1f} s)"

    def peak(f: CellFigures) -> str:
        whole, above = f.peak_bytes
        return f"{whole / MIB:.0f} ({above / MIB:.1f})"

    return _table(
        figures.at_once,
        {
            "system": lambda f: figures.name(f.cell),
            "first pass": cold,
            "ms to first token": lambda f: _percentiles(f.first_token_ms, 0),
            "ms per token": lambda f: _percentiles(f.token_ms, 1),
            "ms per round": lambda f: _number(f.round_ms, 1),
            "peak MiB": peak,
        },
    )


_ROUNDS = (
    "Milliseconds from one round's end to the next's, by *k*, the most tokens that a "
    "row may draft, medians over the passes that count. *drafted*: the rounds that "
    "drafted any token; an n-gram draft without a match drafts none, and its round "
    "takes as long as one that drafts (-: not recorded). *near a join*: a row joined "
    "in this round, the one before or the one after; its prompt is taken in meanwhile. "
    "Ten, fifty and ninety of a hundred rounds are below *10%*, *50%* and *90%*. "
    "Lengths of fewer than one round in a hundred are left out."
)


def _rounds(figures: Figures) -> str:
    shown: list[tuple[CellFigures, RoundTimes]] = []
    for f in figures.at_once:
        few = _FEW * sum(r.number for r in f.rounds)
        shown += [(f, r) for r in f.rounds if r.number >= few]
    return _table(
        shown,
        {
            "system": lambda x: figures.name(x[0].cell),
            "k": lambda x: x[1].k,
            "near a join": lambda x: "yes" if x[1].near_join else "no",
            "rounds": lambda x: x[1].number,
            "drafted": lambda x: NONE if x[1].drafted is None else x[1].drafted,
            "10%": lambda x: f"{x[1].p10:.2f}",
            "50%": lambda x: f"{x[1].p50:.2f}",
            "90%": lambda x: f"{x[1].p90:.2f}",
            "mean": lambda x: f"{x[1].mean:.2f}",
            "90% / 10%": lambda x: _number(
                x[1].p90 / x[1].p10 if x[1].p10 else None, 2
            ),
        },
    )


_LOADS = (
    "Requests arrive at random (Poisson), at the same times for every system. *ms to "
    "first token* counts from a request's arrival, waiting for a row included; half "
    "and 99 of 100 are below. *waiting*: requests without a token when the last one "
    "arrived; a twentieth of all, and more than two, count as a queue."
)


def _loads(figures: Figures) -> str:
    table = _table(
        figures.under_load,
        {
            "system": lambda f: figures.name(f.cell),
            "arrive/s": lambda f: f"{f.offered:.2f}",
            "done/s": lambda f: f"{f.completed:.2f}",
            "ms to first token": lambda f: _percentiles(f.first_token_ms, 0),
            "ms per token": lambda f: _percentiles(f.token_ms, 1),
            "waiting": lambda f: f"{f.waiting}{' (queue)' * f.saturated}",
        },
    )
    lines = [f"- {name}: {text}.\n" for name, text in figures.saturation()]
    return "\n".join(filter(None, [table, "".join(lines)]))


# -- acceptance ----------------------------------------------------------------

_ACCEPTANCE = (
    "*rate*: accepted draft tokens over drafted ones. *length*: mean tokens of a row "
    "in a round; **it counts the extra token** that the target adds to those accepted, "
    "so that 1 means nothing was accepted. Each over all rounds, then as the mean of "
    "the requests, then with each request weighted by its tokens. The last round of a "
    "request may draft nothing; mlx-lm counts the first token in a round, this engine "
    "in prefill."
)


def _acceptance(figures: Figures) -> str:
    def mean(f: CellFigures, name: str, digits: int) -> str:
        a = f.acceptance()
        each = a.request_mean(name), a.token_mean(name)
        return " / ".join(f"{value:.{digits}f}" for value in each)

    return _table(
        (f for f in figures.at_once if f.cell.draft is not None),
        {
            "system": lambda f: figures.name(f.cell),
            "rate": lambda f: f"{f.acceptance().rate:.3f}",
            "accepted / drafted": lambda f: (
                f"{f.acceptance().accepted} / {f.acceptance().drafted}"
            ),
            "request mean / token-weighted": lambda f: mean(f, "rate", 3),
            "length": lambda f: f"{f.acceptance().length:.2f}",
            "rounds of a row": lambda f: f.acceptance().rounds,
            "length, request mean / token-weighted": lambda f: mean(f, "length", 2),
        },
    )


_POSITIONS = (
    "Of the j-th draft token of a round, of so many rounds of a row (*n*). "
    "*conditional*: accepted, of the rounds that accepted all tokens before it. "
    "*unconditional*: accepted with all before it, the product of the conditional "
    "chances; where all rounds draft alike, it is a share of the rounds."
)


def _padded(values: Sequence[str], number: int) -> list[str]:
    return [*values, *[NONE] * (number - len(values))]


def _positions(figures: Figures) -> str:
    shown = [f for f in figures.drafted if f.rows]
    most = max((drafted for f in shown for drafted, _ in f.rows), default=0)
    rows = []
    for f in shown:
        each, name = positions(f.rows), figures.name(f.cell)
        alone, joint = [p.conditional for p in each], unconditional(each)
        for kind, chances in (("conditional", alone), ("unconditional", joint)):
            values = _padded([f"{chance:.3f}" for chance in chances], most)
            rows.append([name, kind, len(f.rows), *values])
    header = ["system", "", "n", *(str(j + 1) for j in range(most))]
    return markdown_table(header, rows) if rows else ""


_HISTOGRAM = (
    "How many rounds of a row accepted 0, 1, 2, ... draft tokens, of those that "
    "drafted any."
)


def _histogram(figures: Figures) -> str:
    found = {figures.name(f.cell): histogram(f.rows) for f in figures.drafted if f.rows}
    most = max(map(len, found.values()), default=0)
    rows = [
        [name, *_padded([f"{n} ({n / sum(each):.0%})" for n in each], most)]
        for name, each in found.items()
    ]
    return markdown_table(["accepted", *map(str, range(most))], rows) if rows else ""


def _categories(figures: Figures) -> str:
    shown = [(c, f) for c in figures.categories for f in figures.drafted]
    return _table(
        ((c, f, f.acceptance(c)) for c, f in shown),
        {
            "category": lambda x: x[0],
            "system": lambda x: figures.name(x[1].cell),
            "requests": lambda x: len(x[2].requests),
            "rate": lambda x: f"{x[2].rate:.3f}",
            "length": lambda x: f"{x[2].length:.2f}",
        },
    )


# -- costs ---------------------------------------------------------------------

_COSTS = (
    "From rounds of their own, so many (*n*), synchronised after each stage so that "
    "the stages can be told apart; the *round* is therefore slower than one in a "
    "normal run. A step is timed from where its graph begins to be built until it is "
    "computed (median). Shares of the round: waiting for the device in *draft*, "
    "*verify* and *sampling* (choose and accept); *host* is all that remains, building "
    "graphs included."
)


def _costs(figures: Figures) -> str:
    shown = [(f, f.parts) for f in figures.at_once if f.parts is not None]
    drafted = {f.cell: f.cell.num_draft_tokens or None for f, _ in shown}

    def ratio(f: CellFigures, name: str) -> str:
        return _number(None if f.cost is None else getattr(f.cost, name), 2)

    def draft_step(f: CellFigures, milliseconds: float) -> str:
        k = drafted[f.cell]
        return NONE if not isinstance(k, int) else f"{milliseconds / k:.2f}"

    return _table(
        shown,
        {
            "system": lambda x: figures.name(x[0].cell),
            "n": lambda x: x[1].number,
            "plain step, ms": lambda x: _number(x[0].plain_step_ms, 2),
            "draft step, ms": lambda x: draft_step(x[0], x[1].draft),
            "verify, ms": lambda x: (
                f"{x[1].verify:.2f}" if drafted[x[0].cell] else NONE
            ),
            "draft step / plain": lambda x: ratio(x[0], "draft_step"),
            "verify / plain": lambda x: ratio(x[0], "verify"),
            "/".join(PARTS): lambda x: " / ".join(
                f"{x[1].shares[part]:.0%}" for part in PARTS
            ),
            "round, ms": lambda x: f"{x[1].total:.1f}",
        },
    )


_PREDICTED = (
    "Speed-up over this engine without a draft at the same batch. *by formula*: "
    "(1 - a^(k+1)) / (1 - a) over k c + v, with *a* the chance that a draft token is "
    "accepted when those before it were, *c* and *v* the costs of a draft step and of "
    "the verify forward in plain steps. *by accepted counts*: the rounds' own tokens "
    "over the same costs. Neither knows of prompts, of the host, or of rows that end."
)


def _predicted(figures: Figures) -> str:
    def counted(f: CellFigures) -> str:
        return _number(f.policies()["per-sequence trim (what ran)"].speedup, 2)

    return _table(
        (f for f in figures.drafted if f.cost is not None),
        {
            "system": lambda f: figures.name(f.cell),
            "by formula": lambda f: _number(f.predicted, 2),
            "by accepted counts": counted,
            "measured": lambda f: _spread(f.ratios(figures.plain(f)), 2),
        },
    )


_POLICIES = (
    "Computed from the accepted counts of the rounds of *k* above 0, each a round of "
    "its own; *k* is the mean of the most tokens that a round may draft. *cut to the "
    "batch's minimum* is what an engine without per-sequence trim keeps; the *oracle* "
    "drafts in every round as many tokens, up to k, as bring most tokens per time in "
    "all. *tokens per row* counts the extra token; *speed-up* is by the costs above."
)


def _policies(figures: Figures) -> str:
    shown = [
        (figures.name(f.cell), name, policy)
        for f in figures.drafted
        if f.traced
        for name, policy in f.policies().items()
    ]
    return _table(
        shown,
        {
            "system": lambda x: x[0],
            "rounds": lambda x: x[1],
            "tokens per row": lambda x: f"{x[2].tokens_per_round:.2f}",
            "k": lambda x: _number(x[2].draft_steps / x[2].rounds, 2),
            "speed-up": lambda x: _number(x[2].speedup, 2),
        },
    )
