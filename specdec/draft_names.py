"""What ``--draft`` names, taken apart. Nothing is loaded here."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace

from .errors import ConfigError
from .model_names import (
    DEFAULT_DRAFT,
    check_model_name,
    default_draft,
    is_default_target,
    nearest,
    shipped_draft,
)
from .utils.printable import quoted

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
        model: what proposes (where no n-gram matches); ``None``: nothing does.
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
