"""Chooses the tokens of rows with functions of the user's, one token after another.

A logits processor or a sampler sees every token of its row exactly once and in order,
though a round verifies several. It is called for a position only if all draft tokens
before it were accepted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import reason_of
from ..request import Request
from ..sampling import Draws, RowSampling


@dataclass(frozen=True)
class Stepped:
    """What one row's functions chose in a round.

    Args:
        tokens: accepted draft tokens, then the extra token.
        logits: what the processors left at each of them, each of shape (1, V).
        error: what went wrong after them; ``None``: nothing.
    """

    tokens: list[int]
    logits: list[mx.array]
    error: str | None = None


def choose_stepwise(
    request: Request,
    logits: mx.array,
    draws: Draws,
    proposed: list[int],
    sampling: RowSampling,
) -> Stepped:
    """Choose the tokens of one row's round.

    Args:
        request: the row, with all its committed tokens.
        logits: logits after bias and penalties, shape (1, k + 1, V).
        draws: the draws of the row's positions, batch size 1.
        proposed: the draft tokens that it may accept.
        sampling: how the row chooses from what its processors leave.
    """
    params = request.params
    history = [*request.prompt_tokens, *request.tokens]
    proposed = proposed[: request.remaining - 1]
    done = Stepped([], [])
    try:
        for j in range(len(proposed) + 1):
            row = logits[:, j]
            tokens = mx.array([*history, *done.tokens])
            for process in params.logits_processors:
                row = _checked(process(tokens, row), row)
            if params.sampler is None:
                token = int(sampling.choose(row[:, None], draws.at(j)))
            else:
                position = len(history) + len(done.tokens)
                token = _sample(params.sampler, row, params.seed_key, position)
            done.tokens.append(token)
            done.logits.append(row)
            if token in request.end_tokens or [token] != proposed[j : j + 1]:
                break
    except BaseException as error:  # the user's function may raise anything
        if isinstance(error, KeyboardInterrupt) and _may_be_ctrl_c():
            raise
        at = len(request.tokens) + len(done.tokens)
        what = reason_of(error)
        error_line = f"its sampler or a logits processor failed at token {at}: {what}"
        return replace(done, error=error_line)
    return done


def _may_be_ctrl_c() -> bool:
    """Whether this is the main thread, the only one that runs signal handlers."""
    return threading.current_thread() is threading.main_thread()


def _checked(processed: Any, logits: mx.array) -> mx.array:
    if not isinstance(processed, mx.array) or processed.shape != logits.shape:
        shape = getattr(processed, "shape", type(processed).__name__)
        raise ValueError(f"it returned {shape}, not logits of shape {logits.shape}")
    return processed


def _sample(sampler: Any, logits: mx.array, seed: int, position: int) -> int:
    mx.eval(logits)  # errors of the processors' arrays surface here, in this row
    # The key that mx.random.key makes of this number is [seed, position].
    mx.random.seed(seed << 32 | position)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    token = int(mx.array(sampler(logprobs)).reshape(()))
    if not 0 <= token < logits.shape[-1]:
        raise ValueError(f"token {token} is not in the vocabulary")
    return token
