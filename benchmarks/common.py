"""What every benchmark shares: machine, models, order of runs, spread, reports."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from specdec.errors import ConfigError, PromptError, SpecdecError
from specdec.model_names import short
from specdec.prompts import encode_all, read_prompts
from specdec.tools.bench.machine import commit, machine, place
from specdec.tools.bench.tables import interleaved
from specdec.tools.bench.waves import Record, TracedRound

MIB = 2**20

T = TypeVar("T")


class Script(click.Command):
    """A command whose errors are one line: ``error: ...``, and exit code 1 or 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            # SystemExit, not a click error: that one would bring the usage along.
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


def command_line() -> str:
    """The command, with absolute paths cut to their last part."""
    words = map(short, sys.argv[1:])
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])


def encode_prompts(
    tokenizer: Any, path: str, number: int, *, ignore_chat_template: bool = False
) -> list[list[int]]:
    """The first ``number`` prompts of a file, as token ids."""
    prompts = read_prompts(path)[:number]
    if len(prompts) < number:
        raise PromptError(
            f"{path} has {len(prompts)} prompts, {number} were asked for: "
            f"choose --num-prompts {len(prompts)} or less"
        )
    encoded = encode_all(tokenizer, prompts, ignore_chat_template=ignore_chat_template)
    return [list(e.token_ids) for e in encoded]


# -- passes ----------------------------------------------------------------

minutes_option = click.option(
    "--minutes",
    type=float,
    help="After the second pass, begin none when this time is up; then report.",
)


def in_time(
    systems: Mapping[str, Callable[[], T]], passes: int, minutes: float | None
) -> Iterator[tuple[int, str, T]]:
    """As :func:`interleaved`, in whole passes: two, and more while there is time."""
    begun = time.monotonic()
    for done, item in enumerate(interleaved(systems, passes), 1):
        yield item
        late = minutes is not None and time.monotonic() - begun >= 60 * minutes
        if late and not done % len(systems) and done >= 2 * len(systems):
            return


# -- reports ---------------------------------------------------------------


def without_rows(record: Record) -> Record:
    """A pass whose rounds are summed over their rows, as every table reads them.

    Of 32 rows that is a twentieth of the raw result.
    """

    def summed(rounds: Sequence[TracedRound]) -> list[list[object]]:
        return [
            [k, [[sum(drafted for drafted, _ in rows), sum(n for _, n in rows)]]]
            for k, rows in rounds
        ]

    waves = [{**w, "rounds": summed(w.get("rounds", ()))} for w in record["waves"]]
    return {**record, "waves": waves}


def header_of(title: str) -> dict[str, Any]:
    """The head of a raw result: what was run, where, when."""
    return {
        "title": title,
        "command": command_line(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
    }


def report_of(raw: Mapping[str, Any], body: str) -> str:
    """A report in Markdown: what was run, where, when, and what it came to."""
    return (
        f"# {raw['title']}\n\n"
        f"    {raw['command']}\n\n"
        f"{place(raw['machine'], raw['commit'])}, {raw['date']}.\n\n{body}"
    )


def write_report(out: str | None, raw: dict[str, Any], body: str) -> None:
    """Print ``body``; write OUT.json and OUT.md when ``out`` is given.

    Args:
        raw: begins with :func:`header_of`.
        body: Markdown, what the raw numbers come to.
    """
    text = report_of(raw, body)
    print(text)
    if out is None:
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Appended, not with_suffix(): a name may hold a dot, as in "qwen2.5".
    Path(f"{path}.md").write_text(text, "utf-8")
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":"))
    Path(f"{path}.json").write_text(text + "\n", "utf-8")
