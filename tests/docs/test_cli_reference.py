"""docs/cli.md is what the commands say: all of them, at any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from specdec.cli import main as cli

from .scripts import ROOT, load_script

script = load_script("cli_reference")


def test_the_page_is_what_the_commands_say(capsys: pytest.CaptureFixture[str]) -> None:
    """An option was added, or its text changed, and the page was forgotten."""
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


def test_nothing_is_left_out() -> None:
    parts = script.page().split("\n## ")[1:]
    sections = {part.partition("\n")[0]: part for part in parts}
    found = dict(commands(cli, "specdec"))
    del found["specdec"]
    assert sections.keys() == found.keys()
    for path, command in found.items():
        for option in command.params:
            for name in option.opts if isinstance(option, click.Option) else ():
                assert f"`{name}" in sections[path], f"{path} {name}"


def test_the_width_of_the_terminal_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = script.page()
    monkeypatch.setenv("COLUMNS", "20")
    assert script.page() == before


def test_a_stale_page_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "cli.md"
    page.write_text("# Of old\n", "utf-8")
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("run scripts/cli_reference.py")
    assert page.read_text("utf-8") == "# Of old\n"
    assert script.main([]) == 0
    assert page.read_bytes() == (ROOT / "docs" / "cli.md").read_bytes()
    assert script.main(["--check"]) == 0
    assert script.main(["--wrong"]) == 2
