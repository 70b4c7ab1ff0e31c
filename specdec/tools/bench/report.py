"""The report of a folder of raw results: Markdown, with plots beside it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...model_names import DEFAULT_TARGET, short
from ...utils.files import replace_file
from .figures import CellFigures, Figures
from .job_report import job_findings, job_sections
from .machine import place
from .plots import NAMES, draw_all
from .raw import Results
from .recipe import Recipe
from .sections import sections
from .waves import Record

FILE = "report.md"


def write_report(folder: Path) -> tuple[Path, bool]:
    """Write the report, and its plots where matplotlib is installed.

    Where it is not, plots that lie in the folder already are kept in the report.

    Returns:
        The report's file, and whether plots were drawn.

    Raises:
        ConfigError: there are no results in the folder.
    """
    figures = Figures(Results.read(folder))
    drawn = [] if figures.recipe.run.jobs else draw_all(figures, folder)
    file = folder / FILE
    plots = _earlier_plots(file) if drawn is None else drawn
    replace_file(file, report(figures, plots).encode())
    return file, drawn is not None


def _earlier_plots(file: Path) -> list[tuple[str, str]]:
    """Plots beside the report: what each shows, as far as it said so, and its file."""
    text = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    titles = {png: title for title, png in re.findall(r"(?m)^!\[(.*)\]\((.*)\)$", text)}
    plots = [f"{name}.png" for name in NAMES]
    return [
        (titles.get(png, Path(png).stem), png)
        for png in plots
        if (file.parent / png).is_file()
    ]


def report(figures: Figures, plots: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown.

    Args:
        plots: what each shows, and its file.
    """
    if figures.recipe.run.jobs:
        return _job_report(figures)
    parts = [
        f"# {figures.recipe.title}\n",
        _origin(figures),
        _setting(figures),
        *(f"{text}\n" for text in ["\n".join(findings(figures))] if text),
        *(f"![{title}]({file})\n" for title, file in plots),
        *sections(figures),
        _method(),
    ]
    return "\n".join(parts)


def _job_report(figures: Figures, *, notes: bool = True) -> str:
    parts = [
        f"# {figures.recipe.title}\n",
        _origin(figures),
        _setting(figures),
        *(f"{text}\n" for text in ["\n".join(job_findings(figures))] if text),
        *job_sections(figures, notes=notes),
    ]
    return "\n".join(parts)


def block(figures: Figures) -> str:
    """What a user can paste into an issue: all tables, and what they belong to."""
    text = _job_report(figures, notes=False)
    # One heading, as the issue has its own.
    return re.sub(r"(?m)^#+ (.*)$", r"**\1**", text)


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
        where = place(start["machine"], start["commit"])
        if where != seen:
            lines.append(f"    {start['command']}\n\n{where}, {start['date']}.\n")
        seen = where
    if len(starts) > 1:
        lines.append(f"Run in {len(starts)} parts.\n")
    if len({place(s["machine"], s["commit"]) for s in starts}) > 1:
        lines.append("**The parts differ in machine, versions or commit.**\n")
    lines.append(_busy(starts))
    return "\n".join(filter(None, lines))


def _busy(starts: Sequence[Record]) -> str:
    """A line when others used the machine too."""
    loads = [
        (load, start["machine"]["cores"])
        for start in starts
        if (load := start.get("load_average")) is not None
    ]
    load, cores = max(loads, default=(0.0, 1))
    if load < 0.5 * cores:
        return ""
    return (
        f"**The machine was shared**: load average {load} on {cores} cores when it "
        "began. Ratios stand up to that better than rates.\n"
    )


