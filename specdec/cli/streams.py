"""Standard input, output and error, whatever the caller made of them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import click

from ..utils.printable import printable


def open_streams() -> None:
    """Make streams that are closed usable, and let none fail for a character.

    Standard input is then empty, standard output cannot be written, and messages go
    nowhere. A file opened later would get the number of a closed stream, and what is
    meant for the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _closed(number, "w" if number else "r"))
        elif number and hasattr(stream, "reconfigure"):
            # A terminal that lacks a character shows "?" instead of an error.
            stream.reconfigure(errors="replace")


def _closed(number: int, mode: str) -> Any:
    with suppress(OSError):
        os.fstat(number)  # it is in use by now
        return open(os.devnull, mode, encoding="utf-8")
    # Of standard output, what is written fails: results are not lost in silence.
    access = os.O_WRONLY if number == 2 else os.O_RDONLY
    descriptor = os.open(os.devnull, access)  # the lowest that is free
    return open(descriptor, mode, encoding="utf-8")


def show(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print lines, without characters that a terminal acts on.

    Args:
        err: to standard error. What cannot be shown there stops nothing.
        nl: end the last line.

    Raises:
        click.ClickException: standard output cannot be written.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    if not err:
        try:
            click.echo(lines, nl=nl)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise output_failed(error) from error
        return
    try:
        click.echo(lines, err=True, nl=nl)
    except OSError:
        drop(sys.stderr)


def flush_output() -> None:
    """Write what standard output still holds.

    Raises:
        click.ClickException: it cannot be written.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        failed = output_failed(error)
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # who read it has had enough
        raise failed from error


def output_failed(error: OSError) -> click.ClickException:
    """What to raise once standard output could not be written; it is given up."""
    drop(sys.stdout)
    return cannot_write("standard output", error)


def cannot_write(what: str, error: OSError) -> click.ClickException:
    """What to raise where something cannot be written."""
    return click.ClickException(f"{what} cannot be written: {error.strerror}")


def drop(stream: TextIO) -> None:
    """Let the interpreter's flush at exit go nowhere: it would fail once more."""
    with suppress(OSError):  # a stream without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
