"""``specdec cache``: manages a prefix cache folder. No mlx is loaded."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path

import click

from ..prefix_cache.audit import Audit, audit, remove
from ..utils.printable import counted, one_line, shorten
from ..utils.sizes import format_size
from .output import FAILURE, note, show


def _existing(_: click.Context, __: click.Parameter, value: str) -> Path:
    folder = Path(value).expanduser()
    if os.path.isfile(folder):
        raise click.BadParameter(
            f"{folder} is a file: give the folder that --prefix-cache names"
        )
    if not os.path.isdir(folder):
        raise click.BadParameter(f"there is no folder {folder}")
    return folder


_folder = click.argument("folder", metavar="DIR", callback=_existing)


@click.group(short_help="List, verify or clear a prefix cache folder.")
def cache() -> None:
    """Manage the folder of --prefix-cache.

    \b
      specdec cache list DIR
    """  # noqa: D301 - click's mark for lines to keep


@cache.command("list", short_help="List its entries, by model.")
@_folder
def list_(folder: Path) -> None:
    """List the entries of DIR, by model and kind of cache."""
    audit = _audit(folder)
    for each in audit.holdings(folder):
        used = datetime.fromtimestamp(each.last_used)
        show(
            f"{one_line(each.signature[:8])}  {shorten(each.model)}: "
            f"{_entries(each.entries)}, {format_size(each.nbytes)}, "
            f"longest prefix {each.longest} tokens, last used {used:%Y-%m-%d %H:%M}"
        )
    show(f"{_entries(len(audit.sound))}, {format_size(audit.nbytes)}")
    if audit.damaged:
        note(
            f"{_entries(len(audit.damaged))} of no use: specdec cache verify {folder} "
            "removes them"
        )


@cache.command(short_help="Check all entries; remove damaged ones.")
@_folder
def verify(folder: Path) -> None:
    """Compare every entry of DIR with its digest; remove damaged ones.

    The exit code is 1 if any was damaged. What was removed is computed again when it is
    needed.
    """
    audit = _audit(folder, contents=True)
    failures = remove(folder, list(audit.damaged))
    for name, reason in audit.damaged.items():
        show(f"{'damaged' if name in failures else 'removed'} {name}: {reason}")
    show(f"{_entries(len(audit.sound))}, {format_size(audit.nbytes)}: verified")
    _complain(folder, failures)
    if audit.damaged:
        sys.exit(FAILURE)


@cache.command(short_help="Remove all entries.")
@_folder
def clear(folder: Path) -> None:
    """Remove all entries of DIR; other files stay."""
    audit = _audit(folder)
    names = [*(file.name for file in audit.sound), *audit.damaged]
    failures = remove(folder, names)
    show(f"removed {_entries(len(names) - len(failures))}")
    _complain(folder, failures)


def _complain(folder: Path, failures: dict[str, str]) -> None:
    """Fail if entries could not be removed."""
    if not failures:
        return
    name, reason = next(iter(failures.items()))
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    raise click.ClickException(
        f"{name}{more} could not be removed from {folder}: {reason}"
    )


def _audit(folder: Path, *, contents: bool = False) -> Audit:
    try:
        return audit(folder, contents=contents)
    except OSError as error:
        raise click.ClickException(
            f"{folder} cannot be read: {error.strerror}"
        ) from error


def _entries(n: int) -> str:
    return counted(n, "entry", "entries")
