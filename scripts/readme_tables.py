#!/usr/bin/env python3
"""Write the measured tables of README.md and docs/ from benchmarks/results/.

Usage: scripts/readme_tables.py [--check]

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end of table -->``;
TABLES below says what is in it, a line for each. With --check nothing is written;
the exit code is 1 where a page is not what the raw results say.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.errors import SpecdecError  # noqa: E402
from specdec.model_names import short  # noqa: E402
from specdec.tools.bench.figures import Figures  # noqa: E402
from specdec.tools.bench.machine import place  # noqa: E402
from specdec.tools.bench.raw import Results  # noqa: E402
from specdec.tools.bench.tables import markdown_table, show_spread  # noqa: E402
from specdec.tools.bench.waves import (  # noqa: E402
    Record,
    full_rate,
    quiet_rate,
    rate,
    step_ms,
    total,
)

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """What a table shows of a file.

    Args:
        file: below benchmarks/results: NAME of a NAME.json that benchmarks/decode.py
            or benchmarks/draft_length.py wrote, or a folder of ``specdec bench``.
        title: what stands over the names of the rows.
        columns: names of COLUMNS below, in their order.
        rows: beginnings of what rows are called in the file (``specdec, draft B=8``;
            ``ngram B=1 k=auto``; ``batch 4: specdec``), in their order; none: all.
    """

    file: str
    title: str
    columns: Sequence[str]
    rows: Sequence[str] = ()


# A line for each table; a page shows it where its marker stands.
# ruff: noqa: E501
# fmt: off
TABLES = {
    "cpu-plain": Table("decode-cpu-plain", "without a draft", ("batch", "tokens/s", "/ batch_generate", "peak")),
    "cpu-draft": Table("decode-cpu-draft", "k = 2", ("batch", "tokens/s", "tokens per round"), ("mlx-lm speculative", "specdec, draft")),
    "cpu-batch": Table("decode-cpu-plain", "no draft", ("batch", "tokens/s", "ms", "peak"), ("specdec",)),
    "h200-batches": Table("decode-qwen-batches-h200", "no draft", ("batch", "tokens/s", "/ batch_generate", "ms")),
    "h200-single": Table("decode-qwen-b1-h200", "one row", ("k", "tokens/s", "first pass", "tokens per round")),
    "h200-lengths": Table("draft-length-qwen-b8-kernel-h200", "8 rows", ("k", "tokens/s", "/ no draft", "/ no draft, all running", "rate")),
    "h200-ngram-1": Table("draft-length-ngram-b1-h200", "one row", ("k", "tokens/s", "/ no draft", "quiet", "rate")),
    "h200-ngram-8": Table("draft-length-ngram-b8-waiting-h200", "8 rows, others waiting", ("k", "/ no draft, all running", "quiet", "rate")),
    "h200-gsm8k-1": Table("draft-length-smollm2-gsm8k-b1-h200", "GSM8K, one row", ("k", "tokens/s", "/ no draft", "quiet", "rate")),
    "h200-gsm8k-8": Table("draft-length-smollm2-gsm8k-b8-waiting-h200", "GSM8K, 8 rows", ("k", "/ no draft, all running", "quiet", "rate")),
    "h200-humaneval-8": Table("draft-length-smollm2-humaneval-b8-waiting-h200", "HumanEval, 8 rows", ("k", "/ no draft, all running", "quiet", "rate")),
    "h200-gsm8k-32": Table("draft-length-smollm2-gsm8k-b32-waiting-h200", "GSM8K, 32 rows", ("k", "/ no draft, all running", "quiet", "rate")),
    "h200-humaneval-32": Table("draft-length-smollm2-humaneval-b32-waiting-h200", "HumanEval, 32 rows", ("k", "/ no draft, all running", "quiet", "rate")),
    "h200-1b": Table("decode-1b-h200", "Llama 1B shape, no draft", ("batch", "tokens/s", "/ batch_generate", "ms")),
    "h200-readme": Table("decode-qwen-batches-h200", "one H200, no draft", ("batch", "tokens/s", "/ batch_generate")),
    "cpu-self-draft": Table("acceptance-quick", "SmolLM2, two CPU cores", ("rate", "tokens per round", "/ no draft"), ("batch 1: specdec, self", "batch 4: specdec, self")),
}
# fmt: on


@dataclass(frozen=True)
class Row:
    """One system of a file, at one batch and draft length.

    Args:
        key: what the file calls it.
        label: what a table calls it.
        batch: rows that decode together.
        k: the draft length; empty without a draft.
        first: the first pass, which does not count for speed.
        passes: those that do.
        ms: of a round with all rows running, as the file's own report has it.
        plain: those of this engine without a draft, where there are any to compare.
        mlx_lm: those of mlx-lm's batched decoding, likewise.
        best: those of the fastest fixed draft length, 0 included, likewise.
    """

    key: str
    label: str
    batch: int
    k: str
    first: Record
    passes: Sequence[Record]
    ms: float
    plain: Sequence[Record] = ()
    mlx_lm: Sequence[Record] = ()
    best: Sequence[Record] = ()

    @property
    def rates(self) -> list[float]:
        """Decode tokens per second, pass by pass."""
        return [rate(each) for each in self.passes]

    def over(
        self, others: Sequence[Record], of: Callable[[Record], float] = rate
    ) -> str:
        """The median of its rates over those of others, pass by pass."""
        if not others:
            return ""
        pairs = zip(map(of, self.passes), map(of, others), strict=True)
        return f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}"

    @property
    def quiet_over_plain(self) -> str:
        """Its rate over plain decoding's, all rows running, without other load."""
        if not self.plain:
            return ""
        return f"{quiet_rate(self.passes) / quiet_rate(self.plain):.2f}"

    def accepted_over(self, name: str) -> float | None:
        """Accepted draft tokens over another count, of all passes that count."""
        if not sum(total(each, "drafted") for each in self.passes):
            return None
        accepted = sum(total(each, "accepted") for each in self.passes)
        return accepted / sum(total(each, name) for each in self.passes)

    @property
    def peak(self) -> float:
        """The largest peak of a pass in MiB, less what was allocated before it."""
        peaks = (p["peak_memory_bytes"] - p["memory_before_bytes"] for p in self.passes)
        return float(max(peaks)) / MIB


