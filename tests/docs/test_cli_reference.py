"""docs/cli.md is what the commands say: all of them, at any width."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from specdec.cli import main as cli

from .scripts import load_script

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
