"""``--draft auto``: the draft that a target has, or that is published for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..errors import (
    ConfigError,
    MemoryLimitError,
    ModelError,
    UnsupportedModelError,
)
from ..memory import RowNeeds
from ..model_names import (
    MTP_DRAFT,
    NGRAM_DRAFT,
    DraftSpec,
    ModelDraft,
    draft_for,
    is_default_target,
    locate_target,
)
from ..models import context_length
from ..models.draft_heads.mtp import NoHeadError
from ..models.loading import folder_of, is_gguf
from ..models.model_outline import ModelOutline, outline, outline_draft
from ..models.pairs import PublishedDraft, described, known_target, local_folder
from ..sampling_params import SamplingParams
from .build import preflight_of

log = logging.getLogger("specdec.engine")

# Tokens of a row, prompt and output, for which a draft leaves room.
_CONTEXT = 4096


@dataclass(frozen=True)
class Choice:
    """What ``auto`` takes.

    Args:
        spec: the draft.
        why: where it comes from, and what was passed over.
        missing: the best published draft, if it could be taken but for a download.
    """

    spec: DraftSpec
    why: str
    missing: PublishedDraft | None = None

    def __str__(self) -> str:
        return f"draft auto: {self.spec.name}: {self.why}"


def choose(target: str, config: EngineConfig, **loading: Any) -> Choice:
    """Choose a draft for a target. The draft is not downloaded; the target may be.

    First comes a head in the target's own folder, then the published drafts that are on
    this machine, in the registry's order. A draft is taken if it loads and leaves room
    for the rows that were asked for.

    Args:
        target: its name.
        config: its batch size and memory limit decide what fits.
        loading: further arguments of :func:`~specdec.models.model_outline.outline`.

    Raises:
        ModelError: the target cannot be read.
    """
    if is_default_target(target) and (spec := draft_for(target, None)) is not None:
        return Choice(spec, "the head that comes with specdec")
    located = locate_target(target)
    if not is_gguf(located) and not os.path.exists(os.path.expanduser(located)):
        folder_of(located, loading.get("revision"))
    outlined = outline(target, **loading)
    dtype = loading.get("dtype")
    passed_over: list[str] = []
    for spec, why in _on_this_machine(target, outlined):
        assert spec.model is not None
        try:
            draft = outline_draft(spec.model, outlined, dtype=dtype)
            if room_beside(outlined, draft, config) >= 0:
                return Choice(spec, "; ".join([why, *passed_over]))
            passed_over.append(f"{spec.name} does not fit beside the rows")
        except (ModelError, ConfigError, MemoryLimitError) as error:
            # Most targets have no head of their own.
            none = isinstance(error, NoHeadError | UnsupportedModelError)
            if spec.name != MTP_DRAFT or not none:
                passed_over.append(f"{spec.name} cannot be taken ({error})")
    entry = known_target(target, outlined.config)
    missing = [d for d in entry.drafts if local_folder(d) is None] if entry else []
    room = room_beside(outlined, None, config)
    fitting = [d for d in missing if (d.gb or 0) * 1e9 <= room]
    if fitting:
        passed_over.append(f"{described(fitting[0])} is published, but not downloaded")
    elif missing:
        passed_over.append("no published draft fits beside the rows")
    elif entry is None:
        passed_over.append("no other draft is known for this target")
    spec = DraftSpec(NGRAM_DRAFT, True, None)
    return Choice(spec, "; ".join(passed_over), fitting[0] if fitting else None)


def _on_this_machine(
    target: str, outlined: ModelOutline
) -> Iterator[tuple[DraftSpec, str]]:
    if outlined.tokens.is_dir():
        spec = DraftSpec(MTP_DRAFT, False, ModelDraft(MTP_DRAFT, mtp=True))
        yield spec, "the target's own head"
    entry = known_target(target, outlined.config)
    if entry is None:
        return
    for draft in entry.drafts:
        if (folder := local_folder(draft)) is not None:
            model = ModelDraft(draft.id, folder=str(folder))
            yield DraftSpec(draft.id, False, model), f"published for {entry.id}"


def room_beside(
    target: ModelOutline, draft: ModelOutline | None, config: EngineConfig
) -> float:
    """Bytes that are left beside the models and the rows; below 0, they do not fit.

    Raises:
        MemoryLimitError: the models do not fit by themselves.
    """
    preflight = preflight_of(target, draft, config, drafts=draft is not None)
    if preflight is None:
        return float("inf")
    context = min(_CONTEXT, context_length(target.config) or _CONTEXT)
    rows = [RowNeeds(context - 1, SamplingParams(max_tokens=1))] * config.batch_size
    return preflight.limit - preflight.plan.peak(rows)


def note_known(target: str, config: dict[str, Any]) -> None:
    """Note a draft that is published for a target for which none was named."""
    entry = known_target(target, config)
    if entry is not None:
        draft = entry.drafts[0]
        log.info(
            "%s (%s) is published for this target: --draft auto", draft.id, draft.kind
        )