def number(value: float | None, more: float = 0) -> str:
    """Two digits; empty for what there is not."""
    return "" if value is None else f"{value + more:.2f}"


# What a column is called in TABLES: what stands over it, and what is in it.
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "batch": ("batch", lambda r: str(r.batch)),
    "k": ("k", lambda r: r.k),
    "tokens/s": ("decode tokens/s", lambda r: f"{statistics.median(r.rates):.1f}"),
    "range": ("decode tokens/s", lambda r: show_spread(r.rates)),
    "first pass": ("first pass tokens/s", lambda r: f"{rate(r.first):.1f}"),
    "ms": ("ms per round", lambda r: f"{r.ms:.1f}"),
    "/ batch_generate": ("/ `batch_generate`", lambda r: r.over(r.mlx_lm)),
    "/ no draft": ("/ no draft", lambda r: r.over(r.plain)),
    "/ no draft, all running": (
        "/ no draft, all rows running",
        lambda r: r.over(r.plain, full_rate),
    ),
    "quiet": ("/ no draft, quiet rounds", lambda r: r.quiet_over_plain),
    "/ best fixed k": ("/ best fixed k", lambda r: r.over(r.best)),
    "rate": ("acceptance rate", lambda r: number(r.accepted_over("drafted"))),
    "tokens per round": (
        "tokens per round",
        lambda r: number(r.accepted_over("row_rounds"), 1),
    ),
    "peak": ("peak memory above weights", lambda r: f"{r.peak:.1f} MiB"),
}

LABELS = {
    "mlx-lm plain": "mlx-lm `generate_step`",
    "mlx-lm batch_generate": "mlx-lm `batch_generate`",
    "mlx-lm speculative": "mlx-lm's speculative decoding",
    "plain": "no draft",
}


class TableError(Exception):
    """A table cannot be made; the message is one line."""


# -- raw results as rows ---------------------------------------------------


