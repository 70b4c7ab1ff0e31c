"""The tables of a report: each from figures to Markdown. No mlx here."""

from __future__ import annotations

from collections.abc import Sequence

from .counts import histogram, positions, unconditional
from .figures import PARTS, Figures
from .tables import markdown_table, show_spread

MIB = 2**20
NONE = "-"


def sections(figures: Figures) -> list[str]:
    """All sections that have something to say, each with its heading."""
    made = (
        ("Speed", _speed(figures)),
        ("Acceptance", _acceptance(figures)),
        ("Acceptance by position", _positions(figures)),
        ("Accepted tokens in a round", _histogram(figures)),
        ("Costs of a round", _costs(figures)),
        ("Predicted and measured speed-up", _predicted(figures)),
        ("The same rounds, used otherwise", _policies(figures)),
        ("By category", _categories(figures)),
    )
    return [f"## {title}\n\n{text}" for title, text in made if text]


def _speed(figures: Figures) -> str:
    rows = []
    for cell, f in figures.cells.items():
        plain, mlx_lm = figures.find(cell.plain), figures.find(cell.mlx_lm)
        peak, above = f.peak_bytes
        rows.append(
            [
                figures.name(cell),
                _spread(list(f.rates.values())),
                f"{f.rate / cell.conditions.batch:.1f}",
                NONE if plain is f else _spread(f.ratios(plain), 2),
                NONE if mlx_lm is f else _spread(f.ratios(mlx_lm), 2),
                _number(f.cold, 1),
                _spread(f.first_token_ms, 0),
                _spread(f.step_ms, 1, whole=False),
                f"{f.occupancy:.2f}",
                f"{peak / MIB:.0f} ({above / MIB:.1f})",
            ]
        )
    header = [
        "system",
        "tokens/s",
        "per row",
        "/ no draft",
        "/ mlx-lm",
        "first pass tokens/s",
        "ms to first token",
        "ms per round",
        "rows busy",
        "peak MiB (above weights)",
    ]
    return _table(
        header,
        rows,
        "Median (smallest to largest) of the passes that count. *tokens/s*: of the "
        "decode phase, all rows together; *per row*: over the batch size. */ no draft* "
        "and */ mlx-lm*: over this engine's plain decoding and over mlx-lm's batched "
        "decoding *at the same batch*, pass by pass. *ms to first token*: of a "
        "request, its batch's prefill included; a draft of this engine takes prompts "
        "in behind it, which counts in tokens/s. *ms per round*: median step or round "
        "with all rows running. *rows busy*: of the rows of all rounds, those that "
        "had not ended.",
    )


def _acceptance(figures: Figures) -> str:
    drafted = [f for f in figures.cells.values() if f.cell.draft is not None]
    rows = []
    for f in drafted:
        a = f.acceptance()
        rows.append(
            [
                figures.name(f.cell),
                f"{a.rate:.3f}",
                f"{a.accepted} / {a.drafted}",
                f"{a.request_mean('rate'):.3f}",
                f"{a.token_mean('rate'):.3f}",
                f"{a.length:.2f}",
                f"{a.request_mean('length'):.2f}",
                f"{a.token_mean('length'):.2f}",
            ]
        )
    header = [
        "system",
        "rate",
        "accepted / drafted",
        "rate, request mean",
        "rate, token-weighted",
        "length",
        "length, request mean",
        "length, token-weighted",
    ]
    return _table(
        header,
        rows,
        "*rate*: accepted draft tokens over drafted ones. *length*: mean tokens of a "
        "row in a round; **it counts the extra token** that the target adds to those "
        "accepted, so that 1 means nothing was accepted. Each over all rounds, then "
        "as the mean of the requests, then with each request weighted by its tokens. "
        "The last round of a request may draft nothing; mlx-lm counts the first "
        "token in a round, this engine in prefill.",
    )


def _positions(figures: Figures) -> str:
    most = max((f.cell.k for f in figures.drafted), default=0)
    rows = []
    for f in figures.drafted:
        each = positions(f.rows)
        kinds = {
            "conditional": [p.conditional for p in each],
            "unconditional": unconditional(each),
        }
        for kind, chances in kinds.items():
            values = [f"{chance:.3f}" for chance in chances]
            rows.append(
                [figures.name(f.cell), kind, *values, *[NONE] * (most - len(values))]
            )
    header = ["system", "", *(str(j + 1) for j in range(most))]
    return _table(
        header,
        rows,
        "Of the j-th draft token of a round. *conditional*: accepted, of the rounds "
        "that accepted all tokens before it. *unconditional*: accepted with all before "
        "it, the product of the conditional chances; where all rounds draft alike, it "
        "is a share of the rounds.",
    )


