"""Whether two models speak the same tokens."""

from __future__ import annotations

from ..errors import VocabularyMismatchError
from .loaded import LoadedModel

_SHOWN = 3


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Make sure that every token has the same id in both models.

    How many logits a model computes does not matter: an embedding is often
    padded beyond the vocabulary.

    Raises:
        VocabularyMismatchError: the message names what differs.
    """
    if draft.tokenizer is target.tokenizer:
        return
    target_ids: dict[str, int] = target.tokenizer.get_vocab()
    draft_ids: dict[str, int] = draft.tokenizer.get_vocab()
    if target_ids == draft_ids:
        return
    raise VocabularyMismatchError(
        f"draft {draft.name} cannot draft for {target.name}: "
        f"{_difference(target_ids, draft_ids)}; "
        "take a draft of the target's family, or self:4bit"
    )


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    differing = [
        (index, token) for token, index in target.items() if draft.get(token) != index
    ]
    differing += [(i, token) for token, i in draft.items() if token not in target]
    differing.sort()
    shown = ", ".join(
        f"{token!r} is {_id(target, token)} and {_id(draft, token)}"
        for _, token in differing[:_SHOWN]
    )
    sizes = ""
    if len(target) != len(draft):
        sizes = f"their vocabularies have {len(target)} and {len(draft)} tokens, "
    more = ", ..." if len(differing) > _SHOWN else ""
    return f"{sizes}{len(differing)} tokens differ ({shown}{more})"


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"
