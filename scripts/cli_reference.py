#!/usr/bin/env python3
"""Write docs/cli.md from the commands themselves.

Usage: scripts/cli_reference.py [--check]

With --check nothing is written, and the exit code is 1 if the page differs from the
commands. The page does not depend on the terminal's width: it is made from click's
names, types and texts, not from click's formatted help.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.cli import main as cli  # noqa: E402
from specdec.cli.options import grouped  # noqa: E402

PAGE = ROOT / "docs" / "cli.md"

INTRO = """\
# Command line

<!-- Written by scripts/cli_reference.py: change the commands, not this page. -->

Text goes to standard output; progress, notes and errors to standard error. An error
is one line, `specdec: error: ...`. Exit codes: 0 when all went well, 1 for a failure, 2
for wrong usage (including a file of prompts that is missing, empty or malformed), 130
when interrupted. `-h` or `--help` after a command shows its part of this page;
`specdec --version` or `-V` prints the version.
"""


def commands(
    command: click.Command, path: str
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield (full name, command, context) of a command and of all commands below it.

    Groups are included, except for the program itself.
    """
    context = click.Context(command, info_name=path)
    if path != cli.name:
        yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{path} {name}")


def page() -> str:
    """The whole page."""
    found = list(commands(cli, cli.name or ""))
    rows = [
        (f"[`{path}`](#{path.replace(' ', '-')})", prose(one.get_short_help_str(999)))
        for path, one, _ in found
    ]
    parts = [INTRO, table(("command", ""), rows)]
    parts += [section(*each) for each in found]
    return "\n".join(parts)


def section(path: str, command: click.Command, context: click.Context) -> str:
    """One command: usage, text, arguments and options."""
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}\n", f"    {usage}\n", body(command.help or "")]
    groups = grouped(command, context)
    for title, some in groups.items():
        # The introduction documents ``--help``.
        rows = [(names(o), meaning(o)) for o in some if o in command.params]
        if rows:
            head = title.lower() if len(groups) > 1 else "option"
            parts.append(table((head, ""), rows))
    return "\n".join(parts)


def body(text: str) -> str:
    """A command's text as Markdown; blocks that click does not wrap become code."""
    parts = []
    for block in inspect.cleandoc(text).split("\n\n"):
        if block.startswith("\b"):
            lines = [line.strip() for line in block.splitlines()[1:]]
            parts.append("\n".join(["```sh", *lines, "```"]))
        else:
            parts.append(prose(" ".join(block.split())))
    return "\n\n".join(parts) + "\n"


def names(option: click.Option) -> str:
    """The option as it is typed: ``--target``, ``--model MODEL``."""
    value = ""
    if not option.is_flag and not option.count:
        value = f" {option.metavar or metavar(option.type)}"
    typed = [*option.opts, *option.secondary_opts]
    short_first = sorted(typed, key=lambda name: name.startswith("--"))
    return ", ".join(cell(f"`{name}{value}`") for name in short_first)


def metavar(kind: Any) -> str:
    """The placeholder of a value whose option names none."""
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    return str(kind.name).upper().removesuffix(" RANGE")


def meaning(option: click.Option) -> str:
    """The help text, then whether the option is required, its bounds and default."""
    text, _, default = (option.help or "").partition(" [default: ")
    default = default.removesuffix("]")
    if isinstance(option.show_default, str):
        default = option.show_default
    elif option.show_default:
        value: Any = option.default
        several = isinstance(value, tuple | list)
        default = ", ".join(map(str, value)) if several else str(value)
    notes = []
    if option.required:
        notes.append("required")
    if isinstance(option.type, click.IntRange | click.FloatRange):
        notes.append(bounds(option.type))
    if default:
        notes.append(f"default: {default}")
    note = "; ".join(filter(None, notes))
    return prose(f"{text} ({note})" if note else text).lstrip()


def bounds(kind: click.IntRange | click.FloatRange) -> str:
    """The range of a number in words: ``at least 1``, ``0 to 1``."""
    low, high = kind.min, kind.max
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"above {low:g}" if kind.min_open else f"at least {low:g}"


def prose(text: str) -> str:
    """The text as Markdown, with marks escaped and options as code."""
    text = re.sub(r"([\\*<\[\]|])", r"\\\1", text)
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*[a-z])", r"`\1`", text)


def cell(text: str) -> str:
    """Code with escaped bars, since a bar would end the table's cell."""
    return text.replace("|", "\\|")


def table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    """A Markdown table of two columns."""
    lines = [f"| {header[0]} | {header[1]} |".replace("  ", " "), "|---|---|"]
    return "\n".join([*lines, *(f"| {a} | {b} |" for a, b in rows)]) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the page; return exit code 1 if ``--check`` finds a difference."""
    made = page()
    if "--check" not in arguments:
        PAGE.write_text(made, "utf-8")
    elif made != PAGE.read_text("utf-8"):
        print("error: docs/cli.md: run scripts/cli_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
