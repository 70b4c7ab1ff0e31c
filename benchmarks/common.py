"""Code that all scripts here share: one-line errors, reports, raw results, times."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

from specdec.engine import profiler
from specdec.errors import ConfigError, SpecdecError
from specdec.model_names import short
from specdec.tools.bench.machine import origin
from specdec.tools.bench.raw import Start, write_line
from specdec.tools.decoding import WARM_UP
from specdec.utils.files import replace_file
from specdec.utils.validation import read_record

MIB = 2**20


class Script(click.Command):
    """A command whose errors are one line: ``error: ...``, and exit code 1 or 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            # SystemExit, since a click error would print the usage, too.
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


def command_line() -> str:
    """The command, with absolute paths cut to their last part."""
    words = map(short, sys.argv[1:])
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])


def header_of(title: str) -> dict[str, Any]:
    """The head of a raw result: the title, command, commit, time and machine."""
    return {"title": title, **origin(command_line())}


def report_of(raw: Mapping[str, Any], body: str) -> str:
    """A report in Markdown: title, command, machine and date, then ``body``."""
    start = read_record(Start, raw)
    return (
        f"# {raw['title']}\n\n    {start.command}\n\n"
        f"{start.place}, {start.date}.\n\n{body}"
    )


def write_report(out: str | None, raw: dict[str, Any], body: str) -> None:
    """Print ``body``; write OUT.json and OUT.md when ``out`` is given.

    Args:
        raw: raw numbers, after the head from :func:`header_of`.
        body: the results as Markdown.
    """
    text = report_of(raw, body)
    print(text)
    if out is None:
        return
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    # Not with_suffix(), since a name may contain a dot, as in "qwen2.5".
    replace_file(Path(f"{out}.md"), text.encode())
    write_line(Path(f"{out}.json"), raw, mode="w")


def pipelined(run: Callable[[], Any], repeat: int) -> float:
    """Median seconds of a run, when each is built while the previous one runs."""
    for _ in range(WARM_UP):
        mx.eval(run())
    return statistics.median(profiler.pipelined(run, repeat))