def _setting(figures: Figures) -> str:
    recipe, prompts = figures.recipe, figures.results.prompts
    lengths, sweep = prompts["tokens"], recipe.sweep
    n = len(lengths)
    some = (
        f"{n} prompts"
        if n == prompts["found"]
        else f"{n} of {prompts['found']} prompts"
    )
    words = [
        f"Target {short(recipe.target or f'{DEFAULT_TARGET} (installed default)')}",
        f"draft {', '.join(map(short, recipe.draft))}" if recipe.draft else "no draft",
        recipe.dtype if recipe.dtype != "stored" else "weights as stored",
    ]
    temperatures = sorted(figures.among["temperature"])
    drawn = " and ".join("greedy" if not t else f"T = {t:g}" for t in temperatures)
    end = "" if recipe.run.end_of_sequence else "; end of sequence ignored"
    most = f"up to {recipe.run.max_tokens}"
    if recipe.run.least_tokens is not None:
        most = f"{recipe.run.least_tokens} to {recipe.run.max_tokens}, by prompt,"
    text = (
        f"{', '.join(words)}; {some} of {min(lengths)} to {max(lengths)} tokens "
        f"({sources(recipe)}), {most} new "
        f"tokens, {drawn}{end}. {recipe.run.repeat} interleaved "
        f"pass{'es' * (recipe.run.repeat != 1)} after a first one, which is shown "
        "apart.\n"
    )
    if recipe.run.prompts_per_row is not None:
        per_row = recipe.run.prompts_per_row
        text += f"Jobs have at most {per_row} of these prompts for each row.\n"
    if any(sweep.kv_bits) and recipe.run.mlx_lm:
        text += "mlx-lm keeps keys and values as they are throughout.\n"
    if any(sweep.prefix_cache):
        text += (
            "With a prefix cache, the prompts were decoded once before every pass.\n"
        )
    return text


def findings(figures: Figures) -> list[str]:
    """A line for each batch and condition: what the best draft length comes to."""
    best: dict[str, tuple[float, CellFigures, list[float]] | None] = {}
    held_up = []
    for f in figures.drafted:
        ratios = f.ratios(figures.find(f.cell.plain))
        if not ratios:
            continue
        key, ratio = f.cell.conditions.label(figures.among), statistics.median(ratios)
        if f.acceptance().drafted and not f.can_be(ratio):
            held_up.append(
                f"- **{key}**: {f.cell.draft_name}, k = {f.cell.k}: "
                f"{ratio:.2f} times plain decoding cannot be, at "
                f"{f.acceptance().length:.2f} tokens per row and round: other work "
                "held plain decoding up. It counts for nothing here."
            )
            continue
        found = best.setdefault(key, None)
        # What drafted nothing decoded plainly: its ratio is noise.
        if f.acceptance().drafted and (found is None or ratio > found[0]):
            best[key] = ratio, f, ratios
    lines = []
    for key, found in best.items():
        if found is None:
            lines.append(f"- **{key}**: nothing was drafted.")
            continue
        ratio, f, ratios = found
        passes = f"{min(ratios):.2f} to {max(ratios):.2f}"
        against = f.ratios(figures.find(f.cell.mlx_lm))
        text = (
            f"- **{key}**: fastest draft {f.cell.draft_name}, "
            f"k = {f.cell.k}: "
            f"{ratio:.2f} times plain decoding at this batch "
            f"({passes if len(ratios) > 1 else 'one pass only'})"
        )
        if against:
            text += f", {statistics.median(against):.2f} times mlx-lm's plain decoding"
        text += f"; {f.acceptance().length:.2f} tokens per row and round."
        lines.append(text)
    return lines + held_up + _prefix_findings(figures)


def _prefix_findings(figures: Figures) -> list[str]:
    """How much sooner the first token comes where a prefix cache knows the prompt."""
    lines = []
    for cell, with_cache in figures.cells.items():
        if not cell.conditions.prefix_cache or cell.system != "specdec":
            continue
        without = figures.find(
            replace(cell, conditions=replace(cell.conditions, prefix_cache=False))
        )
        if without and with_cache.first_token_ms and without.first_token_ms:
            late = statistics.median(without.first_token_ms)
            soon = statistics.median(with_cache.first_token_ms)
            lines.append(
                f"- **{figures.name(cell)}**: first token after {soon:.0f} ms instead "
                f"of {late:.0f}, {late / soon:.1f} times sooner."
            )
    return lines


def _method() -> str:
    return (
        "## How it was measured\n\n"
        "Systems take turns within one process on the same weights and prompts, and a "
        "ratio is taken pass by pass before its median: what slows the machine "
        "meanwhile falls on all alike. All batches begin with all their rows and take "
        "no new ones in. docs/benchmarks.md says what is counted; `specdec report` "
        "makes this page from raw.jsonl.\n"
    )


def sources(recipe: Recipe) -> str:
    """Where the prompts come from, without the folders of files."""
    parts = [source.partition(":") for source in recipe.prompts.sources]
    return " and ".join(f"{kind}:{short(what)}" for kind, _, what in parts)
