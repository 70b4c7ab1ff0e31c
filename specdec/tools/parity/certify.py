"""Check that a comparison is possible, choose its method, and run it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from ...backend import defaults
from ...cuda.fused_linear import separated
from ...decoder import SpecDecoder
from ...errors import ConfigError, PromptError
from ...prompts import Prompt, encode_all
from ...sampling_params import SamplingParams
from ...utils.checks import require_int
from ..decoding import Task
from .distribution import MIN_DRAWS, DistributionCertificate, certify_distribution
from .plain import PlainTarget
from .tokens import Progress, TokenCertificate, certify_tokens

Certificate = TokenCertificate | DistributionCertificate

DEFAULT_DRAWS = 256
DEFAULT_MAX_RESTARTS = 16

_COMPARED = ("max_tokens", "temperature", "seed", "verification")


def certify(
    decoder: SpecDecoder,
    prompts: Iterable[Prompt],
    params: SamplingParams | None = None,
    *,
    draws: int = DEFAULT_DRAWS,
    max_restarts: int = DEFAULT_MAX_RESTARTS,
    ignore_chat_template: bool = False,
    progress: Progress | None = None,
) -> Certificate:
    """Compare ``decoder`` with the target alone, decoded by mlx-lm's own code.

    Greedy decoding and coupled sampling are compared token for token. Other rules are
    compared by the distribution of the tokens. docs/exactness.md says what passes.

    Args:
        decoder: target, draft and engine settings.
        prompts: strings, chat messages or token ids.
        params: ``max_tokens``, ``temperature``, ``seed`` (the first prompt's; it grows
            by one with each prompt; default 0) and ``verification``.
        draws: decodings of each prompt if distributions are compared; 20 or more.
        max_restarts: how often a row is decoded again after a tie.
        ignore_chat_template: encode strings as they are.
        progress: called with what is being done, how many rows are done, the total,
            and the share of the work that is done.

    Raises:
        ConfigError: a setting has no counterpart in plain decoding.
        PromptError: a prompt cannot be used, or there is none.
    """
    params = params or SamplingParams()
    _check(decoder, params, draws, max_restarts)
    config = decoder.config
    plain = PlainTarget(
        separated(decoder.target.model),
        kv_bits=config.kv_bits,
        kv_group_size=config.kv_group_size,
        unpacks=defaults().unpacks,
    )
    drawn = params.temperature > 0 and params.verification != "coupled"
    tasks = []
    encoded = encode_all(
        decoder.tokenizer, prompts, ignore_chat_template=ignore_chat_template
    )
    for i, prompt in enumerate(encoded):
        prompt_params = replace(params, seed=(params.seed or 0) + i, logprobs=not drawn)
        try:
            tasks.append(Task(prompt, decoder.bounds.check(prompt, prompt_params)))
        except PromptError as error:
            raise error.of_prompt(i) from error
    if not tasks:
        raise PromptError("no prompts to verify: give one")
    show = progress or (lambda what, done, total, share: None)
    if drawn:
        return certify_distribution(decoder, plain, tasks, draws=draws, progress=show)
    return certify_tokens(
        decoder, plain, tasks, max_restarts=max_restarts, progress=show
    )


def _check(
    decoder: SpecDecoder, params: SamplingParams, draws: int, max_restarts: int
) -> None:
    require_int("draws", draws, MIN_DRAWS)
    require_int("max_restarts", max_restarts, 0)
    plain = SamplingParams()
    for field in fields(params):
        same = getattr(params, field.name) == getattr(plain, field.name)
        if field.name not in _COMPARED and not same:
            raise ConfigError(
                f"{field.name} is not verified: leave it out "
                f"({', '.join(_COMPARED)} are)"
            )
    config = decoder.config
    if config.max_kv_size is not None or (config.kv_bits and config.quantized_kv_start):
        name = "quantized_kv_start" if config.max_kv_size is None else "max_kv_size"
        raise ConfigError(
            f"{name} makes a row's output depend on how its tokens came: leave it "
            "out to verify"
        )
