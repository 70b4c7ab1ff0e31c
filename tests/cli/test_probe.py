"""``specdec probe`` prints one block to paste, whatever the machine has."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.backend import _DEFAULTS
from specdec.models import metal_kernels
from specdec.models.metal_kernels import Trial
from specdec.utils.child import Child
from tests.models.folders import write_folder

from .conftest import Specdec

NAME, OTHER = "4 bits by 32, float32, 64 x 32", "gated delta, tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "model"
    write_folder(path, bits=4)
    return path


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """What a machine answers; empty: this one is asked."""
    results: list[Trial] = []

    def of(self: Any, subjects: Any) -> Iterator[Trial]:
        yield from results

    monkeypatch.setattr(metal_kernels.Trials, "of", of)
    return results


def test_a_machine_without_metal(
    folder: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It times MLX's products; a CPU must not look for Metal kernels."""
    right = metal_kernels.subjects_of
    monkeypatch.setattr(
        metal_kernels, "subjects_of", lambda *a, **k: right(*a, **k, rows=(1, 2))
    )
    result = specdec("probe", "--target", str(folder), "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    begin, *lines, end = result.stdout.splitlines()
    assert (begin, end) == ("```", "```")
    assert "there are no kernels for this command to try" in lines[-1]
    header = next(line for line in lines if line.startswith("matrix"))
    assert header.split() == ["matrix", "layers", "by", "ms", "2"]
    assert any(line.startswith("4 bits by 32, float32, ") for line in lines)
    assert lines[-2].startswith("all ")


def test_a_machine_with_metal(
    folder: Path, specdec: Specdec, trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.backend.defaults", lambda: _DEFAULTS["metal"])
    monkeypatch.setattr(metal_kernels, "subjects_of", lambda *a, **k: [])
    mlx = {1: 0.2, 2: 0.2, 9: 0.8}
    ours = {2: 0.3, 9: 0.4}
    trials += [
        Trial(NAME, 4, mlx, ours, used=tuple(range(9, 17))),
        Trial(OTHER, 2, mlx, fault="it takes longer than 240 seconds"),
    ]
    result = specdec("probe", "--target", str(folder), "--quiet")
    assert result.exit_code == 0
    rows = [line.split("  ") for line in result.stdout.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in rows]
    assert [NAME, "x4", "MLX", "0.200", "1.00", "4.00"] in cells
    assert ["ours", "1.50", "2.00"] in cells
    assert ["all", "x6", "MLX", "1.200", "1.00", "4.00"] in cells
    assert [f"{NAME}: used for 9 to 16 rows"] in cells
    assert [f"{OTHER}: it takes longer than 240 seconds"] in cells
    assert "Times from your machine" in result.stdout.splitlines()[-1]


def test_json(folder: Path, specdec: Specdec, trials: list[Trial]) -> None:
    trials.append(Trial(NAME, 4, {1: 0.2}))
    result = specdec("probe", "--target", str(folder), "--quiet", "--json")
    record: Any = json.loads(result.stdout)
    assert record["trials"][0]["name"] == NAME
    assert record["trials"][0]["mlx"] == {"1": 0.2}
    assert record["machine"]["mlx"]


def test_nothing_could_be_timed(
    folder: Path, specdec: Specdec, trials: list[Trial]
) -> None:
    """The block says why, and scripts see that it failed."""
    for name, names in ((NAME, NAME), (OTHER, f"{NAME}; {OTHER}")):
        trials.append(Trial(name, 4, fault="its process ended (-11)"))
        result = specdec("probe", "--target", str(folder), "--quiet")
        assert (result.exit_code, result.stderr) == (1, "")
        assert f"\n{names}: its process ended (-11)\n" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_was_timed(
    folder: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Minutes of timing would be lost, or a sum of some layers be that of all."""

    def of(self: Any, subjects: Any) -> Iterator[Trial]:
        yield Trial(OTHER, 2, {1: 0.3})
        yield (trial := Trial(NAME, 4))
        trial.mlx[1] = 0.2
        signal.raise_signal(number)

    monkeypatch.setattr(metal_kernels.Trials, "of", of)
    result = specdec("probe", "--target", str(folder), "--quiet")
    assert (result.exit_code, result.stderr) == (130, "specdec: interrupted\n")
    assert result.stdout.startswith("```\n")
    assert result.stdout.endswith("```\n")
    assert "0.200" in result.stdout
    assert "\nall " not in result.stdout
    assert re.search(r"\ntimed 2 of \d+ measurements; interrupted\n", result.stdout)


def test_the_time_is_up(
    folder: Path, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose child never answers ends in time, and says why."""
    ask = Child.ask

    def hang(self: Any, *request: Any) -> Any:
        os.kill(self._process.pid, signal.SIGSTOP)
        return ask(self, *request)

    monkeypatch.setattr(Child, "ask", hang)
    result = specdec("probe", "--target", str(folder), "--quiet", "--seconds", "3")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "timed 0 of " in result.stdout
    assert "the time of 3 seconds was up" in result.stdout