def of_passes(passes: dict[str, list[Record]]) -> Iterator[Row]:
    """Of decode.py (``SYSTEM B=8 k=2``) and draft_length.py (``DRAFT B=8 k=auto``)."""

    def warm(key: str) -> list[Record]:
        return passes.get(key, [])[1:]

    for key, (first, *counted) in passes.items():
        found = re.fullmatch(r"(.+) B=(\d+)(?: k=(\w+))?", key)
        if found is None:
            raise TableError(f"{key!r} is no name of a row, as SYSTEM B=8 k=2 is")
        system, batch, k = found.groups()
        # This engine without a draft: the two scripts name it differently.
        plain = warm(f"specdec B={batch}") or warm(f"plain B={batch} k=0")
        drafts = not system.startswith("mlx-lm") and system not in ("specdec", "plain")
        peer = f"mlx-lm batch_generate B={batch}"
        fixed = re.compile(rf"{re.escape(system)} B={batch} k=\d+")
        yield Row(
            key=key,
            label=label_of(system),
            batch=int(batch),
            k="" if system == "plain" else k or "",
            first=first,
            passes=counted,
            ms=statistics.median(map(step_ms, counted)),
            plain=plain if drafts else [],
            mlx_lm=[] if key == peer else warm(peer),
            best=fastest(
                [plain, *(warm(other) for other in filter(fixed.fullmatch, passes))]
            )
            if k == "auto"
            else [],
        )


def label_of(system: str) -> str:
    """What a table calls a system, or a draft; of a path, its last part."""
    if system.startswith("wrong:"):
        return "wrong"
    return LABELS.get(system) or Path(short(system)).name


def fastest(several: Iterable[list[Record]]) -> list[Record]:
    """Of the passes of several systems, those with the largest median rate."""
    measured = (some for some in several if some)
    return max(
        measured, key=lambda some: statistics.median(map(rate, some)), default=[]
    )


def of_recipe(figures: Figures) -> Iterator[Row]:
    """Of ``specdec bench``: one row for each cell of its recipe."""
    passes = figures.results.passes

    def warm(cell: object) -> list[Record]:
        found = sorted(passes.get(cell, {}).items())  # type: ignore[call-overload]
        return [record for n, record in found if n]

    for cell in figures.cells:
        yield Row(
            key=figures.name(cell),
            label=figures.name(cell),
            batch=cell.conditions.batch,
            k=str(cell.num_draft_tokens or ""),
            first=passes[cell][min(passes[cell])],
            passes=warm(cell),
            ms=statistics.median(figures.cells[cell].step_ms or [0.0]),
            plain=[] if cell == cell.plain else warm(cell.plain),
            mlx_lm=[] if cell == cell.mlx_lm else warm(cell.mlx_lm),
        )


# -- pages -----------------------------------------------------------------


def render(table: Table, root: str) -> str:
    """A table in Markdown, and a line that tells where it comes from.

    Args:
        root: what leads from the page to the repository's root.
    """
    if (RESULTS / table.file).is_dir():
        figures = Figures(Results.read(RESULTS / table.file))
        rows, repeat = list(of_recipe(figures)), figures.recipe.run.repeat
        start, report = figures.results.starts[0], f"{table.file}/report.md"
    else:
        file = RESULTS / f"{table.file}.json"
        if not file.is_file():
            raise TableError(
                f"there is no {file.relative_to(ROOT)}, and no such folder"
            )
        start, report = json.loads(file.read_text("utf-8")), f"{table.file}.md"
        if "passes" not in start:
            raise TableError(f"{file.name} has no passes: it is of another benchmark")
        rows, repeat = list(of_passes(start["passes"])), start["options"]["repeat"]
    chosen = choose(rows, table.rows)
    unknown = set(table.columns) - COLUMNS.keys()
    if unknown:
        raise TableError(f"no column {min(unknown)!r}: there are {', '.join(COLUMNS)}")
    columns = [COLUMNS[name] for name in table.columns]
    made = markdown_table(
        [table.title, *(header for header, _ in columns)],
        [[row.label, *(show(row) for _, show in columns)] for row in chosen],
    )
    times = f"median of {repeat} passes" if repeat > 1 else "one pass"
    where = place(start["machine"], start["commit"])
    source = f"[{table.file}]({root}benchmarks/results/{report})"
    return f"{made}\n{source}: {where}; {times} after the first.\n"


def choose(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows whose names begin as wanted."""
    if not wanted:
        return list(rows)
    chosen = []
    for start in wanted:
        found = [row for row in rows if row.key.startswith(start)]
        if not found:
            known = ", ".join(repr(row.key) for row in rows)
            raise TableError(f"no row begins with {start!r}: there are {known}")
        chosen += found
    return chosen


MARKED = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(page: Path) -> str:
    """A page with its tables as they should be."""
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
    """Exit code 1 where ``--check`` found other tables, or one cannot be made."""
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
