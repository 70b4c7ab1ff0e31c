#!/usr/bin/env python3
"""Write the measured tables of README.md and docs/ from benchmarks/results/.

Usage: scripts/readme_tables.py [--check]

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
TABLES below describes each table in one line. With --check nothing is written, and the
exit code is 1 if a page differs from the raw results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.errors import SpecdecError  # noqa: E402
from specdec.model_names import short  # noqa: E402
from specdec.tools.bench.figures import Figures  # noqa: E402
from specdec.tools.bench.job import JobRecord  # noqa: E402
from specdec.tools.bench.raw import Results, Start  # noqa: E402
from specdec.utils.records import read_record  # noqa: E402
from specdec.utils.tables import markdown_table, show_spread  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """A table of the results in one file, or in several.

    Args:
        file: a name below benchmarks/results: NAME of a NAME.json that version 0.1's
            decode or draft_length wrote, or a folder of ``specdec bench``. For several
            files, a triple of each: file, beginning of a row's name, label.
        title: the header over the names of the rows.
        columns: names of COLUMNS below, in their order.
        rows: beginnings of the rows' names in the file (``specdec, draft B=8``;
            ``ngram B=1 k=auto``; ``batch 4: specdec``), in their order; empty for all.
    """

    file: str | Sequence[tuple[str, str, str]]
    title: str
    columns: Sequence[str]
    rows: Sequence[str] = ()


SMOLLM2 = "smollm2-135m-instruct B={} k=auto"

JOBS = [
    f"batch {batch}: {system}"
    for batch in (1, 8, 32)
    for system in (
        "mlx-lm, generate_step" if batch == 1 else "mlx-lm, batch_generate",
        "specdec, no draft",
        "specdec, smollm2-135m-instruct, auto",
    )
]

# A line for each table; a page shows the table at its marker.
# ruff: noqa: E501
# fmt: off
TABLES = {
    "cpu-jobs": Table("jobs-cpu", "two CPU cores, whole jobs", ("batch", "job tokens/s", "/ no draft", "/ mlx-lm")),
    "h200-plain": Table("decode-qwen-batches-h200", "one H200, no draft", ("batch", "tokens/s", "/ batch_generate", "peak")),
    "h100-jobs": Table("jobs-smollm2-h100", "one H100, whole jobs", ("batch", "job tokens/s", "/ no draft", "/ mlx-lm"), JOBS),
    "h200-auto": Table(
        (
            ("draft-length-smollm2-gsm8k-b1-h200", SMOLLM2.format(1), "SmolLM2 and four layers, GSM8K"),
            ("draft-length-smollm2-gsm8k-b1-once-h200", SMOLLM2.format(1), "the same again"),
            ("draft-length-smollm2-gsm8k-b8-waiting-h200", SMOLLM2.format(8), "SmolLM2 and four layers, GSM8K"),
            ("draft-length-smollm2-gsm8k-b32-waiting-h200", SMOLLM2.format(32), "SmolLM2 and four layers, GSM8K"),
            ("draft-length-smollm2-gsm8k-b32-waiting-once-h200", SMOLLM2.format(32), "the same again"),
            ("draft-length-smollm2-humaneval-b1-h200", SMOLLM2.format(1), "SmolLM2 and four layers, HumanEval"),
            ("draft-length-smollm2-humaneval-b8-waiting-h200", SMOLLM2.format(8), "SmolLM2 and four layers, HumanEval"),
            ("draft-length-smollm2-humaneval-b32-waiting-h200", SMOLLM2.format(32), "SmolLM2 and four layers, HumanEval"),
            ("draft-length-ngram-b1-h200", "ngram B=1 k=auto", "Qwen 1.5B and `ngram`, HumanEval"),
            ("draft-length-ngram-b8-waiting-h200", "ngram B=8 k=auto", "Qwen 1.5B and `ngram`, HumanEval"),
            ("draft-length-qwen-b32-kernel-h200", "ngram B=32 k=auto", "Qwen 1.5B and `ngram`, HumanEval"),
            ("draft-length-qwen-b1-kernel-h200", "Qwen2.5-Coder-0.5B-Instruct B=1 k=auto", "Qwen 1.5B and 0.5B, HumanEval"),
            ("draft-length-qwen-b8-kernel-h200", "Qwen2.5-Coder-0.5B-Instruct B=8 k=auto", "Qwen 1.5B and 0.5B, HumanEval"),
            ("draft-length-qwen-b32-kernel-h200", "Qwen2.5-Coder-0.5B-Instruct B=32 k=auto", "Qwen 1.5B and 0.5B, HumanEval"),
        ),
        "one H200, all rows running",
        ("batch", "passes", "best fixed", "auto"),
    ),
}
# fmt: on


# -- passes of version 0.1's scripts -------------------------------------------

#: A pass as waves: rows of a wave begin together; it has its steps and rounds.
Waves = dict[str, Any]


def total(record: Waves, name: str) -> float:
    """The sum of a field over the waves of a pass."""
    return float(sum(wave[name] for wave in record["waves"]))


def decode_rate(record: Waves) -> float:
    """Tokens per second, counted in each wave from its last row's first token."""
    seconds = total(record, "decode_seconds")
    return total(record, "decode_tokens") / seconds if seconds else 0.0


