"""Options that say what output has to be: a JSON schema, an expression, a grammar."""

from __future__ import annotations

from typing import Any

import click

from ..errors import ConfigError
from ..grammar import Grammar, check_grammar
from ..utils.data_files import DataError, read_text
from . import options

OPTIONS: tuple[options.Option[Any], ...] = (
    options.file(
        "--json-schema",
        text="Output is JSON that the schema in this file describes.",
    ),
    click.option(
        "--regex", metavar="PATTERN", help="Output matches this expression, all of it."
    ),
    options.file(
        "--grammar",
        "grammar_file",
        text="Output follows the Lark grammar in this file.",
    ),
)


def chosen(command: options.F) -> options.F:
    """Give ``command`` the options; it hands their values to :func:`grammar_of`."""
    return options.added(command, OPTIONS)


def grammar_of(
    json_schema: str | None, regex: str | None, grammar_file: str | None
) -> Grammar | None:
    """What the options ask for, seen to be usable; ``None`` where none is given.

    Raises:
        click.UsageError: several are.
        ConfigError: the file cannot be read, or what it says cannot be used.
    """
    given = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--grammar": grammar_file,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise click.UsageError(f"{names[0]} and {names[1]}: give one of them")
    if regex is not None:
        found = Grammar.regex(regex)
    elif json_schema is not None:
        found = Grammar.json_schema(_read(json_schema))
    elif grammar_file is not None:
        found = Grammar.lark(_read(grammar_file))
    else:
        return None
    check_grammar(found)
    return found


def _read(file: str) -> str:
    try:
        return read_text(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file") from error
    except DataError as error:
        raise ConfigError(f"{file}: {error}") from error
