"""What ``--draft`` names, taken apart. Nothing is loaded here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, ModelNotFoundError

#: Drafts that are made from the target's own weights.
SELF_DRAFTS = ("self:2bit", "self:3bit", "self:4bit", "self:8bit")
#: Prompt lookup; ``shared`` looks in other rows and finished requests too.
NGRAM_DRAFTS = ("ngram", "ngram:shared")

#: No draft, where there would be one by default.
NO_DRAFT = "none"

LAYERS_EXAMPLE = "layers:0-7,22-29"


def default_draft() -> str | None:
    """Folder of the draft for the default target; ``None`` where none is installed.

    It comes with the package, and was made by ``scripts/train_smollm2_draft``.
    """
    folder = Path(__file__).with_name("drafts") / "smollm2-135m-instruct"
    return str(folder) if (folder / "config.json").is_file() else None


@dataclass(frozen=True)
class ModelDraft:
    """A draft that is a model.

    Args:
        name: as it was given: a folder, ``.gguf`` file or hub id, unless one of the
            following is set.
        bits: the target itself, quantized to this many.
        layers: these layers of the target itself, in ascending order.
    """

    name: str
    bits: int | None = None
    layers: tuple[int, ...] | None = None

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
                    f"draft {name!r} is not known: use {', '.join(SELF_DRAFTS)}, "
                    f"a folder, a .gguf file or a hub id{_hint(name)}"
                )
            return cls(name, bits=int(rest.removesuffix("bit")))
        if kind == "layers":
            return cls(name, layers=_parse_layers(name, rest))
        return cls(name)


@dataclass(frozen=True)
class DraftSpec:
    """A draft by its name.

    Args:
        name: as it was given.
        ngram: whether n-grams are looked up, before the model is asked if there
            is one.
        shared: whether in other rows and finished requests too.
        model: what proposes (where no n-gram matches); ``None``: nothing does.
    """

    name: str
    ngram: bool
    shared: bool
    model: ModelDraft | None

    @classmethod
    def parse(cls, name: str) -> DraftSpec:
        """Take a name apart: ``ngram``, ``ngram+MODEL`` or ``MODEL``.

        MODEL is a folder, a ``.gguf`` file, a hub id, ``self:4bit`` or
        ``layers:0-7,22-29``. Whether there is such a model is its loader's question.

        Raises:
            ConfigError: the name cannot be taken apart.
        """
        first, plus, rest = name.partition("+")
        if first.partition(":")[0] != "ngram":
            return cls(name, False, False, ModelDraft.parse(name))
        if first not in NGRAM_DRAFTS:
            raise ConfigError(
                f"draft {name!r} is not known: use {', '.join(NGRAM_DRAFTS)}, or "
                "ngram+MODEL"
            )
        model = ModelDraft.parse(rest) if plus else None
        if plus and (not rest or DraftSpec.parse(rest).ngram):
            wrong = "n-grams behind the +, too" if rest else "no model behind the +"
            raise ConfigError(
                f"draft {name!r} names {wrong}: write ngram+MODEL, with "
                f"a folder, a .gguf file, a hub id, self:4bit or {LAYERS_EXAMPLE}"
            )
        return cls(name, True, first != "ngram", model)

    def check_model(self) -> None:
        """Refuse a model that is not here and cannot be on the hub, before any loads.

        Raises:
            ModelNotFoundError: it is no path that exists, and no ``owner/name``.
        """
        model = self.model
        if model is None or model.bits is not None or model.layers is not None:
            return
        if os.path.exists(os.path.expanduser(model.name)):
            return
        if not is_hub_id(model.name):
            raise ModelNotFoundError(
                f"no model at {model.name}: give a folder, a .gguf file or a hub id "
                f"(owner/name){_hint(model.name)}"
            )


def is_hub_id(name: str) -> bool:
    """Whether the hub may have a model of that name: ``owner/name``."""
    owner_and_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    return owner_and_name is not None and not name.startswith(".")


def _hint(name: str) -> str:
    meant = _meant(name)
    return "" if meant is None else f"; did you mean {meant}?"


def _meant(name: str) -> str | None:
    """The known draft that is spelt most like ``name``, unless it is that itself."""
    first, plus, rest = name.partition("+")
    if plus and rest in NGRAM_DRAFTS:
        return f"{rest}+{_meant(first) or first}"
    if plus:
        lookup = difflib.get_close_matches(first, NGRAM_DRAFTS, 1)
        return f"{lookup[0]}+{_meant(rest) or rest}" if lookup else None
    kind, colon, layers = name.partition(":")
    if colon and difflib.get_close_matches(kind, ["layers"]):
        return None if kind == "layers" else f"layers:{layers}"
    known = difflib.get_close_matches(name, (*SELF_DRAFTS, *NGRAM_DRAFTS), 1)
    return known[0] if known and known[0] != name else None


def _parse_layers(name: str, text: str) -> tuple[int, ...]:
    """The layers of ``0-7,22-29``."""
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if found is None:
            raise ConfigError(
                f"draft {name!r} names no layers: write {LAYERS_EXAMPLE}, the layers "
                f"of the target to keep, counted from 0{_hint(name)}"
            )
        first = int(found[1])
        last = int(found[2] or first)
        if last < first:
            raise ConfigError(f"draft {name!r}: {part.strip()} ends before it begins")
        layers += range(first, last + 1)
    if len(set(layers)) != len(layers):
        twice = next(i for i in layers if layers.count(i) > 1)
        raise ConfigError(f"draft {name!r} names layer {twice} twice")
    return tuple(sorted(layers))


def layers_name(layers: Iterable[int]) -> str:
    """The name of a draft of those layers: ``layers:0-7,22-29``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers:" + ",".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )
