"""Which published drafts belong to a target: the registry in ``pairs.toml``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..model_names import is_hub_id
from ..utils.data_files import read_toml
from .loaded import setting

FILE = Path(__file__).with_name("pairs.toml")
# What conversions put at the end of a model's name.
_CONVERTED = re.compile(
    r"[-_.](\d+-?bits?|q\d\w*|int\d+|b?f(loat)?p?\d+|mlx|gguf|dwq\w*|mxfp\d|nvfp\d|awq|"
    r"gptq|qat|mtp|mtplx\w*|optiq)$"
)


@dataclass(frozen=True)
class PublishedDraft:
    """A draft on the hub.

    Args:
        id: owner and name.
        kind: what it is, in the words of docs/drafters.md.
        gb: its size in 10^9 bytes; ``None``: not known.
        k: draft tokens of a round in the published figure; ``None``: not stated.
        licence: as its card says; "": none was seen.
        thinking: "off" if its target does not think; "": it may.
        published: what was published about its speed; "": nothing.
        revision: a commit to take; ``None``: the newest.
    """

    id: str
    kind: str
    gb: float | None = None
    k: int | None = None
    licence: str = ""
    thinking: str = ""
    published: str = ""
    revision: str | None = None


@dataclass(frozen=True)
class KnownTarget:
    """A target with published drafts, best first.

    Args:
        id: owner and name of the original.
        shape: what its configuration says: ``model_type``, ``width``, ``layers`` and
            ``vocabulary``, or some of these.
        drafts: its drafts.
    """

    id: str
    shape: Mapping[str, str | int]
    drafts: tuple[PublishedDraft, ...]


@cache
def registry() -> tuple[KnownTarget, ...]:
    """All targets with published drafts."""
    return tuple(
        KnownTarget(
            each["id"],
            {k: v for k, v in each.items() if k not in ("id", "drafts")},
            tuple(PublishedDraft(**draft) for draft in each["drafts"]),
        )
        for each in read_toml(FILE)["target"]
    )


def shape_of(config: Mapping[str, Any]) -> dict[str, str | int]:
    """The parts of a configuration by which a target is known."""
    parts = {
        "model_type": config.get("model_type"),
        "width": setting(config, "hidden_size", "n_embd", "d_model"),
        "layers": setting(config, "num_hidden_layers", "n_layer", "num_layers"),
        "vocabulary": setting(config, "vocab_size"),
    }
    return {key: value for key, value in parts.items() if isinstance(value, str | int)}


def known_target(name: str, config: Mapping[str, Any]) -> KnownTarget | None:
    """The registry's entry for a target; ``None`` if it has none.

    A name counts if its configuration does not contradict. A configuration alone counts
    if its four parts are those of exactly one entry, as of a fine-tuned model.

    Args:
        name: a hub id or a path, of the original or a conversion.
        config: the target's configuration.
    """
    shape = shape_of(config)

    def fits(entry: KnownTarget) -> bool:
        return bool(entry.shape) and entry.shape.items() <= shape.items()

    fitting = [entry for entry in registry() if fits(entry)]
    for entry in fitting:
        if plain_name(entry.id) == plain_name(name):
            return entry
    alike = [entry for entry in fitting if len(entry.shape) == 4]
    return alike[0] if len(alike) == 1 else None


def plain_name(name: str) -> str:
    """A model's name in lower case, without owner and without what conversions add."""
    plain = os.path.basename(os.path.normpath(name)).lower()
    while (shorter := _CONVERTED.sub("", plain)) != plain:
        plain = shorter
    return plain


def local_folder(draft: PublishedDraft) -> Path | None:
    """The folder of a draft that was downloaded; ``None`` if it was not."""
    from mlx_lm.utils import snapshot_download

    try:
        folder = Path(
            snapshot_download(draft.id, revision=draft.revision, local_files_only=True)
        )
    except Exception:  # the hub's client raises many kinds
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def facts_of_hub(draft: PublishedDraft) -> PublishedDraft:
    """The draft with the size and licence that the hub states now, if it answers."""
    from huggingface_hub import HfApi

    assert is_hub_id(draft.id)
    try:
        info = HfApi().model_info(
            draft.id, revision=draft.revision, files_metadata=True, timeout=10
        )
        sizes = [f.size or 0 for f in info.siblings or () if _is_read(f.rfilename)]
        card: Any = info.card_data or {}
        licence = card.get("license") or draft.licence
        gb = sum(sizes) / 1e9 or draft.gb
        return replace(draft, gb=gb, licence=str(licence), revision=info.sha)
    except Exception:  # the hub's client raises many kinds
        return draft


def _is_read(name: str) -> bool:
    return name.endswith((".safetensors", ".json"))


def described(draft: PublishedDraft) -> str:
    """Name, kind, size and licence in one phrase."""
    size = "size not known" if draft.gb is None else f"{draft.gb:.1f} GB"
    licence = f"licence {draft.licence}" if draft.licence else "licence not known"
    return f"{draft.id} ({draft.kind}, {size}, {licence})"
