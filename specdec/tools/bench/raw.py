"""Raw results: JSON lines in a folder, kept as they come. No mlx here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...errors import ConfigError
from .cells import Cell, Unit
from .waves import Record

FILE = "raw.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class Results:
    """What a folder of raw results holds.

    Args:
        recipe: as :meth:`~specdec.tools.bench.recipe.Recipe.to_dict` wrote it.
        prompts: ``digest``, ``tokens`` and ``categories`` of every prompt, ``found``.
        starts: ``command``, ``commit``, ``date`` and ``machine`` of every process
            that added results.
        passes: of every cell, by their number.
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
            text = file.read_text("utf-8")
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder} holds no results: there is no {FILE} in it"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        results: Self | None = None
        for number, text_line in enumerate(text.split("\n")[:-1], 1):
            try:
                line = json.loads(text_line)
                if results is None:
                    if line["kind"] != "recipe" or line["format"] != FORMAT:
                        raise KeyError("format")
                    results = cls(line["recipe"], line["prompts"])
                else:
                    results.take(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{file}:{number}: no line of results of this version"
                ) from error
        if results is None:
            raise ConfigError(
                f"{folder} holds no results: its {FILE} is empty, run the recipe"
            )
        return results


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

    def add_profile(self, unit: Unit, rounds: Iterable[Record]) -> None:
        """Keep a cell's rounds, taken apart."""
        cell = unit.cell.to_dict()
        self._add({"kind": "profile", "cell": cell, "rounds": list(rounds)})

    def _add(self, line: Record) -> None:
        assert self.results is not None
        self._write(line)
        # As it will be read, so that a report does not depend on when it is made.
        self.results.take(json.loads(json.dumps(line)))

    def _write(self, line: Record) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
                f"{before.get(key)!r} there, {now.get(key)!r} here): name another "
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
