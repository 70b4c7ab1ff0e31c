"""Requests to a live server: odd ones beside good ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import mlx.core as mx
import numpy as np

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.engine.async_server import Server
from specdec.errors import ConfigError
from specdec.models import LoadedModel, load
from specdec.outputs import GenerationResult

from .case import Case, World, check_error, check_line, fail, kind, shown
from .folders import sound_folder
from .odd import NUMBERS, TEXTS, odd_value

Prompt = Any
GOOD: tuple[tuple[Prompt, dict[str, Any]], ...] = (
    ([5, 6, 7], {"max_tokens": 12}),
    ("12 the", {"max_tokens": 9, "temperature": 1.0, "seed": 3}),
    ([9] * 40, {"max_tokens": 5, "repetition_penalty": 1.3}),
    ([{"role": "user", "content": "ab"}], {"max_tokens": 12, "stop": ("7",)}),
)
FIELDS = tuple(field.name for field in fields(SamplingParams))


def sound_model(world: World) -> LoadedModel:
    return load(world.once(sound_folder))


def decoder(world: World) -> SpecDecoder:
    """Drafts with the target's own copy, so that rounds have drafts to accept."""
    config = EngineConfig(batch_size=3, num_draft_tokens=2, prefill_step_size=16)
    return SpecDecoder(world.once(sound_model), drafter="ngram", config=config)


def tokens_alone(world: World) -> list[list[int]]:
    """What each good request gives when nobody is beside it."""
    plain = world.once(decoder)
    return [
        plain.generate([prompt], [SamplingParams(**settings)])[0].token_ids
        for prompt, settings in GOOD
    ]


class Live:
    """A server that stays open from case to case, and its event loop."""

    def __init__(self, world: World) -> None:
        self.loop = asyncio.new_event_loop()
        self.server: Server = world.once(decoder).serve()
        self.loop.run_until_complete(self.server.__aenter__())
        world.at_end(self.close)

    def close(self) -> None:
        self.loop.run_until_complete(self.server.aclose())
        self.loop.close()


def odd_prompt(rng: random.Random) -> Prompt:
    """A prompt of any type and size."""
    token = rng.choice((*NUMBERS, "5", None, [5]))
    message: dict[str, Any] = {"role": "user", "content": "ab"}
    message[rng.choice(("role", "content", "tool_calls", "name"))] = odd_value(rng)
    prompts: tuple[Callable[[], Prompt], ...] = (
        lambda: rng.choice(TEXTS),
        lambda: "the " * rng.choice((100, 600, 50_000)),
        lambda: [5, token],
        lambda: [5] * rng.choice((511, 512, 513, 100_000)),
        lambda: np.array([5, 6]) if rng.random() < 0.5 else mx.array([5, 6]),
        lambda: [message],
        lambda: [message, rng.choice((None, 5, "a", []))],
        lambda: [{"role": "user", "content": "ab"}] * rng.choice((2, 100)),
        lambda: odd_value(rng),
        lambda: rng.choice((b"ab", {5: 6}, {5, 6}, range(3), iter([5]), object())),
    )
    return rng.choice(prompts)()


def odd_setting(rng: random.Random, name: str) -> Any:
    """A value for a field, most of them of the right type."""
    number = rng.choice(NUMBERS)
    if name == "logit_bias":
        return rng.choice(
            (
                {5: number},
                {number if number == number else 5: 1.0},
                dict.fromkeys(range(320), number),
                {rng.choice(TEXTS): 1.0},
                odd_value(rng),
            )
        )
    if name == "stop":
        texts = tuple(f"no {i}" for i in range(rng.choice((100, 20_000))))
        text = rng.choice(TEXTS)
        return rng.choice(
            (text, (text,), (text, "7"), texts, "a" * 10**5, odd_value(rng))
        )
    if name in ("stop_token_ids", "xtc_special_tokens"):
        many = tuple(range(rng.choice((10, 320, 100_000))))
        return rng.choice(((number,), many, (5, number), odd_value(rng)))
    if name in ("sampler", "logits_processors"):
        return rng.choice((odd_sampler, odd_processor)[name != "sampler"](rng))
    if name == "verification":
        return rng.choice(("coupled", "rejection", "block", "", odd_value(rng)))
    if rng.random() < 0.7:
        return number
    return rng.choice((odd_value(rng), np.float32(0.5), np.int64(3), mx.array(1.0)))


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


