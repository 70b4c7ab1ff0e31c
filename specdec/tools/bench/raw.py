"""Raw results: JSON lines in a folder, kept as they come. No mlx here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ...errors import ConfigError, SpecdecError
from ...utils.data_files import (
    HALVES,
    DataError,
    Shape,
    check_shape,
    json_text,
    parse_json,
    read_text,
)
from ...utils.printable import quoted
from .cells import Cell, Unit
from .waves import Record

FILE = "raw.jsonl"
FORMAT = 1
_MOST_BYTES = 2 * 10**9

# What is read of a line; each may have more.
_RECIPE = {
    "recipe": {"name": str},
    "prompts": {
        "digest": str,
        "found": int,
        "tokens": [int],
        "categories": [(str, None)],
    },
}
_MACHINE = {
    **dict.fromkeys(("backend", "cpu", "device", "mlx", "mlx_lm", "python"), str),
    "cores": int,
    "memory_gib": float,
}
_CELL = {
    **dict.fromkeys(("batch", "context", "kv_bits"), int),
    "num_draft_tokens": (int, str),
    "load?": float,
    "temperature": float,
    "prefix_cache": bool,
    "system": str,
    "draft": (str, None),
}
_WAVE = {
    "rows": int,
    "decode_seconds": float,
    "decode_tokens": int,
    "first_tokens": [float],
    "requests": [[int, int, int, int]],
    "step_ms": [float],
    "step_rows": [int],
    "rounds?": [[int, [[int, int]]]],
}
# Of a job; times are seconds since it began.
_REQUEST = {
    **dict.fromkeys(("prompt_tokens", "tokens", "rounds", "drafted", "accepted"), int),
    **dict.fromkeys(("arrived", "first", "ended"), float),
    "digest": str,
}
_ROUNDS = {
    **dict.fromkeys(("k", "near_join", "number"), int),
    **dict.fromkeys(("p10", "p50", "p90", "mean"), float),
}
# Most draft tokens of a round that figures are computed for.
_MOST_DRAFTED = 10_000
_PART = [float, float]
_LINES: dict[str, Shape] = {
    "start": {
        **dict.fromkeys(("command", "commit", "date"), str),
        "machine": _MACHINE,
        "load_average?": (float, None),
    },
    "pass": {
        "cell": _CELL,
        "pass": int,
        "peak_memory_bytes": int,
        "memory_before_bytes": int,
        "waves": [_WAVE],
    },
    "job": {
        "cell": _CELL,
        "pass": int,
        **dict.fromkeys(("peak_memory_bytes", "memory_before_bytes"), int),
        "seconds": float,
        "requests": [_REQUEST],
        "rounds": [_ROUNDS],
        "phases": {"calibration": float, "prefill": float, "decode": float},
    },
    "profile": {
        "cell": _CELL,
        "rounds": [
            {"total": float, "draft?": _PART, "verify?": _PART, "sampling?": _PART}
        ],
    },
}


@dataclass(frozen=True)
class Results:
    """What a folder of raw results holds.

    Args:
        recipe: as :meth:`~specdec.tools.bench.recipe.Recipe.to_dict` wrote it.
        prompts: ``digest``, ``tokens`` and ``categories`` of every prompt, ``found``.
        starts: ``command``, ``commit``, ``date`` and ``machine`` of every process
            that added results.
        passes: of every cell, by their number; of a recipe of jobs, its jobs.
        profiles: rounds taken apart, of every cell.
    """

    recipe: Record
    prompts: Record
    starts: list[Record] = field(default_factory=list)
    passes: dict[Cell, dict[int, Record]] = field(default_factory=dict)
    profiles: dict[Cell, list[Record]] = field(default_factory=dict)

    def has(self, unit: Unit) -> bool:
        """Whether a unit is there."""
        if unit.number is None:
            return unit.cell in self.profiles
        return unit.number in self.passes.get(unit.cell, {})

    def take(self, line: Record) -> None:
        """Take in a line that :class:`RawFile` wrote."""
        if line["kind"] == "start":
            self.starts.append(line)
            return
        cell = Cell.of(line["cell"])
        if line["kind"] == "profile":
            self.profiles[cell] = line["rounds"]
        else:
            self.passes.setdefault(cell, {})[line["pass"]] = line

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a folder; a last line that was cut off is left out.

        Raises:
            ConfigError: there are no results in it, or a line is not one of theirs.
        """
        file = Path(folder) / FILE
        try:
            text = read_text(file, most=_MOST_BYTES)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder} holds no results: there is no {FILE} in it"
            ) from error
        except DataError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        results: Self | None = None
        for number, text_line in enumerate(text.split("\n")[:-1], 1):
            try:
                line = check_shape(parse_json(text_line), {"kind": str})
                if results is None:
                    results = cls._begun_with(line)
                else:
                    _check_line(line, results.prompts)
                    results.take(line)
            except (DataError, TypeError) as error:  # a cell of other fields
                raise ConfigError(
                    f"{file}:{number}: no line of results of this version ({error})"
                ) from error
        if results is None or not results.starts:
            raise ConfigError(
                f"{folder} holds no results: its {FILE} is empty, run the recipe"
            )
        return results

    @classmethod
    def _begun_with(cls, line: Record) -> Self:
        if line["kind"] != "recipe" or line.get("format") != FORMAT:
            raise DataError("it is not the first line of results")
        check_shape(line, _RECIPE)
        prompts = line["prompts"]
        if not prompts["tokens"] or len(prompts["tokens"]) != len(
            prompts["categories"]
        ):
            raise DataError("prompts are not of one number")
        return cls(line["recipe"], prompts)


