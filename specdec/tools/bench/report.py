"""The report of a folder of raw results: Markdown and HTML, with plots."""

from __future__ import annotations

import base64
import html
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...model_names import DEFAULT_DRAFT, DEFAULT_TARGET, short
from ...utils.files import replace_file
from .figures import CellFigures, Figures
from .plots import NAMES, draw_all
from .raw import Results, Start
from .recipe import Recipe
from .sections import Section, sections

FILE, PAGE = "report.md", "report.html"

# Plots are drawn on white. On a phone, names wrap, so that figures are seen, too.
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
summary { font-weight: bold; cursor: pointer; margin: .6rem 0; }
img { max-width: 100%; border-radius: .4rem; background: #fff; }
@media (max-width: 46rem) {
  body { margin: 1rem auto; }
  th, td { padding: .2rem .4rem; white-space: normal; }
  td:first-child { min-width: 7rem; }
}
"""


def write_report(folder: Path) -> tuple[list[Path], bool]:
    """Write the report, and its plots if matplotlib is installed.

    Without matplotlib, the report keeps plots that are already in the folder.

    Returns:
        The report's files, and whether plots were drawn.

    Raises:
        ConfigError: there are no results in the folder.
    """
    figures = Figures(Results.read(folder))
    drawn = draw_all(figures, folder)
    file, page = folder / FILE, folder / PAGE
    plots = _earlier_plots(file) if drawn is None else drawn
    text = report(figures, plots)
    replace_file(file, text.encode())
    made = html_page(figures.recipe.title, text, folder)
    if made is None:
        return [file], drawn is not None
    replace_file(page, made.encode())
    return [file, page], drawn is not None


def _earlier_plots(file: Path) -> list[tuple[str, str]]:
    """The plots in the folder of an earlier report: (title, file) of each.

    A plot that the earlier report does not show is titled by its file's name.
    """
    text = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    titles = {png: title for title, png in re.findall(r"(?m)^!\[(.*)\]\((.*)\)$", text)}
    plots = [f"{name}.png" for name in NAMES]
    return [
        (titles.get(png, Path(png).stem), png)
        for png in plots
        if (file.parent / png).is_file()
    ]


def html_page(title: str, text: str, folder: Path) -> str | None:
    """A report in Markdown as one HTML page that contains its plots.

    HTML in names, which others chose, is shown as text; only what :func:`_folded`
    writes becomes HTML. The page loads nothing from anywhere.

    Returns:
        The page; ``None`` if markdown-it-py is not installed.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        return None
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    begin = r"<p>&lt;details&gt;\n&lt;summary&gt;(.*?)&lt;/summary&gt;</p>"
    body = re.sub(begin, r"<details>\n<summary>\1</summary>", body)
    body = body.replace("<p>&lt;/details&gt;</p>", "</details>")
    for plot in (folder / f"{name}.png" for name in NAMES):
        if plot.is_file():
            data = base64.b64encode(plot.read_bytes()).decode()
            inside = f'src="data:image/png;base64,{data}"'
            body = body.replace(f'src="{plot.name}"', inside)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n{body}</html>\n"
    )


def report(figures: Figures, plots: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown: the first table is shown, the others are folded.

    Args:
        plots: title and file of each plot.
    """
    found = sections(figures)
    parts = [
        f"# {_plain(figures.recipe.title)}\n",
        _origin(figures),
        _setting(figures),
        "\n".join([*findings(figures), ""]),
        *(f"## {s.title}\n\n{s.table}\n{s.note}\n" for s in found[:1]),
        *(f"![{title}]({file})\n" for title, file in plots),
        *map(_folded, found[1:]),
        _method(figures),
    ]
    return "\n".join(parts)


def block(figures: Figures) -> str:
    """A block to paste into an issue: tables, machine and command."""
    shown = [s for s in sections(figures) if s.in_issues]
    parts = [
        f"**{_plain(figures.recipe.title)}**\n",
        _origin(figures),
        _setting(figures),
        "\n".join([*findings(figures), ""]),
        *(f"**{s.title}**\n\n{s.table}" for s in shown),
    ]
    return "\n".join(parts)


def _plain(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _folded(section: Section) -> str:
    note = f"\n{section.note}\n" if section.note else ""
    return (
        f"<details>\n<summary>{section.title}</summary>\n\n"
        f"{section.table}{note}\n</details>\n"
    )


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
    seen = None
    for start in starts:
        where = start.place
        if where != seen:
            lines.append(f"    {start.command}\n\n{where}, {start.date}.\n")
        seen = where
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
        found, auto = best.setdefault(key, {}), f.cell.num_draft_tokens == "auto"
        # A cell that drafted nothing decoded plainly, so its ratio is noise.
        faster = auto not in found or f.rate > found[auto].rate
        if (a.drafted or auto) and faster:
            found[auto] = f
    lines = []
    for key, found in best.items():
        if not any(f.acceptance().drafted for f in found.values()):
            lines.append(f"- **{key}**: nothing was drafted.")
            continue
        lines += [_finding(figures, key, f) for _, f in sorted(found.items())]
    return lines + held_up + _prefix_findings(figures) + _gpu_finding(figures)


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


def _gpu_finding(figures: Figures) -> list[str]:
    """The default pair's speed-up on a GPU, if a CPU was measured."""
    on_cpu = figures.results.starts[-1].machine.backend == "cpu"
    if not on_cpu or DEFAULT_DRAFT not in figures.recipe.draft:
        return []
    return [f"- {ON_A_GPU}"]


#: Numbers of jobs-smollm2-h100 in benchmarks/results; a test compares them.
ON_A_GPU = (
    "With few rows, a GPU verifies several tokens in hardly more time than one: on one "
    "H100 `auto` with this draft was 2.16, 2.07 and 1.71 times as fast as no draft at "
    "batch 1, 8 and 32 (jobs of 12, 64 and 64 prompts, three passes each)."
)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def sources(recipe: Recipe) -> str:
    """The sources of the prompts, files without their folders."""
    parts = [source.partition(":") for source in recipe.prompts.source]
    return " and ".join(f"{kind}:{short(what)}" for kind, _, what in parts)
