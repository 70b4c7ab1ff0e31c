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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.errors import SpecdecError  # noqa: E402
from specdec.tools.bench.figures import Figures  # noqa: E402
from specdec.tools.bench.raw import Results  # noqa: E402
from specdec.utils.tables import markdown_table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class TableError(Exception):
    """A table cannot be made; the message is one line."""


@dataclass(frozen=True)
class Row:
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


@dataclass(frozen=True)
class Table:
    """A table of :class:`Row`.

    Args:
        title: the header over the labels.
        batches: a column for each of these numbers of rows.
    """

    title: str
    batches: tuple[int, ...]
    rows: tuple[Row, ...]


UNLIKE = "head over no draft: letters, translations, advice"
LIKE = "head over no draft: GSM8K, HumanEval"
THEIRS = "head over mlx-lm: GSM8K, HumanEval"
PLAIN = "no draft over mlx-lm: GSM8K, HumanEval"

TABLES = {
    "h200-jobs": Table(
        "one H200, whole jobs, head over no draft",
        (1, 8, 32),
        tuple(
            Row(label, "jobs-h200.json", True, "no draft", prompts)
            for label, prompts in (
                (
                    "kinds of prompts that it was not trained on",
                    "64 prompts of new kinds",
                ),
                ("HumanEval", "HumanEval"),
                ("a mix of these, GSM8K and letters", "mixed with GSM8K"),
            )
        ),
    ),
    "cpu-jobs": Table(
        "two CPU cores, float32, whole jobs",
        (1, 8),
        (
            Row(UNLIKE, "jobs-mixed-cpu", True, "no draft"),
            Row(LIKE, "jobs-cpu", True, "no draft"),
            Row(THEIRS, "jobs-cpu", True, "mlx-lm"),
            Row(PLAIN, "jobs-cpu", False, "mlx-lm"),
        ),
    ),
}


class Jobs:
    """A file of jobs: seconds and tokens of each pass of each system."""

    def __init__(self, path: Path):
        raw = json.loads(path.read_text("utf-8"))
        each = [dict(zip(raw["columns"], job, strict=True)) for job in raw["jobs"]]
        #: By prompts, rows, system and pass.
        self.rates = {
            (job["set"], job["rows"], job["system"], job["pass"]): job["tokens"]
            / job["seconds"]
            for job in each
        }

    def ratios(self, row: Row, batch: int) -> list[float]:
        """Ratios of a row of a table, pass by pass."""
        system = "auto" if row.drafts else "no draft"
        return [
            rate / self.rates[row.prompts, batch, row.over, number]
            for (prompts, rows, name, number), rate in self.rates.items()
            if (prompts, rows, name) == (row.prompts, batch, system)
            and (row.prompts, batch, row.over, number) in self.rates
        ]


def ratios_of(results: Figures | Jobs, row: Row, batch: int) -> Sequence[float]:
    """Ratios of a row of a table, pass by pass."""
    if isinstance(results, Jobs):
        return results.ratios(row, batch)
    figures = results
    (system,) = (
        f
        for f in figures.cells.values()
        if (f.cell.batch, f.cell.drafts) == (batch, row.drafts)
        and f.cell.system == "specdec"
    )
    over = figures.mlx_lm if row.over == "mlx-lm" else figures.plain
    return system.ratios(over(system))


def read(name: str) -> Figures | Jobs:
    """The results of that name."""
    path = RESULTS / name
    return Jobs(path) if path.suffix == ".json" else Figures(Results.read(path))


def render(table: Table, root: str) -> str:
    """A table in Markdown, and links to its results.

    Args:
        root: relative path from the page to the repository's root.
    """
    sources = {row.results: read(row.results) for row in table.rows}
    cells = [
        [ratios_of(sources[row.results], row, batch) for batch in table.batches]
        for row in table.rows
    ]
    rows = [
        [row.label, *(f"{statistics.median(each):.2f} times" for each in ratios)]
        for row, ratios in zip(table.rows, cells, strict=True)
    ]
    header = [f"{n} row{'s' * (n > 1)}" for n in table.batches]
    links = [
        f"[{name.removesuffix('.json')}]({root}benchmarks/results/{page_of(name)})"
        for name in sources
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
    steps_up = len(page.relative_to(ROOT).parts) - 1

    def made(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        try:
            if name not in TABLES:
                raise TableError(f"no such table: there are {', '.join(TABLES)}")
            text = render(TABLES[name], "../" * steps_up)
        except (TableError, SpecdecError) as error:
            raise TableError(f"{page.name}: table {name}: {error}") from error
        return f"{begin}\n{text}\n{end}"

    text = page.read_text("utf-8")
    marks = len(re.findall("<!-- (?:table: .*|end of table) -->", text))
    if marks != 2 * len(MARKED.findall(text)):
        raise TableError(f"{page.name}: a table without its end, or twice")
    return MARKED.sub(made, text)


def main(arguments: list[str]) -> int:
    """Write or check the tables; return the exit code.

    It is 1 if ``--check`` finds a difference or a table cannot be made.
    """
    if arguments not in ([], ["--check"]):
        print(f"error: usage: {Path(__file__).name} [--check]", file=sys.stderr)
        return 2
    try:
        pages = {page: filled(page) for page in PAGES}
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [p for p, text in pages.items() if text != p.read_text("utf-8")]
    if stale and arguments:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        print(
            f"error: tables of {names} are not what the raw results say: "
            "run scripts/readme_tables.py",
            file=sys.stderr,
        )
        return 1
    for page in stale:
        page.write_text(pages[page], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