def _histogram(figures: Figures) -> str:
    most = max((f.cell.k for f in figures.drafted), default=0)
    rows = []
    for f in figures.drafted:
        found = histogram(f.rows)
        total = sum(found)
        values = [f"{n} ({n / total:.0%})" for n in found]
        rows.append([figures.name(f.cell), *values, *[NONE] * (most + 1 - len(values))])
    header = ["accepted", *map(str, range(most + 1))]
    return _table(
        header,
        rows,
        "How many rounds of a row accepted 0, 1, 2, ... draft tokens, of those that "
        "drafted any.",
    )


def _costs(figures: Figures) -> str:
    rows = []
    for f in figures.cells.values():
        if f.parts is None:
            continue
        k, cost, plain = f.cell.k, f.cost, f.plain_step_ms
        rows.append(
            [
                figures.name(f.cell),
                _number(plain, 2),
                _number(f.parts.draft / k if k else None, 2),
                _number(f.parts.verify if k else None, 2),
                _number(None if cost is None else cost.draft_step, 2),
                _number(None if cost is None else cost.verify, 2),
                *(f"{f.parts.shares[part]:.0%}" for part in PARTS),
                f"{f.parts.total:.1f}",
            ]
        )
    header = [
        "system",
        "plain step, ms",
        "draft step, ms",
        "verify, ms",
        "draft step / plain",
        "verify / plain",
        *PARTS,
        "round, ms",
    ]
    return _table(
        header,
        rows,
        "From rounds of their own in which the device is waited for behind every "
        "part, so that the parts can be told apart; the *round* is therefore slower "
        "than one in a normal run. A step is timed from where its graph begins to be "
        "built until it is computed (median). Shares of the round: waiting for the "
        "device in *draft*, *verify* and *sampling* (choose and accept); *host* is all "
        "that remains, building graphs included.",
    )


def _predicted(figures: Figures) -> str:
    rows = []
    for f in figures.drafted:
        measured = f.ratios(figures.find(f.cell.plain))
        counted = f.policies()["per-sequence trim (what ran)"]
        rows.append(
            [
                figures.name(f.cell),
                _number(f.predicted, 2),
                _number(counted.speedup, 2),
                _spread(measured, 2),
            ]
        )
    header = ["system", "by formula", "by accepted counts", "measured"]
    return _table(
        header,
        rows,
        "Speed-up over this engine without a draft at the same batch. *by formula*: "
        "(1 - a^(k+1)) / (1 - a) over k c + v, with *a* the chance that a draft token "
        "is accepted when those before it were, *c* and *v* the costs of a draft step "
        "and of the verify forward in plain steps. *by accepted counts*: the rounds' "
        "own tokens over the same costs. Neither knows of sampling, of the host, or of "
        "rows that end early.",
    )


def _policies(figures: Figures) -> str:
    rows = []
    for f in figures.drafted:
        for name, policy in f.policies().items():
            steps = policy.draft_steps / policy.rounds if policy.rounds else 0.0
            rows.append(
                [
                    figures.name(f.cell),
                    name,
                    f"{policy.tokens_per_round:.2f}",
                    f"{steps:.2f}",
                    _number(policy.speedup, 2),
                ]
            )
    header = ["system", "rounds", "tokens per row", "draft steps", "speed-up"]
    return _table(
        header,
        rows,
        "Computed from the accepted counts of the rounds that drafted, each a round "
        "of its own: *cut to the batch's minimum* is what an engine without "
        "per-sequence trim keeps; the *oracle* drafts in every round as many tokens, "
        "up to k, as bring most tokens per time in all. *tokens per row* counts the "
        "extra token; *speed-up* is by the costs above.",
    )


def _categories(figures: Figures) -> str:
    rows = []
    for f in figures.drafted if figures.categories else ():
        for category in figures.categories:
            a = f.acceptance(category)
            rows.append(
                [
                    category,
                    figures.name(f.cell),
                    len(a.requests),
                    f"{a.rate:.3f}",
                    f"{a.length:.2f}",
                ]
            )
    rows.sort(key=lambda row: figures.categories.index(str(row[0])))
    header = [
        "category",
        "system",
        "requests",
        "rate",
        "length",
        "length, request mean",
    ]
    return _table(header, rows, "")


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], note: str) -> str:
    """A table and how to read it; nothing where there is nothing to show."""
    if not rows:
        return ""
    return markdown_table(header, rows) + (f"\n{note}\n" if note else "")


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _spread(values: Sequence[float], digits: int = 1, *, whole: bool = True) -> str:
    """With ``whole``, the smallest and largest too."""
    if not values:
        return NONE
    text = show_spread(values, digits)
    return text if whole else text.partition(" ")[0]
