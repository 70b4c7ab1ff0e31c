"""The command line. Only click is imported here: ``--help`` answers at once."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import click

from ..backend import versions
from ..errors import ConfigError, PromptFileError
from ..parallel import launched_rank
from ..utils.ctrl_c import INTERRUPTED
from .advise import advise
from .bench import bench
from .bench import report as report_command
from .cache import cache
from .chat import chat
from .convert import convert
from .demo import demo
from .distill import distill
from .estimate import estimate
from .interrupts import Interrupts
from .options import with_options
from .output import (
    flush_output,
    open_streams,
    report,
    show_interrupted,
    silence_third_parties,
)
from .probe import probe
from .ranks import follow
from .run import run
from .serve import serve
from .verify import verify

__all__ = ["main"]


class _Group(click.Group):
    """A command group that shows every error as one line.

    Its commands are listed in the order in which they were added.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        params = [] if command is None else command.params
        if launched_rank() is not None and not any(
            param.name == "tensor_parallel" for param in params
        ):
            raise click.UsageError(
                f"specdec {name} runs on one device: start it without mlx.launch"
            )
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if error.ctx is None and command is not None:
                # If an option lacks its value, click does not name the command.
                error.ctx = click.Context(command, ctx, ctx.invoked_subcommand)
            raise
        except KeyboardInterrupt:
            raise click.Abort from None  # click itself would print an empty line, too
        except PromptFileError:
            raise  # its words are the user's, not names of fields
        except ConfigError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is None:
                raise
            raise with_options(error, command) from error

    def main(self, *args: Any, **extra: Any) -> Any:
        click_main: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return click_main(*args, standalone_mode=False, **extra)
        try:
            open_streams()
            silence_third_parties()
            if launched_rank():
                follow()
            arguments = args[0] if args else extra.get("args")
            _check_arguments(sys.argv[1:] if arguments is None else arguments)
            with Interrupts() as interrupts:
                extra |= {"obj": interrupts, "standalone_mode": False}
                sys.exit(_exit_code(partial(click_main, *args, **extra)))
        except KeyboardInterrupt:
            show_interrupted()
            sys.exit(INTERRUPTED)
        except Exception as error:
            sys.exit(report(error))


def _exit_code(command: Callable[[], Any]) -> Any:
    """Run a command; its error is reported while Ctrl-C is still listened to."""
    try:
        try:
            return command()
        finally:
            flush_output()
    except Exception as error:
        return report(error)


def _check_arguments(arguments: Iterable[str]) -> None:
    """Refuse a byte 0: no shell passes it on, and no file name can have it."""
    if any("\0" in each for each in arguments):
        raise click.UsageError("an argument contains a zero byte: leave it out")


@click.group(
    "specdec", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(
    ", ".join(f"{name} {version}" for name, version in versions().items())
    + f", Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    "-V",
    "--version",
    message="%(version)s",
)
def main() -> None:
    """Batched speculative decoding for MLX.

    The output is the target model's own, token for token. A draft changes only how
    fast it comes.

    \b
      specdec demo
      specdec run --prompt "What is MLX?"
      specdec run --target MODEL --draft MODEL --prompts questions.jsonl
    """  # noqa: D301 - click's mark for lines to keep


for _command in (
    demo,
    run,
    chat,
    serve,
    advise,
    verify,
    estimate,
    probe,
    bench,
    report_command,
    distill,
    convert,
    cache,
):
    main.add_command(_command)
