"""Log-probabilities of the tokens of prompts, computed while prompts are prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..backend import SCORED_BYTES
from ..errors import UnsupportedModelError
from ..models.layers import TargetEnds, calling, with_part
from ..models.runner import ModelRunner
from ..request import TokenLogprobs
from .verifier import Logprobs


def unscored(target: ModelRunner) -> str:
    """Why the prompts of a target have no log-probabilities; empty: they can have."""
    try:
        TargetEnds(target.model, target.name)
    except UnsupportedModelError as error:
        return str(error)
    return ""


class PromptScores:
    """Scores the prompts of some rows, chunk by chunk.

    A chunk's hidden states are multiplied by the output head in slices, so that no more
    than a slice of logits exists.

    Args:
        target: runs the target.
        prompts: the rows' prompts.
        tops: for each row, how many of the likeliest tokens are reported for each
            position; ``None``: the row is not scored.

    Raises:
        UnsupportedModelError: the model's output head cannot be used alone.
    """

    def __init__(
        self,
        target: ModelRunner,
        prompts: Sequence[Sequence[int]],
        tops: Sequence[int | None],
    ):
        self._ends = TargetEnds(target.model, target.name)
        self._slice = max(1, SCORED_BYTES // (4 * target.vocab_size))
        self._prompts = prompts
        self._tops = tops
        self._states: list[mx.array] = []
        self._made: dict[int, list[Logprobs]] = {
            row: [] for row, top in enumerate(tops) if top is not None
        }

    @property
    def rows(self) -> list[int]:
        """The rows that are scored."""
        return list(self._made)

    def watching(self, model: nn.Module) -> nn.Module:
        """A twin of a model (the target, or its twin) whose hidden states are kept."""

        def keep(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states = usual(*args, **kwargs)
            self._states.append(states)
            return states

        path = self._ends.path
        trunk: Any = model
        for part in path:
            trunk = trunk[part]
        return with_part(model, path, calling(trunk, keep))

    def take(self, done: Sequence[int], valid: Sequence[int]) -> None:
        """Score the chunk that a watched forward has just built.

        Args:
            done, valid: tokens of each row before the chunk, and in it.
        """
        (states,) = self._states
        self._states.clear()
        for row, entries in self._made.items():
            first, count = done[row], valid[row]
            following = self._prompts[row][first + 1 : first + count + 1]
            top = self._tops[row] or 0
            for at in range(0, len(following), self._slice):
                tokens = following[at : at + self._slice]
                part = states[row : row + 1, at : at + len(tokens)]
                scored = Logprobs.of(
                    self._ends.logits(part), mx.array([tokens], mx.int32), top
                )
                mx.async_eval(scored.chosen, scored.top_ids, scored.top)
                entries.append(scored)

    def of(self, row: int) -> list[TokenLogprobs | None]:
        """The entries of a row's prompt; ``None`` for its first token."""
        entries: list[TokenLogprobs | None] = [None]
        for scored in self._made[row]:
            entries += scored.read([self._tops[row]])[0]
        return entries
