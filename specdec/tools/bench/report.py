"""The report of a folder of raw results: a table, as Markdown and as one HTML page."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...model_names import DEFAULT_TARGET, short
from ...utils.files import replace_file
from ...utils.tables import markdown_table, percentile, show_spread
from .figures import CellFigures, Figures, by_position
from .raw import Results, Start
from .recipe import Recipe

FILE, PAGE = "report.md", "report.html"
MIB = 2**20
NONE = "-"

# On a phone, cells wrap, so that more than names is seen.
_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; }
table { border-collapse: collapse; display: block; overflow-x: auto;
  font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; overflow-wrap: normal; text-align: right; }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 46rem) {
  body { margin: 1rem auto; }
  th, td { padding: .2rem .4rem; white-space: normal; }
  td:first-child { min-width: 7rem; }
}
"""


def write_report(folder: Path) -> list[Path]:
    """Write the report; the page only if markdown-it-py is installed.

    Returns:
        The report's files.

    Raises:
        ConfigError: there are no results in the folder.
    """
    figures = Figures(Results.read(folder))
    text = report(figures)
    pages = {FILE: text, PAGE: html_page(figures.recipe.title, text)}
    files = {folder / name: page for name, page in pages.items() if page is not None}
    for file, page in files.items():
        replace_file(file, page.encode())
    return list(files)


