"""``specdec distill``: make a draft for a target, from the target."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..tools.distill.options import Budget, DistillOptions
from . import options
from .interrupts import RequestsToEnd, concluding
from .options import dashed, is_given
from .output import command_line, show, show_interrupted, show_warnings

_field = partial(options.field, DistillOptions)


def _files(name: str, text: str) -> options.Option:
    return options.file(name, help=text, multiple=True)


def _minutes(name: str, text: str) -> options.Option:
    kind = click.FloatRange(min=0, min_open=True)
    return click.option(name, type=kind, metavar="N", help=text)


@click.command(
    cls=options.Command, short_help="Make a draft for a target, from the target."
)
@options.target()
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for the draft. Data and checkpoints are kept in DIR/work. Required, "
    "except with --dry-run.",
)
@_field("kind")
@_field("block_size")
@_field("form")
@_field("layers", metavar="N|I,J,...")
@_field("widen")
@_field("begin_with", metavar="DRAFT")
@_files(
    "--prompts",
    "Prompts for the target to answer and the draft to learn from, as for "
    "`specdec run`; repeat it for more.",
)
@_files("--text", "A text file to learn from as well; repeat it for more.")
@_files(
    "--holdout",
    "Prompts to measure with, as for `specdec run`. The draft never learns from "
    "them. Repeat it for more.",
)
@_minutes("--minutes", "Train for N minutes. [default: 5, without --tokens]")
@options.positive("--tokens", help="Train on N tokens, counting repeated ones again.")
@_minutes(
    "--data-minutes",
    "Let the target write for N minutes, earlier runs included. [default: "
    "twice --minutes]",
)
@_field("data_tokens")
@click.option(
    "--topic",
    "topics",
    type=click.Choice(["questions", "problems", "code"]),
    multiple=True,
    default=("questions", "problems", "code"),
    show_default=True,
    help="What the target writes about; repeat it for more.",
)
@click.option(
    "--data", metavar="DIR", help="Keep the target's texts in DIR, for other runs."
)
@_field("resume", is_flag=True, show_default=False)
@_field("bits")
@_field("layers_only", is_flag=True, show_default=False)
@_field("learning_rate")
@_field("writers", "--batch", "writers")
@_field("block_tokens")
@_field("rounds")
@_field("num_draft_tokens", show_default=True)
@options.dtype(help="Compute in this type. [default: bfloat16; on a CPU float32]")
@options.trust_remote_code()
@options.seed("Seed of texts, of their order and of weights that begin at random.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print sizes, memory and the estimated time; train nothing.",
)
@options.quiet()
def distill(
    *,
    out: str | None,
    data: str | None,
    minutes: float | None,
    tokens: int | None,
    text: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    **same_names: Any,
) -> None:
    """Make a draft for a target: some of its layers, trained to agree with it.

    The target makes up user turns and answers them; no other text is needed. The draft
    has the target's embedding and head, and learns its distribution. A run that was
    stopped continues with --resume.

    \b
      specdec distill --target MODEL --out my-draft --minutes 5
      specdec run --target MODEL --draft my-draft --prompt "What is MLX?"
    """  # noqa: D301 - click's mark for lines to keep
    for name, value in (("out", out), ("data", data)):
        if value is not None and not value.strip():
            raise click.UsageError(f"{dashed(name)} is empty: name one")
    if minutes is not None and tokens is not None:
        raise click.UsageError(
            "--minutes and --tokens exclude each other: leave one of them out"
        )
    for name in ("rounds", "num_draft_tokens"):
        if is_given(name) and not same_names["holdout"]:
            needs = "needs --holdout: name prompts to decode"
            raise click.UsageError(f"{dashed(name)} {needs}")
    for name in ("block_size", "form"):
        if is_given(name) and same_names["kind"] != "block":
            raise click.UsageError(f"{dashed(name)} needs --kind block")
    for name in ("kind", "block_size", "form", "layers", "widen"):
        if is_given(name) and same_names["begin_with"] is not None:
            raise click.UsageError(
                f"{dashed(name)} comes from the draft of --begin-with: leave it out"
            )
    if out is None and not dry_run:
        raise click.UsageError("--out is missing: name a folder for the draft")
    folder = None if out is None else Path(out).expanduser()
    if folder is not None and os.path.isfile(folder):
        raise click.UsageError(f"--out {folder} is a file: name a folder")
    show_warnings()
    from ..tools.distill.job import Distillation
    from ..tools.distill.plan import check_target, describe

    if minutes is None and tokens is None:
        minutes = 5.0
    wanted = DistillOptions(
        out=folder,
        budget=Budget(minutes, tokens),
        texts=text,
        data=None if data is None else Path(data).expanduser(),
        command=command_line(),
        **same_names,
    )

    def say(line: str) -> None:
        if not quiet:
            show(line, err=True)

    if dry_run:
        for line in describe(wanted):
            show(line)
        return
    check_target(wanted)
    requests = RequestsToEnd()
    job = Distillation(wanted, say, requests.check)

    def conclude() -> None:
        state = "nothing was complete yet"
        if wanted.work.is_dir():
            state = (
                f"what was done is kept in {wanted.work}; the same command with "
                "--resume continues"
            )
        show_interrupted(state)

    with requests, concluding(conclude):
        job.run()
