"""Raw results: JSON lines in a folder, written as they are measured. No mlx here."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ...errors import ConfigError, SpecdecError
from ...utils.data_files import (
    HALVES,
    DataError,
    first_difference,
    json_text,
    parse_json,
    read_text,
)
from ...utils.printable import quoted
from ...utils.validation import Count, Int, check, read_record, table
from .cells import Cell, Unit
from .job import JobRecord

FILE = "raw.jsonl"
FORMAT = 1
_MOST_BYTES = 2 * 10**9
# Figures are not computed for rounds with more draft tokens than this.
_MOST_DRAFTED = 10_000
# Keys of every line, and of a job's. A kind that is made anew is compiled anew.
_LINE, _JOB = table({"kind": str}), table({"pass": Int})

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and versions that a result was measured with."""

    cpu: str
    cores: Count
    memory_gib: float
    backend: str
    device: str
    mlx: str
    mlx_lm: str
    python: str
    specdec: str = ""
    platform: str = ""
    blas: str = ""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process that added results: its command, commit, time and machine."""

    command: str
    commit: str
    date: str
    machine: Machine
    load_average: float | None = None

    @property
    def place(self) -> str:
        """Machine, versions and commit, in a line of a report."""
        m = self.machine
        where = f"{m.cpu}, {m.cores} cores, {m.memory_gib} GiB"
        if m.backend == "metal":
            where += f", {m.platform}"
        if m.backend != "cpu":
            where = f"{m.device} ({m.backend}); {where}"
        if m.blas:
            where += f", {m.blas}"
        versions = f"MLX {m.mlx}, mlx-lm {m.mlx_lm}, Python {m.python}"
        changed = "+changes" * self.commit.endswith("+changes")
        version = f"commit {self.commit[:12]}{changed}"
        if self.commit == "unknown":  # installed
            version = f"specdec {m.specdec}"
        return f"{where}; {versions}; {version}"


@dataclass(frozen=True, kw_only=True)
class PromptsRecord:
    """The prompts of a run: length and category of each, and how many were found."""

    digest: str
    found: Count
    tokens: list[Count]
    categories: list[str | None]


@dataclass(frozen=True)
class Results:
    """The contents of a folder of raw results.

    Args:
        recipe: as :meth:`~specdec.tools.bench.recipe.Recipe.to_dict` wrote it.
        starts: every process that added results.
        passes: the passes of every cell, by their number.
        refused: cells that their system cannot run.
    """

    recipe: dict[str, Any]
    prompts: PromptsRecord
    starts: list[Start] = field(default_factory=list)
    passes: dict[Cell, dict[int, JobRecord]] = field(default_factory=dict)
    refused: set[Cell] = field(default_factory=set)

    def has(self, unit: Unit) -> bool:
        """Whether the results of a unit are there, as far as there can be any."""
        if unit.cell in self.refused:
            return True
        return unit.number in self.passes.get(unit.cell, {})

    def take(self, line: Line) -> None:
        """Add a line that :class:`RawFile` wrote."""
        kind = line["kind"]
        if kind == "start":
            self.starts.append(read_record(Start, line))
            return
        if kind == "profile":
            return  # version 0.2 timed parts of rounds
        if kind not in ("job", "refused"):
            raise DataError(f"its kind is {quoted(kind)}")
        cell = read_record(Cell, line.get("cell"), "cell")
        if kind == "refused":
            self.refused.add(cell)
            return
        record = read_record(JobRecord, check(_JOB, line))
        if not _fits(record):
            raise DataError("its numbers do not fit together")
        self.passes.setdefault(cell, {})[line["pass"]] = record

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a folder's results; a last line that was cut off is left out."""
        file = Path(folder) / FILE
        try:
            text = read_text(file, most=_MOST_BYTES)
        except FileNotFoundError as error:
            if not os.path.isdir(folder):
                raise ConfigError(
                    f"there is no folder {folder}: check the path"
                ) from error
            raise ConfigError(
                f"{folder} holds no results: there is no {FILE} in it"
            ) from error
        except DataError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        results: Self | None = None
        for number, text_line in enumerate(text.split("\n")[:-1], 1):
            try:
                line = check(_LINE, parse_json(text_line))
                if results is None:
                    results = cls._begun_with(line)
                else:
                    results.take(line)
            except DataError as error:
                raise ConfigError(
                    f"{file}:{number}: no line of results of this version ({error}): "
                    "run the recipe again, into another folder"
                ) from error
        if results is None or not results.starts:
            raise ConfigError(
                f"{folder} holds no results: its {FILE} is empty, run the recipe"
            )
        return results

    @classmethod
    def _begun_with(cls, line: Line) -> Self:
        if line["kind"] != "recipe" or line.get("format") != FORMAT:
            raise DataError("it is not the first line of results")
        recipe = check(table({"recipe": table({"name": str})}), line)["recipe"]
        prompts = read_record(PromptsRecord, line.get("prompts"), "prompts")
        if not prompts.tokens or len(prompts.tokens) != len(prompts.categories):
            raise DataError("its lists of prompts differ in length")
        # Version 0.2 had these settings, too.
        for section, key in (("run", "profile_rounds"), ("sweep", "load")):
            if isinstance(recipe.get(section), dict):
                recipe[section].pop(key, None)
        return cls(recipe, prompts)


