"""Errors, as the command line shows them: one line and an exit code."""

from __future__ import annotations

import logging
import os
import re
import traceback

import click

from ..errors import ConfigError, SpecdecError
from ..utils.printable import one_line, shorten
from .streams import show
from .unknown import describe_unknown

DEBUG = "SPECDEC_DEBUG"

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


def report(error: Exception) -> int:
    """Print one line to standard error; return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE
    if isinstance(error, click.Abort):
        show_interrupted()
        return INTERRUPTED
    if debugging():
        traceback.print_exception(error)
    message, code = _describe(error)
    show_error(message)
    return code


# Options that are not called like the field that they fill.
_OPTIONS = {"temperature": "temp", "logprobs": "top_logprobs"}


def with_options(error: ConfigError, command: click.Command) -> ConfigError:
    """The error, with options of ``command`` in place of the fields that they fill.

    A field is known by the begin of the message, ``NAME is VALUE: ...``, or as a
    word with an underscore: others are words of the language too.
    """
    options = {
        option.name: option.opts[0]
        for option in command.params
        if isinstance(option, click.Option)
    }

    def named(found: re.Match[str]) -> str:
        field = found.group()
        return options.get(_OPTIONS.get(field, field), field)

    message = re.sub(r"^\w+(?= is )", named, str(error))
    # Not within names, paths and quotes, which are the user's.
    message = re.sub(r"(?<![\w./'\"-])[a-z]+(?:_[a-z]+)+(?![\w./'\"-])", named, message)
    return type(error)(message)


def show_error(message: str) -> None:
    """Print one line to standard error."""
    show(f"specdec: error: {one_line(' '.join(message.split()))}", err=True)


def show_interrupted() -> None:
    """Say so, in the words of commands that keep nothing."""
    show("specdec: interrupted", err=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        show(f"specdec: warning: {one_line(record.getMessage())}", err=True)


def show_warnings() -> None:
    """Let warnings of the library appear as lines like the errors."""
    logger = logging.getLogger("specdec")
    if not logger.handlers:
        logger.addHandler(_Lines(logging.WARNING))


def debugging() -> bool:
    """Whether SPECDEC_DEBUG asks for tracebacks."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "specdec"
        message = (
            describe_unknown(error)
            if isinstance(error, click.NoSuchOption)
            else error.format_message() + _stray(error)
        )
        return f"{message} (see: {command} --help)", USAGE
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, SpecdecError):
        return str(error), USAGE if isinstance(error, ConfigError) else FAILURE
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f"{shorten(error.filename)}: "
        return f"{name}{error.strerror}", FAILURE
    if isinstance(error, ImportError) and _is_mlx(error):
        return (
            "MLX has no backend here: pip install 'mlx[cpu]', or [cuda12] "
            f"or [cuda13] for an NVIDIA GPU ({error})",
            FAILURE,
        )
    return (
        f"unexpected {type(error).__name__}: {shorten(error)} "
        f"(set {DEBUG}=1 to see where it comes from)",
        FAILURE,
    )


def _stray(error: click.UsageError) -> str:
    """Where words belong that stand alone, if the command takes prompts or settings."""
    if error.ctx is None or "unexpected extra argument" not in error.message:
        return ""
    settings = error.ctx.params.get("settings") or ()
    if any("[" in each and "]" not in each for each in map(str, settings)):
        # The shell has cut a list at its blanks.
        return ": put the value of --set in quotes, as in --set 'batch=[1, 8]'"
    options = {name for each in error.ctx.command.params for name in each.opts}
    return ": a prompt goes behind --prompt, in quotes" * ("--prompt" in options)


def _is_mlx(error: ImportError) -> bool:
    return (error.name or "").partition(".")[0] == "mlx" or "libmlx" in str(error)
