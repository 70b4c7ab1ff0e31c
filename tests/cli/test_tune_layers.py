"""``specdec tune-layers`` on a small random model, and what it prints, used."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specdec import backend
from specdec.cli import main
from specdec.tools.tuning import Agreement
from tests.models.folders import write_folder

PROMPTS = "Name a river in France.\nWhat is 6 times 7?\n"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_folder(tmp_path / "m", num_hidden_layers=4)
    (tmp_path / "prompts.txt").write_text(PROMPTS, "utf-8")
    return str(tmp_path / "m")


def invoke(command: str, folder: str, *arguments: str) -> Result:
    prompts = str(Path(folder).with_name("prompts.txt"))
    common = (command, "--target", folder, "--prompts", prompts)
    return CliRunner().invoke(main, [*common, "--ignore-chat-template", *arguments])


def test_what_is_found_serves_as_a_draft(folder: str) -> None:
    result = invoke("tune-layers", folder, "-m", "8", "--layers", "3")
    assert result.exit_code == 0, result.output
    # First every layer alone, then exchanges: there are no more sets of three.
    assert "trying up to 24 sets of layers on " in result.stderr
    head, names, *rows, last = result.stdout.splitlines()
    assert head.startswith("agreement with ")
    assert names.split() == ["layers", "agreement", "k", "speed-up", "draft"]
    (best,) = [row.split() for row in rows if row.endswith("<- best")]
    assert best[0] == "3"
    draft = best[4]
    assert draft.startswith("layers:")
    faster = float(best[3]) > 1
    assert last.startswith(f"use: --draft {draft} " if faster else "none of them")

    options = ("-m", "12", "--dtype", "float32")
    plain = invoke("run", folder, *options)
    drafting = ("--draft", f"ngram+{draft}", "--num-draft-tokens", "3")
    drafted = invoke("run", folder, *options, *drafting)
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert f"ngram+{draft}, 3 tokens a round" in drafted.stderr


@pytest.mark.parametrize("sets", [0, 5])
def test_ctrl_c_keeps_what_was_found(
    folder: str, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour of searching, lost."""
    calls = itertools.count()

    def agreement(self: Agreement, layers: tuple[int, ...]) -> float:
        if next(calls) == sets:
            raise KeyboardInterrupt
        return 1 - 0.1 * (4 - len(layers)) - 0.01 * (0 not in layers)

    monkeypatch.setattr(Agreement, "__call__", agreement)
    result = invoke("tune-layers", folder, "-m", "4", "--max-evaluations", "20")
    assert result.exit_code == 130
    told = f"specdec: interrupted: {sets} sets were tried"
    assert result.stderr.splitlines()[-1] == told + ": the best of them" * (sets > 0)
    assert ("layers:0," in result.stdout) == (sets > 0)


def test_progress_tells_what_is_done_and_the_time_left(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.cli.progress.LINE_SECONDS", 0)
    result = invoke("tune-layers", folder, "-m", "4", "--max-evaluations", "6")
    lines = result.stderr.splitlines()
    assert lines[0] == "specdec: answering, 0 of 2 prompts"
    assert "specdec: 1 of 6 sets, about " in result.stderr
    on_cpu = backend.defaults().name == "cpu"
    assert ("specdec advise tells" in lines[-1]) == on_cpu


def test_what_cannot_be(folder: str) -> None:
    result = invoke("tune-layers", folder, "--layers", "4")
    assert result.exit_code == 2
    assert "--layers is 4: the target has 4, keep fewer" in result.stderr
    result = invoke("run", folder, "--draft", "layers:0,9")
    assert result.exit_code == 2
    assert "has 4 layers, 0 to 3: there is no layer 9" in result.stderr
