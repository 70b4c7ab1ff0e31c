"""``wrong:MODEL``: a draft that costs what the model costs and is never right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...spec_decode import DraftContext, DraftModel, NamedDrafter, Proposals, Round


class _WrongRows:
    """Rows of a draft model whose every proposal is another token than it chose."""

    def __init__(self, rows: Any, vocab_size: int):
        self._rows, self._vocab_size = rows, vocab_size

    def propose(self, round_: Round) -> Proposals:
        proposals: Proposals = self._rows.propose(round_)
        return replace(proposals, tokens=(proposals.tokens + 1) % self._vocab_size)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._rows, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            # Rows that join are as wrong as these.
            bare = [a._rows if isinstance(a, _WrongRows) else a for a in arguments]
            return found(*bare)

        return call


class _WrongDraft(DraftModel):
    def rows(self, prompts: Any, **options: Any) -> Any:
        return _WrongRows(super().rows(prompts, **options), self.vocab_size)


class WrongDrafter(NamedDrafter):
    """Its model proposes other tokens than it would."""

    def __call__(self, context: DraftContext) -> DraftModel:
        """The drafter."""
        assert self.model is not None
        return _WrongDraft(
            context.runner(self.model),
            vocab_size=context.vocab_size,
            max_draft_tokens=context.max_draft_tokens,
            vocabulary=self.vocabulary,
        )
