#!/usr/bin/env python3
"""Write the measured tables of README.md and docs/ from benchmarks/results/.

Usage: scripts/readme_tables.py [--check]

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. With
--check nothing is written, and the exit code is 1 if a page differs from the raw
results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.tools.bench.figures import Figures  # noqa: E402
from specdec.tools.bench.raw import Results  # noqa: E402
from specdec.utils.tables import markdown_table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Row(NamedTuple):
    """A row: how many times as fast a system was as another, by rows that decode.

    Args:
        label: what was measured.
        results: below benchmarks/results a folder of ``specdec bench``, or a file of
            jobs.
        drafts: whether the system drafts; the only drafting one of a folder, and
            ``auto`` in a file.
        over: ``no draft``, or ``mlx-lm``, which has none.
        prompts: the set of prompts, in a file.
    """

    label: str
    results: str
    drafts: bool
    over: str
    prompts: str | None = None


class Table(NamedTuple):
    """A table of rows, with a column for each of some numbers of rows that decode."""

    title: str
    batches: tuple[int, ...]
    rows: tuple[Row, ...]


def _job(label: str, prompts: str) -> Row:
    return Row(label, "jobs-h200.json", True, "no draft", prompts)


UNLIKE = "head over no draft: letters, translations, advice"
LIKE = "head over no draft: GSM8K, HumanEval"
THEIRS = "head over mlx-lm: GSM8K, HumanEval"
PLAIN = "no draft over mlx-lm: GSM8K, HumanEval"
TABLES = {
    "h200-jobs": Table("one H200, whole jobs, head over no draft", (1, 8, 32), (
        _job("kinds of prompts that it was not trained on", "64 prompts of new kinds"),
        _job("HumanEval", "HumanEval"),
        _job("a mix of these, GSM8K and letters", "mixed with GSM8K"),
    )),
    "cpu-jobs": Table("two CPU cores, float32, whole jobs", (1, 8), (
        Row(UNLIKE, "jobs-mixed-cpu", True, "no draft"),
        Row(LIKE, "jobs-cpu", True, "no draft"),
        Row(THEIRS, "jobs-cpu", True, "mlx-lm"),
        Row(PLAIN, "jobs-cpu", False, "mlx-lm"),
    )),
}  # fmt: skip


def ratios_of(row: Row, batch: int) -> Sequence[float]:
    """Ratios of a row of a table, pass by pass."""
    path = RESULTS / row.results
    if path.suffix == ".json":
        raw = json.loads(path.read_text("utf-8"))
        jobs = [dict(zip(raw["columns"], job, strict=True)) for job in raw["jobs"]]
        rates = {
            (job["system"], job["pass"]): job["tokens"] / job["seconds"]
            for job in jobs
            if (job["set"], job["rows"]) == (row.prompts, batch)
        }
        system = "auto" if row.drafts else "no draft"
        return [
            rate / rates[row.over, number]
            for (name, number), rate in rates.items()
            if name == system and (row.over, number) in rates
        ]
    figures = Figures(Results.read(path))
    (measured,) = (
        f
        for f in figures.cells.values()
        if (f.cell.batch, f.cell.drafts, f.cell.system)
        == (batch, row.drafts, "specdec")
    )
    over = figures.mlx_lm if row.over == "mlx-lm" else figures.plain
    return measured.ratios(over(measured))


def render(table: Table, root: str) -> str:
    """A table in Markdown, and links to its results.

    Args:
        root: relative path from the page to the repository's root.
    """
    cells = [[ratios_of(row, batch) for batch in table.batches] for row in table.rows]
    rows = [
        [row.label, *(f"{statistics.median(each):.2f} times" for each in ratios)]
        for row, ratios in zip(table.rows, cells, strict=True)
    ]
    header = [f"{n} row{'s' * (n > 1)}" for n in table.batches]
    links = [
        f"[{name.removesuffix('.json')}]({root}benchmarks/results/{page_of(name)})"
        for name in dict.fromkeys(row.results for row in table.rows)
    ]
    counts = sorted({len(each) for ratios in cells for each in ratios})
    passes = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    text = markdown_table([table.title, *header], rows)
    return f"{text}\nMedians of {passes} passes: {', '.join(links)}.\n"


def page_of(name: str) -> str:
    """The page of results, below benchmarks/results."""
    return name.replace(".json", ".md") if ".json" in name else f"{name}/report.md"


MARKED = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(page: Path) -> str:
    """The text of a page, with its tables made from the raw results."""
    root = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def made(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}\n{render(TABLES[name], root)}\n{end}"

    return MARKED.sub(made, page.read_text("utf-8"))


def main(arguments: list[str]) -> int:
    """Write or check the tables; return the exit code."""
    pages = {page: filled(page) for page in PAGES}
    stale = [p for p, text in pages.items() if text != p.read_text("utf-8")]
    if "--check" in arguments:
        for page in stale:
            print(f"error: {page.name}: run scripts/readme_tables.py", file=sys.stderr)
        return int(bool(stale))
    for page in stale:
        page.write_text(pages[page], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