def full_rate(record: Waves) -> float:
    """Tokens per second while every row was running, without a wave's first round."""
    seconds = tokens = 0.0
    for wave in record["waves"]:
        steps = zip(
            wave["step_ms"], wave["step_rows"], wave.get("rounds", ()), strict=False
        )
        for ms, running, (_, rows) in islice(steps, 1, None):
            if running == wave["rows"]:
                seconds += ms / 1e3
                tokens += running + sum(accepted for _, accepted in rows)
    return tokens / seconds if seconds else 0.0


def step_ms(record: Waves) -> float:
    """Median milliseconds of a step with all rows running; 0 without such steps."""
    found = [
        ms
        for wave in record["waves"]
        for ms, rows in zip(wave["step_ms"], wave["step_rows"], strict=True)
        if rows == wave["rows"]
    ]
    return statistics.median(found or [0.0])


# -- rows ------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """The numbers of a pass that tables need.

    Args:
        rate: tokens per second: of decoding in 0.1's scripts, else of the whole job.
        full: tokens per second while every row was running; only in 0.1's scripts.
        rounds, drafted, accepted: rounds and draft tokens, summed over all rows.
        ms: milliseconds of a round with all rows running; only in 0.1's scripts.
        peak: peak bytes above those allocated before the pass.
    """

    rate: float
    full: float
    rounds: float
    drafted: float
    accepted: float
    ms: float
    peak: int

    @classmethod
    def of_waves(cls, record: Waves) -> Pass:
        """A pass of version 0.1's scripts."""
        return cls(
            rate=decode_rate(record),
            full=full_rate(record),
            rounds=sum(w.get("row_rounds", 0) for w in record["waves"]),
            drafted=total(record, "drafted"),
            accepted=total(record, "accepted"),
            ms=step_ms(record),
            peak=record["peak_memory_bytes"] - record["memory_before_bytes"],
        )

    @classmethod
    def of_job(cls, record: JobRecord) -> Pass:
        """A pass of ``specdec bench``."""
        return cls(
            rate=record.rate,
            full=0.0,
            rounds=sum(r.rounds for r in record.requests),
            drafted=sum(r.drafted for r in record.requests),
            accepted=sum(r.accepted for r in record.requests),
            ms=0.0,
            peak=record.peak_memory_bytes - record.memory_before_bytes,
        )


