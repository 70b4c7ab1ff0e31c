"""Decode many prompts through the engine at once, for tools that compare tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..decoder import SpecDecoder, wired_memory
from ..models import LoadedModel
from ..outputs import GenerationResult
from ..prompts import EncodedPrompt, Prompt
from ..sampling_params import SamplingParams

#: Runs that are not timed, since MLX's graphs on CUDA take this many to settle.
WARM_UP = 24


@dataclass(frozen=True)
class Task:
    """One prompt, and how to decode it."""

    prompt: EncodedPrompt
    params: SamplingParams

    @classmethod
    def of(cls, token_ids: Sequence[int], params: SamplingParams) -> Task:
        """A task whose prompt is given as token ids, without a text."""
        return cls(EncodedPrompt("", tuple(token_ids)), params)


def decode(
    decoder: SpecDecoder,
    tasks: Iterable[Task],
    stepped: Callable[[int, float], None] = lambda ended, share: None,
) -> list[GenerationResult]:
    """Decode all tasks through the engine, up to its batch size at once.

    Args:
        stepped: called before each step and at the end, with the number of tasks that
            have ended, and the share of all tokens that need no more decoding. An
            exception that it raises ends the decoding.
    """
    session = decoder.session()
    limits, done = list[int](), 0
    for task in tasks:
        session.add_encoded(task.prompt, task.params)
        limits.append(task.params.max_tokens)
    results: list[GenerationResult] = []
    most = sum(limits)
    with wired_memory():
        while session.busy:
            stepped(len(results), done / most)
            for event in session.step():
                done += len(event.token_ids)
                if event.result is not None:
                    # What it could still have generated needs no decoding.
                    tokens = len(event.result.token_ids)
                    done += limits[event.index] - tokens
                    results.append(event.result)
    stepped(len(results), 1.0)
    session.stats.check_draft()
    return sorted(results, key=lambda result: result.index)


def time_rounds(
    decoder: SpecDecoder,
    prompts: Sequence[Prompt],
    k: int,
    num_rounds: int,
    watching: AbstractContextManager[object] | None = None,
) -> float:
    """Seconds of a mean round that proposes ``k`` tokens, after the first rounds.

    Args:
        prompts: the batch; no row ends, whatever is accepted.
        watching: is entered for the rounds that are timed.
    """
    most = (num_rounds + WARM_UP + 4) * (k + 1)
    least = most if decoder.tokenizer.eos_token_ids else 0
    params = SamplingParams(max_tokens=most, min_tokens=least, num_draft_tokens=k)
    events: Any = decoder.stream(list(prompts), params)
    with closing(events):
        while decoder.stats.rounds < WARM_UP:
            next(events)
        with watching or nullcontext():
            before, start = decoder.stats.rounds, time.perf_counter()
            while decoder.stats.rounds < before + num_rounds:
                next(events)
            return (time.perf_counter() - start) / num_rounds


def with_end(result: GenerationResult) -> tuple[int, ...]:
    """The tokens of a row, including the token that ended it."""
    end = result.stop_token
    return (*result.token_ids, *([] if end is None else [end]))


class TokenIds:
    """A stand-in for a tokenizer that makes no text, and so costs nothing."""

    has_chat_template = False
    last_segment = text = ""

    def __init__(self, eos_token_ids: Iterable[int] = ()):
        self.eos_token_ids = set(eos_token_ids)

    @property
    def detokenizer(self) -> TokenIds:
        return self

    def add_token(self, token: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}

    def __len__(self) -> int:
        return 2**31


def token_level(model: nn.Module, eos_token_ids: Iterable[int] = ()) -> LoadedModel:
    """The model without a tokenizer, to be run with token ids alone."""
    tokenizer: Any = TokenIds(eos_token_ids)
    return LoadedModel(model, tokenizer, {}, "model")
