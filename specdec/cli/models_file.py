"""``specdec serve --models FILE``: the models that a file names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NotRequired

import click

from ..config import EngineConfig
from ..errors import ConfigError
from ..model_names import locate_target, named_draft
from ..utils.data_files import DataError, read_toml
from ..utils.names import check_settings
from ..utils.sizes import parse_size
from ..utils.validation import Int, check, table

#: What a model's table may have: arguments of ``SpecDecoder.from_pretrained``.
_LOADING = {
    "target": str,
    **dict.fromkeys(
        ("draft", "dtype", "adapter_path", "draft_adapter_path", "revision"),
        NotRequired[str],
    ),
    "memory_limit": NotRequired[str | Int],
    "batch": NotRequired[Int],
    "num_draft_tokens": NotRequired[Int | str],
}


def read_models(path: str, common: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of ``SpecDecoder.from_pretrained`` for each model of a file.

    Args:
        path: a TOML file with a table ``[models.NAME]`` for each model.
        common: arguments that all share, from the command line.

    Raises:
        click.UsageError: the file cannot be read, or has another form.
        ConfigError: a value is not possible.
    """
    try:
        content = read_toml(path)
    except (FileNotFoundError, DataError) as error:
        is_there = isinstance(error, DataError)
        reason = str(error) if is_there else "there is no such file"
        raise click.UsageError(
            f"--models {path}: {reason}: name a TOML file with a table [models.NAME]"
        ) from error
    try:
        models = check(table({}, models=dict), content).get("models", {})
        for name, model in models.items():
            table_name = f"models.{name}"
            check(dict, model, table_name)
            check_settings(model, _LOADING, table_name)
            check(table(_LOADING), model, table_name)
        if not models:
            raise DataError("it names no model: write a table [models.NAME]")
    except (ConfigError, DataError) as error:
        raise click.UsageError(f"--models {path}: {error}") from error
    return {name: _arguments(path, name, models[name], common) for name in models}


def _arguments(
    path: str, name: str, model: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    arguments = dict(model)
    settings: dict[str, Any] = {"memory_limit": None}
    try:
        if (limit := arguments.pop("memory_limit", None)) is not None:
            settings["memory_limit"] = parse_size(str(limit))
        if (batch := arguments.pop("batch", None)) is not None:
            settings["batch_size"] = batch
        if (tokens := arguments.pop("num_draft_tokens", None)) is not None:
            settings["num_draft_tokens"] = tokens
        config: EngineConfig = replace(common["config"], **settings)
        locate_target(model["target"])
        if "draft" in model:
            named_draft(model["draft"])
    except ConfigError as error:
        raise ConfigError(f"--models {path}: models.{name}: {error}") from error
    return {**common, "draft": None, **arguments, "config": config}
