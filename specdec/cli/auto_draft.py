"""Asks whether a published draft may be downloaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..config import EngineConfig
from ..errors import ModelError
from ..model_names import target_name
from .output import note

if TYPE_CHECKING:
    from .options import Models

# What decides how a target is outlined.
_OF_TARGET = ("dtype", "trust_remote_code", "adapter_path", "revision")


def offer(models: Models, config: EngineConfig) -> None:
    """Download the draft that ``--draft auto`` lacks, if the user wants it.

    On a terminal the user is asked; elsewhere ``--yes`` must say so.
    """
    from ..engine.auto_draft import choose
    from ..models.loading import folder_of
    from ..models.pairs import described, facts_of_hub

    loading = {k: v for k, v in models.loading.items() if k in _OF_TARGET}
    draft = choose(target_name(models.target), config, **loading).missing
    if draft is None:
        return
    text = described(facts_of_hub(draft))
    if not models.may_download:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            note(f"{text} is published for this target: --yes downloads it")
            return
        if not click.confirm(f"Download {text}?", default=False, err=True):
            return
    try:
        folder_of(draft.id, draft.revision)
    except ModelError as error:  # auto takes another
        note(f"{draft.id} cannot be downloaded: {error}")