def _fits(record: JobRecord) -> bool:
    """Whether figures can be computed from the record's numbers."""
    requests = all(r.accepted <= r.drafted for r in record.requests)
    traced = all(
        accepted <= drafted <= k <= _MOST_DRAFTED
        for k, rows in record.traced
        for drafted, accepted in rows
    )
    return record.seconds > 0 and bool(record.requests) and requests and traced


class RawFile:
    """The results of a folder, to which new ones are added.

    Every line is on disk before the next unit begins. If a process was killed while it
    wrote a line, that line is dropped.

    Args:
        folder: the folder. If it does not exist, it is made for the first result.
        recipe: the recipe that the results must belong to.
    """

    def __init__(self, folder: Path, recipe: dict[str, Any]):
        self.path = folder / FILE
        self.results: Results | None = None
        self._recipe = recipe
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _drop_cut_line(self.path)
            for path in missing:  # it can be made, which is all that is known yet
                path.rmdir()
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be used: {error.strerror}: name another folder"
            ) from error
        if self.path.exists() and self.path.stat().st_size:
            self.results = Results.read(folder)
            _check_same(folder, self.results.recipe, recipe)

    def has(self, unit: Unit) -> bool:
        """Whether a unit has already run."""
        return self.results is not None and self.results.has(unit)

    def begin(self, prompts: PromptsRecord, start: dict[str, Any]) -> None:
        """Record the prompts and the start of a process that adds results."""
        if self.results is None:
            self.results = Results(self._recipe, prompts)
            first = {"kind": "recipe", "format": FORMAT, "recipe": self._recipe}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_line(self.path, {**first, "prompts": asdict(prompts)})
        elif self.results.prompts.digest != prompts.digest:
            raise ConfigError(
                f"{self.path.parent} holds results of other prompts: "
                "name another folder with --out"
            )
        self._add({"kind": "start", **start})

    def add(self, unit: Unit, record: JobRecord) -> None:
        """Keep the result of a unit."""
        where = {"kind": "job", "cell": asdict(unit.cell), "pass": unit.number}
        self._add({**where, **asdict(record)})

    def refuse(self, cell: Cell) -> None:
        """Note that a cell's system cannot run it, so that nobody waits for it."""
        assert self.results is not None
        if cell not in self.results.refused:
            self._add({"cell": asdict(cell), "kind": "refused"})

    def _add(self, line: Line) -> None:
        assert self.results is not None
        write_line(self.path, line)
        # Taken as it will be read back, so that a report is the same now and later.
        self.results.take(parse_json(json_text(line)))


def write_line(path: Path, line: Line, *, mode: Literal["a", "w"] = "a") -> None:
    """Write a raw result, or a part of one, as a line, and wait for the disk."""
    try:
        with open(path, mode, encoding="utf-8", errors=HALVES) as file:
            file.write(json_text(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SpecdecError(
            f"{path} cannot be written ({error.strerror}): make room or name "
            "another folder with --out; the same command continues"
        ) from error


def _drop_cut_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _check_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ConfigError if the recipes differ in anything."""
    if difference := first_difference(_flat(there), _flat(here)):
        key, before, now = difference
        raise ConfigError(
            f"{folder} holds results of another recipe ({key} is {quoted(before)} "
            f"there, {quoted(now)} here): name another folder with --out"
        )


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            flat[key] = value
    return flat
