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


def test_every_kind_of_option() -> None:
    @click.command("paint")
    @click.argument("wall", metavar="WALL")
    @click.option("--colour", type=click.Choice(["red", "blue"]), required=True)
    @click.option("--coats", "-c", type=click.IntRange(1, 3), default=2, metavar="N")
    @click.option("--edge", nargs=2, type=int, help="From a|b, to [c].")
    @click.option("--size", multiple=True, default=(1, 8), show_default=True, type=int)
    @click.option("--wet", is_flag=True, help="As --colour, wet. [default: dry]")
    @click.option(
        "--part",
        type=click.FloatRange(0, min_open=True),
        default=0.5,
        show_default="half",
        help="Of the wall.",
    )
    def paint(**_: object) -> None:
        """Paint a wall.

        It takes
        a while.

        \b
          paint --colour red north
        \f
        Not shown.
        """  # noqa: D301 - click's marks

    made = script.section("paint", paint, click.Context(paint))
    assert made == (
        "## paint\n\n"
        "    paint [OPTIONS] WALL\n\n"
        "Paint a wall.\n\n"
        "It takes a while.\n\n"
        "```sh\npaint --colour red north\n```\n\n"
        "| option | |\n|---|---|\n"
        r"| `--colour red\|blue` | (required) |" + "\n"
        "| `-c N`, `--coats N` | (1 to 3) |\n"
        r"| `--edge INTEGER INTEGER` | From a\|b, to \[c\]. |" + "\n"
        "| `--size INTEGER` | (default: 1, 8) |\n"
        "| `--wet` | As `--colour`, wet. (default: dry) |\n"
        "| `--part FLOAT` | Of the wall. (above 0; default: half) |\n"
    )


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