ERRORS = (
    ValueError("\x1b[31mno\nmore"),
    ValueError("a" * 5000),
    SystemExit(3),
    StopIteration(),
    GeneratorExit(),
    MemoryError(),
    RecursionError("deep"),
)


def odd_sampler(rng: random.Random) -> tuple[Any, ...]:
    values = (mx.array([10**6]), mx.array([-1]), None, "5", mx.array(0.5), mx.array([]))
    value = rng.choice(values)
    return (
        raises(rng.choice(ERRORS)),
        raises(SystemExit(3)),
        lambda logprobs: value,
        lambda logprobs: mx.argmax(logprobs, axis=-1) + 10**9,
        lambda logprobs: mx.argmax(logprobs, axis=-1) - 10**9,
        lambda: 5,
        odd_value(rng),
    )


def odd_processor(rng: random.Random) -> tuple[Any, ...]:
    fill = rng.choice((float("nan"), float("-inf"), float("inf"), 1e39))
    return (
        raises(rng.choice(ERRORS)),
        raises(SystemExit(3)),
        lambda tokens, logits: mx.full(logits.shape, fill),
        lambda tokens, logits: logits.astype(rng.choice((mx.float16, mx.int32))),
        lambda tokens, logits: logits[:, :5],
        lambda tokens, logits: np.array(logits),
        lambda tokens, logits: logits + mx.zeros((3, 1)),
        (lambda tokens, logits: None, lambda tokens, logits: logits),
        odd_value(rng),
    )


def odd_request(rng: random.Random) -> tuple[Prompt, dict[str, Any]]:
    """A request with something odd in it, and some settings that work."""
    prompt, settings = rng.choice(GOOD)
    settings = dict(settings)
    if rng.random() < 0.25:
        return odd_prompt(rng), settings
    if rng.random() < 0.5:  # filters are refused at temperature 0
        settings["temperature"] = 0.8
    names = rng.sample(FIELDS, rng.choice((1, 1, 1, 2, 3)))
    if rng.random() < 0.2:
        names.append(rng.choice(("sampler", "logits_processors")))
    for name in names:
        settings[name] = odd_setting(rng, name)
    if "sampler" in names:  # which is in place of it
        settings.pop("temperature", None)
    return prompt, settings


def described(prompt: Prompt, settings: dict[str, Any]) -> str:
    return f"{prompt!r:.200}, {settings!r:.500}"


@kind
def served_request(case: Case) -> None:
    """Odd requests end in a line or a result; those beside them get their tokens."""
    rng, world = case.rng, case.world
    expected = world.once(tokens_alone)
    live = world.once(Live)
    good = [rng.randrange(len(GOOD)) for _ in range(rng.choice((1, 2)))]
    odd = [odd_request(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    with shown("; ".join(described(*each) for each in odd)):
        bad = [_ask(live.server, *each) for each in odd]
        beside = [_beside(live.server, *GOOD[i]) for i in good]
        requests: list[Any] = [*bad, *beside]
        rng.shuffle(requests)
        results = live.loop.run_until_complete(_all(requests, beside))
        for i, result in zip(good, results, strict=True):
            if result.token_ids != expected[i]:
                fail(
                    f"request {i} has other tokens: {result.error or result.token_ids}"
                )
        if live.server.pending:
            fail(f"{live.server.pending} requests are left")


async def _all(requests: list[Any], wanted: list[Any]) -> list[GenerationResult]:
    results = await asyncio.gather(*requests)
    return [results[requests.index(each)] for each in wanted]


async def _beside(
    server: Server, prompt: Prompt, settings: dict[str, Any]
) -> GenerationResult:
    """A good request: whatever goes wrong with it is a fault."""
    return await server.generate(prompt, SamplingParams(**settings))


async def _ask(server: Server, prompt: Prompt, settings: dict[str, Any]) -> None:
    """An odd one, which may be refused, or end in an error of one line."""
    try:
        params = SamplingParams(**settings)
    except ConfigError as error:
        check_error(error)
        return
    try:
        result = await server.generate(prompt, params)
    except Exception as error:
        check_error(error)
        return
    if result.error is not None:
        check_line(result.error)
    if len(result.token_ids) > params.max_tokens:
        fail(f"{len(result.token_ids)} tokens of {params.max_tokens}")