class RawFile:
    """The results of a folder, and where new ones are added.

    Every line is on disk before the next unit begins; a line that was cut off when a
    process was killed is dropped.

    Args:
        folder: made if it is not there.
        recipe: what the results must belong to.

    Raises:
        ConfigError: the folder holds results of another recipe, or cannot be used.
    """

    def __init__(self, folder: Path, recipe: Record):
        self.path = folder / FILE
        self.results: Results | None = None
        self._recipe = recipe
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _drop_cut_line(self.path)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error.strerror}") from error
        if self.path.exists() and self.path.stat().st_size:
            self.results = Results.read(folder)
            _check_same(folder, self.results.recipe, recipe)

    def has(self, unit: Unit) -> bool:
        """Whether a unit was run already."""
        return self.results is not None and self.results.has(unit)

    def begin(self, prompts: Record, start: Record) -> None:
        """Note the prompts, and that a process begins to add results.

        Raises:
            ConfigError: the results there are of other prompts.
        """
        if self.results is None:
            self.results = Results(self._recipe, prompts)
            first = {"kind": "recipe", "format": FORMAT}
            self._write({**first, "recipe": self._recipe, "prompts": prompts})
        elif self.results.prompts["digest"] != prompts["digest"]:
            raise ConfigError(
                f"{self.path.parent} holds results of other prompts: "
                "name another folder with --out"
            )
        self._add({"kind": "start", **start})

    def add_pass(self, unit: Unit, record: Mapping[str, Any]) -> None:
        """Keep one pass of a cell."""
        cell = unit.cell.to_dict()
        self._add({"kind": "pass", "cell": cell, "pass": unit.number, **record})

    def add_job(self, unit: Unit, record: Mapping[str, Any]) -> None:
        """Keep one job of a cell."""
        cell = unit.cell.to_dict()
        self._add({"kind": "job", "cell": cell, "pass": unit.number, **record})

    def add_profile(self, unit: Unit, rounds: Iterable[Record]) -> None:
        """Keep a cell's rounds, taken apart."""
        cell = unit.cell.to_dict()
        self._add({"kind": "profile", "cell": cell, "rounds": list(rounds)})

    def _add(self, line: Record) -> None:
        assert self.results is not None
        self._write(line)
        # As it will be read, so that a report does not depend on when it is made.
        self.results.take(parse_json(json_text(line)))

    def _write(self, line: Record) -> None:
        write_line(self.path, line)


def write_line(path: Path, line: Record, *, mode: Literal["a", "w"] = "a") -> None:
    """Write a raw result, or a part of one, as a line that is on the disk after it.

    Raises:
        SpecdecError: it cannot be written.
    """
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


def _check_line(line: Record, prompts: Record) -> None:
    """Refuse a line that figures cannot be computed from.

    Raises:
        DataError: its fields are not what they were written as, or do not fit together.
    """
    if line["kind"] not in _LINES:
        raise DataError(f"its kind is {quoted(line['kind'])}")
    check_shape(line, _LINES[line["kind"]])
    if line["kind"] == "pass":
        waves = line["waves"]
        fits = line["pass"] >= 0 and all(map(_is_wave, waves))
        if not fits or sum(w["rows"] for w in waves) != len(prompts["tokens"]):
            raise DataError("its numbers do not fit together")
    elif line["kind"] == "job":
        if line["seconds"] <= 0 or not line["requests"]:
            raise DataError("its numbers do not fit together")
    elif line["kind"] == "profile":
        for each in line["rounds"]:
            if each["total"] <= 0 or sum(each.get("verify", (1,))) <= 0:
                raise DataError("its numbers do not fit together")


def _is_wave(wave: Record) -> bool:
    rows = wave["rows"]
    return (
        rows > 0
        and wave["decode_seconds"] >= 0
        and len(wave["requests"]) == len(wave["first_tokens"]) == rows
        and len(wave["step_ms"]) == len(wave["step_rows"])
        and all(min(each) >= 0 for each in wave["requests"])
        and all(
            0 <= accepted <= drafted <= k <= _MOST_DRAFTED
            for k, round_rows in wave.get("rounds", ())
            for drafted, accepted in round_rows
        )
    )


def _drop_cut_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _check_same(folder: Path, there: Record, here: Record) -> None:
    """Refuse results of a recipe that differs in anything."""
    before, now = _flat(there), _flat(here)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{folder} holds results of another recipe ({key} is "
                f"{quoted(before.get(key))} there, {quoted(now.get(key))} here): name "
                "another "
                "folder with --out"
            )


def _flat(recipe: Record) -> Record:
    flat: Record = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            flat[key] = value
    return flat