def html_page(title: str, text: str) -> str | None:
    """A report in Markdown as one HTML page, which loads nothing from anywhere.

    HTML in names, which others chose, is shown as text.

    Returns:
        The page; ``None`` if markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        return None
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n{body}</html>\n"
    )


def report(figures: Figures) -> str:
    """The report as Markdown."""
    parts = [f"# {_plain(figures.recipe.title)}\n", *_body(figures), NOTE]
    return "\n".join([*parts, _method(figures)])


def block(figures: Figures) -> str:
    """The report without its notes, to paste into an issue."""
    return "\n".join([f"**{_plain(figures.recipe.title)}**\n", *_body(figures)])


def _body(figures: Figures) -> list[str]:
    sentences = "\n".join([*findings(figures), ""])
    tables = filter(None, [speed(figures), categories(figures)])
    return [_origin(figures), _setting(figures), sentences, *tables]


def _plain(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


# -- the table -----------------------------------------------------------------

NOTE = (
    "Tokens per second from the call to the last token: prompts encoded, drafts' "
    "prompts too, rows joining as others end, text made. Median (smallest to largest) "
    "of the passes that count; *first*: of the first pass in this process, compiling "
    "included. */ no draft* and */ mlx-lm*: pass by pass, at the same batch, over this "
    "engine without a draft and over mlx-lm without one. *tokens per round*: of a row, "
    "the extra token included. *accepted*: drafted tokens that were accepted; then the "
    "shares of rounds that accept the first 1, 2, ... of them. *ms to first token* and "
    "*ms per token* after it, of a request: half, and 99 of 100, are below. *ms per "
    "round*: median of the commonest draft length, away from joins. *peak MiB*: at "
    "the most, and above what was held before. *as mlx-lm*: requests with exactly "
    "mlx-lm's tokens; in half precision a near tie may fall otherwise where shapes "
    "differ.\n"
)


def speed(figures: Figures) -> str:
    """The table of all systems, as Markdown."""

    def over(f: CellFigures, other: CellFigures | None) -> str:
        if f.idle_draft and other is figures.plain(f):
            return "nothing drafted"
        ratios = [] if other is f else f.ratios(other)
        return show_spread(ratios, 2) if ratios else NONE

    def accepted(f: CellFigures) -> str:
        if not f.acceptance().drafted:
            return NONE
        shares = " ".join(f"{share:.2f}".lstrip("0") for share in by_position(f.rows))
        return f"{f.acceptance().rate:.3f}" + (f": {shares}" if shares else "")

    columns: dict[str, Callable[[CellFigures], str]] = {
        "system": lambda f: figures.name(f.cell),
        "tokens/s": lambda f: (
            show_spread(list(f.rates.values()), 1) if f.rates else NONE
        ),
        "/ no draft": lambda f: over(f, figures.plain(f)),
        "/ mlx-lm": lambda f: over(f, figures.mlx_lm(f)),
        "tokens per round": lambda f: (
            f"{f.acceptance().length:.2f}" if f.cell.draft else NONE
        ),
        "accepted": accepted,
        "ms to first token": lambda f: _percentiles(f.first_token_ms, 0),
        "ms per token": lambda f: _percentiles(f.token_ms, 1),
        "ms per round": lambda f: NONE if f.round_ms is None else f"{f.round_ms:.1f}",
        "first": lambda f: NONE if f.cold is None else f"{f.cold.rate:.1f}",
        "peak MiB": lambda f: (
            f"{f.peak_bytes[0] / MIB:.0f} ({f.peak_bytes[1] / MIB:.1f})"
        ),
        "as mlx-lm": lambda f: (
            NONE if figures.mlx_lm(f) is f else f.equal_to(figures.mlx_lm(f)) or NONE
        ),
    }
    rows = [[show(f) for show in columns.values()] for f in figures.cells.values()]
    return markdown_table(list(columns), rows)


def categories(figures: Figures) -> str:
    """Acceptance by category of prompts, as Markdown; empty without categories."""
    rows = []
    for name in figures.categories:
        for f in figures.drafted:
            a, system = f.acceptance(name), figures.name(f.cell)
            numbers = len(a.requests), f"{a.rate:.3f}", f"{a.length:.2f}"
            rows.append([name, system, *numbers])
    header = ["category", "system", "requests", "accepted", "tokens per round"]
    return markdown_table(header, rows) if rows else ""


def _percentiles(values: Sequence[float], digits: int) -> str:
    if not values:
        return NONE
    return " / ".join(f"{percentile(values, p):.{digits}f}" for p in (50, 99))


# -- what was run, and what came out ---------------------------------------------


def _method(figures: Figures) -> str:
    text = (
        "Systems take turns within one process on the same weights and prompts, and a "
        "ratio is taken pass by pass before its median: what slows the machine "
        "meanwhile falls on all alike. "
    )
    if len(figures.results.starts) > 1:
        text += (
            "Not so where a pass was cut between two parts of the run: its ratios also "
            "hold what the machine did in either. "
        )
    return (
        f"{text}docs/benchmarks.md says what is counted; `specdec report` makes this "
        "page from raw.jsonl.\n"
    )


def _origin(figures: Figures) -> str:
    starts, lines = figures.results.starts, []
    if figures.missing:
        done = figures.num_units - len(figures.missing)
        lines.append(
            f"**Not complete: {done} of {figures.num_units} passes and profiles.** "
            "The same command continues.\n"
        )
    previous = None
    for start in starts:
        where = start.place
        if where != previous:
            lines.append(f"    {start.command}\n\n{where}, {start.date}.\n")
        previous = where
    if len(starts) > 1:
        lines.append(f"Run in {len(starts)} parts.\n")
    if len({s.place for s in starts}) > 1:
        same = len({replace(s, commit="").place for s in starts}) == 1
        what = "commit" if same else "machine or versions"
        lines.append(f"**The parts differ in {what}.**\n")
    lines.append(_busy(starts))
    return "\n".join(filter(None, lines))


def _busy(starts: Sequence[Start]) -> str:
    """A line of warning if other work used the machine too."""
    loads = [
        (start.load_average, start.machine.cores)
        for start in starts
        if start.load_average is not None
    ]
    most, cores = max(loads, default=(0.0, 1))
    if most < 0.5 * cores:
        return ""
    least = min(load for load, _ in loads)
    load, began = f"{most}", "it began"
    if len(loads) > 1:
        load, began = f"{least} to {most}", "its parts began"
    return (
        f"**The machine was shared**: load average {load} on {cores} cores when "
        f"{began}. Ratios stand up to that better than rates; one pass says little.\n"
    )


def _setting(figures: Figures) -> str:
    recipe, prompts = figures.recipe, figures.results.prompts
    lengths, run, sweep = prompts.tokens, recipe.run, recipe.sweep
    n = len(lengths)
    some = str(n) if n == prompts.found else f"{n} of {prompts.found}"
    words = [
        f"Target {short(recipe.target or f'{DEFAULT_TARGET} (installed default)')}",
        f"draft {', '.join(map(short, recipe.draft))}" if recipe.draft else "no draft",
        recipe.dtype if recipe.dtype != "stored" else "weights as stored",
    ]
    drawn = " and ".join(
        f"T = {t:g}" if t else "greedy" for t in sorted(sweep.temperature)
    )
    end = "" if run.end_of_sequence else "; end of sequence ignored, no text made"
    most = f"up to {run.max_tokens}"
    if run.least_tokens is not None:
        most = f"{run.least_tokens} to {run.max_tokens}, by prompt,"
    text = (
        f"{', '.join(words)}; {some} prompts of {min(lengths)} to {max(lengths)} "
        f"tokens ({sources(recipe)}), {most} new tokens, {drawn}{end}. {run.repeat} "
        f"interleaved pass{'es' * (run.repeat != 1)} after a first one, which is shown "
        "apart.\n"
    )
    if run.prompts_per_row is not None:
        text += f"Jobs have at most {run.prompts_per_row} prompts for each row.\n"
    if any(sweep.kv_bits) and run.mlx_lm:
        text += "mlx-lm keeps keys and values as they are throughout.\n"
    if any(sweep.prefix_cache):
        text += (
            "With a prefix cache, the prompts were decoded once before every pass.\n"
        )
    return text


def findings(figures: Figures) -> list[str]:
    """Lines for each batch and condition: speed-ups of the best fixed k and of auto."""
    best: dict[str, dict[bool, CellFigures]] = {}
    held_up = []
    for f in figures.drafted:
        key, ratios = f.cell.named(figures.varied), f.ratios(figures.plain(f))
        if not ratios:
            continue
        a = f.acceptance()
        if a.drafted and not f.can_be(_median(ratios)):
            held_up.append(
                f"- **{key}**: {f.cell.draft_name}, {f.cell.length}: "
                f"{_median(ratios):.2f} times no draft cannot be, at {a.length:.2f} "
                "tokens per row and round: other work held plain decoding up. It "
                "counts for nothing here."
            )
            continue
        fastest, auto = best.setdefault(key, {}), f.cell.num_draft_tokens == "auto"
        # A cell that drafted nothing decoded plainly, so its ratio is noise.
        faster = auto not in fastest or f.rate > fastest[auto].rate
        if (a.drafted or auto) and faster:
            fastest[auto] = f
    lines = []
    for key, fastest in best.items():
        if not any(f.acceptance().drafted for f in fastest.values()):
            lines.append(f"- **{key}**: nothing was drafted.")
            continue
        lines += [_finding(figures, key, f) for _, f in sorted(fastest.items())]
    return lines + held_up + _prefix_findings(figures)


def _finding(figures: Figures, key: str, f: CellFigures) -> str:
    ratios, a = f.ratios(figures.plain(f)), f.acceptance()
    if not a.drafted:
        return (
            f"- **{key}**: {f.cell.draft_name}, {f.cell.length}: it drafted nothing, "
            "and decodes as without a draft."
        )
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    text = (
        f"- **{key}**: {f.cell.draft_name}, {f.cell.length}: {_median(ratios):.2f} "
        f"times no draft ({spread if len(ratios) > 1 else 'one pass only'})"
    )
    against = f.ratios(figures.mlx_lm(f))
    if against:
        text += f", {_median(against):.2f} times mlx-lm without a draft"
    return (
        f"{text}; {a.accepted} of {a.drafted} draft tokens accepted, {a.length:.2f} "
        f"tokens per row and round (n = {a.rounds})."
    )


def _prefix_findings(figures: Figures) -> list[str]:
    """How much sooner the first token comes if a prefix cache has the prompt."""
    lines = []
    for cell, with_cache in figures.cells.items():
        without = figures.cells.get(replace(cell, prefix_cache=False))
        if not cell.prefix_cache or cell.system != "specdec" or without is None:
            continue
        if with_cache.first_token_ms and without.first_token_ms:
            late = _median(without.first_token_ms)
            soon = _median(with_cache.first_token_ms)
            lines.append(
                f"- **{figures.name(cell)}**: first token after {soon:.0f} ms instead "
                f"of {late:.0f}, {late / soon:.1f} times sooner "
                f"(n = {len(with_cache.first_token_ms)})."
            )
    return lines


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def sources(recipe: Recipe) -> str:
    """The sources of the prompts, files without their folders."""
    parts = [source.partition(":") for source in recipe.prompts.source]
    return " and ".join(f"{kind}:{short(what)}" for kind, _, what in parts)
