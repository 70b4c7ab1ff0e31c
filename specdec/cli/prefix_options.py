"""The options of ``specdec run`` for the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..config import DEFAULT_PREFIX_CACHE_SIZE
from ..utils.sizes import parse_size
from .options import is_given

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--prefix-cache",
        metavar="DIR",
        help="Keep the keys and values of prompts in this folder, for prompts that "
        "begin alike, in this run and later ones. [default: none]",
    ),
    click.option(
        "--prefix-cache-size",
        metavar="SIZE",
        help="Most that the folder may hold, as in 500MB or 8GB; what was not used "
        f"for longest goes. [default: {DEFAULT_PREFIX_CACHE_SIZE // 10**9}GB]",
    ),
    click.option(
        "--prefix-cache-memory",
        metavar="SIZE",
        help="Most to keep in memory, with a folder or without. [default: 1GB with "
        "--prefix-cache, else none]",
    ),
)


def prefix_options(command: F) -> F:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def prefix_config(
    *,
    prefix_cache: str | None,
    prefix_cache_size: str | None,
    prefix_cache_memory: str | None,
) -> dict[str, Any]:
    """What they say, as arguments of ``EngineConfig``.

    Raises:
        click.UsageError: one needs another, or is empty.
        ConfigError: no size.
    """
    if prefix_cache is not None and not prefix_cache.strip():
        raise click.UsageError("--prefix-cache is empty: name a folder")
    if prefix_cache is None and is_given("prefix_cache_size"):
        raise click.UsageError(
            "--prefix-cache-size needs --prefix-cache: name a folder"
        )
    config: dict[str, Any] = {"prefix_cache": prefix_cache}
    if prefix_cache_size is not None:
        config["prefix_cache_size"] = parse_size(prefix_cache_size)
    if prefix_cache_memory is not None:
        config["prefix_cache_memory"] = parse_size(prefix_cache_memory)
    return config