@dataclass(frozen=True)
class Row:
    """One system of a file, at one batch and draft length.

    Args:
        key: its name in the file.
        label: its name in a table.
        batch: rows that decode together.
        k: the draft length; empty without a draft.
        first: the first pass, which does not count for speed.
        passes: the passes that count.
        plain: passes of this engine without a draft, if there are any to compare with.
        mlx_lm: passes of mlx-lm without a draft, likewise.
        fixed: passes by each fixed draft length of the same draft, likewise.
    """

    key: str
    label: str
    batch: int
    k: str
    first: Pass
    passes: Sequence[Pass]
    plain: Sequence[Pass] = ()
    mlx_lm: Sequence[Pass] = ()
    fixed: Mapping[str, Sequence[Pass]] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each pass that counts."""
        return [each.rate for each in self.passes]

    def over(self, others: Sequence[Pass], of: str = "rate") -> str:
        """The median ratio of the row's rates to others' rates, pass by pass."""
        if not others:
            return ""
        # A run that reached its time limit may have fewer passes of some rows.
        pairs = zip(self.passes, others, strict=False)
        ratios = (getattr(a, of) / getattr(b, of) for a, b in pairs)
        return f"{statistics.median(ratios):.2f}"

    @property
    def best_fixed(self) -> str:
        """The largest speed-up of a fixed k over plain decoding, all rows running."""
        ratios = {
            k: replace(self, passes=passes).over(self.plain, "full")
            for k, passes in self.fixed.items()
        }
        best = max(ratios, key=lambda k: float(ratios[k]), default="")
        return f"{ratios[best]} (k = {best})" if best else ""

    def accepted_over(self, name: str) -> float | None:
        """Accepted draft tokens over another count, in all passes that count."""
        if not sum(each.drafted for each in self.passes):
            return None
        accepted = sum(each.accepted for each in self.passes)
        return accepted / sum(getattr(each, name) for each in self.passes)


def number(value: float | None, more: float = 0) -> str:
    """``value + more`` with two decimals; empty for ``None``."""
    return "" if value is None else f"{value + more:.2f}"


# Columns by their names in TABLES: the header, and a function that makes a row's cell.
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "batch": ("batch", lambda r: str(r.batch)),
    "k": ("k", lambda r: r.k),
    "tokens/s": ("decode tokens/s", lambda r: f"{statistics.median(r.rates):.1f}"),
    "job tokens/s": ("tokens/s", lambda r: f"{statistics.median(r.rates):.1f}"),
    "range": ("decode tokens/s", lambda r: show_spread(r.rates)),
    "passes": ("passes", lambda r: str(len(r.passes))),
    "first pass": ("first pass tokens/s", lambda r: f"{r.first.rate:.1f}"),
    "ms": (
        "ms per round",
        lambda r: f"{statistics.median(p.ms for p in r.passes):.1f}",
    ),
    "/ batch_generate": ("/ `batch_generate`", lambda r: r.over(r.mlx_lm)),
    "/ mlx-lm": ("/ mlx-lm", lambda r: r.over(r.mlx_lm)),
    "/ no draft": ("/ no draft", lambda r: r.over(r.plain)),
    "best fixed": ("best fixed k / no draft", lambda r: r.best_fixed),
    "auto": ("`auto` / no draft", lambda r: r.over(r.plain, "full")),
    "rate": ("acceptance rate", lambda r: number(r.accepted_over("drafted"))),
    "tokens per round": (
        "tokens per round",
        lambda r: number(r.accepted_over("rounds"), 1),
    ),
    "peak": (
        "peak memory above weights",
        lambda r: f"{max(p.peak for p in r.passes) / MIB:.1f} MiB",
    ),
}

LABELS = {
    "mlx-lm plain": "mlx-lm `generate_step`",
    "mlx-lm batch_generate": "mlx-lm `batch_generate`",
    "mlx-lm speculative": "mlx-lm's speculative decoding",
    "mlx-lm, generate_step": "mlx-lm `generate_step`",
    "mlx-lm, batch_generate": "mlx-lm `batch_generate`",
    "plain": "no draft",
}


class TableError(Exception):
    """A table cannot be made; the message is one line."""


# -- raw results as rows ---------------------------------------------------


def of_passes(recorded: dict[str, list[Waves]]) -> Iterator[Row]:
    """Rows of decode (``SYSTEM B=8 k=2``) and draft_length (``DRAFT B=8 k=auto``)."""
    passes = {key: list(map(Pass.of_waves, each)) for key, each in recorded.items()}

    def warm(key: str) -> list[Pass]:
        return passes.get(key, [])[1:]

    for key, (first, *counted) in passes.items():
        found = re.fullmatch(r"(.+) B=(\d+)(?: k=(\w+))?", key)
        if found is None:
            raise TableError(f"{key!r} is no name of a row, as SYSTEM B=8 k=2 is")
        system, batch, k = found.groups()
        # The two scripts name this engine without a draft differently.
        plain = warm(f"specdec B={batch}") or warm(f"plain B={batch} k=0")
        drafts = not system.startswith("mlx-lm") and system not in ("specdec", "plain")
        peer = f"mlx-lm batch_generate B={batch}"
        fixed = re.compile(rf"{re.escape(system)} B={batch} k=(\d+)")
        lengths = {m[1]: warm(m[0]) for m in map(fixed.fullmatch, passes) if m}
        yield Row(
            key=key,
            label=label_of(system),
            batch=int(batch),
            k="" if system == "plain" else k or "",
            first=first,
            passes=counted,
            plain=plain if drafts else [],
            mlx_lm=[] if key == peer else warm(peer),
            fixed=lengths if k == "auto" else {},
        )


def label_of(system: str) -> str:
    """The name of a system or a draft in a table; of a path only its last part."""
    if system.startswith("wrong:"):
        return "wrong"
    return LABELS.get(system) or Path(short(system)).name


def of_recipe(figures: Figures) -> Iterator[Row]:
    """Rows of ``specdec bench``: one for each cell of its recipe without a load."""
    for f in figures.at_once:
        cell, plain, theirs = f.cell, figures.plain(f), figures.mlx_lm(f)
        short_label = f"specdec, {cell.length}" if cell.drafts else cell.label
        yield Row(
            key=figures.name(cell),
            label=LABELS.get(cell.label, short_label.replace("auto", "`auto`")),
            batch=cell.batch,
            k=str(cell.num_draft_tokens or ""),
            first=Pass.of_job(f.first),
            passes=list(map(Pass.of_job, f.counted)),
            plain=[] if plain in (None, f) else list(map(Pass.of_job, plain.counted)),
            mlx_lm=[]
            if theirs in (None, f)
            else list(map(Pass.of_job, theirs.counted)),
        )


# -- pages -----------------------------------------------------------------


def render(table: Table, root: str) -> str:
    """A table in Markdown, and links to its results.

    Args:
        root: relative path from the page to the repository's root.
    """
    unknown = set(table.columns) - COLUMNS.keys()
    if unknown:
        raise TableError(f"no column {min(unknown)!r}: there are {', '.join(COLUMNS)}")
    if isinstance(table.file, str):
        rows, source = read(table.file, root, table.rows)
        chosen, sources = rows, [source]
    else:
        chosen, sources = [], []
        for file, name, label in table.file:
            rows, source = read(file, root, [name])
            chosen += [replace(row, label=label) for row in rows]
            sources += [source] * (source not in sources)
    columns = [COLUMNS[name] for name in table.columns]
    made = markdown_table(
        [table.title, *(header for header, _ in columns)],
        [[row.label, *(show(row) for _, show in columns)] for row in chosen],
    )
    if len(sources) == 1:
        return f"{made}\n{sources[0]}.\n"
    links = ", ".join(source.partition(":")[0] for source in sources)
    return f"{made}\nRaw results: {links}.\n"


def read(name: str, root: str, wanted: Sequence[str]) -> tuple[list[Row], str]:
    """Rows of a file or folder of results, and a text: link, machine, passes.

    A run that reached its time limit has fewer passes than its recipe asks for, and not
    equally many of each row. The text gives the fewest passes of a row shown.
    """
    if (RESULTS / name).is_dir():
        figures = Figures(Results.read(RESULTS / name))
        rows = choose(list(of_recipe(figures)), wanted)
        repeat = min(len(row.passes) for row in rows)
        start, report = figures.results.starts[0], f"{name}/report.md"
    else:
        file = RESULTS / f"{name}.json"
        if not file.is_file():
            raise TableError(
                f"there is no {file.relative_to(ROOT)}, and no such folder"
            )
        raw, report = json.loads(file.read_text("utf-8")), f"{name}.md"
        if "passes" not in raw:
            raise TableError(f"{file.name} has no passes: it is of another benchmark")
        rows = choose(list(of_passes(raw["passes"])), wanted)
        start, repeat = read_record(Start, raw), raw["options"]["repeat"]
    times = f"median of {repeat} passes" if repeat > 1 else "one pass"
    # The commit is left out, since the linked report names it.
    where = start.place.partition("; commit ")[0]
    link = f"[{name}]({root}benchmarks/results/{report})"
    return rows, f"{link}: {where}; {times} after the first"


def choose(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows whose names begin with one of ``wanted``, in its order; all if empty."""
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
