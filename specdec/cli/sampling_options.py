"""The options of ``specdec run`` that say how each prompt is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..sampling_params import DEFAULT_MAX_TOKENS, VERIFICATIONS, SamplingParams
from . import options
from .options import is_given

F = TypeVar("F", bound=Callable[..., Any])


def _biases(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    """Token ids and what is added to their logits, from texts ``ID=BIAS``."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is not of the form ID=BIAS, as in 1234=-5"
            ) from None
    return biases or None


_OPTIONS = (
    options.max_tokens(
        "Most tokens to generate for a prompt.", default=DEFAULT_MAX_TOKENS
    ),
    options.positive(
        "--min-tokens",
        text="Tokens to generate before one may end a prompt's output.",
        default=0,
        low=0,
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="End where this text would come; repeat it for more.",
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        multiple=True,
        type=click.IntRange(min=0),
        metavar="ID",
        help="End where this token would come; repeat it for more.",
    ),
    options.temp(),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        show_default=True,
        help="Draw from the likeliest tokens that together have probability P.",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        show_default=True,
        help="Draw from tokens at least P times as likely as the likeliest.",
    ),
    click.option(
        "--top-k",
        type=int,
        metavar="K",
        default=0,
        show_default=True,
        help="Draw from the K likeliest tokens; 0: from all.",
    ),
    click.option(
        "--xtc-probability",
        type=float,
        metavar="P",
        default=0.0,
        show_default=True,
        help="At each token, with probability P, leave out all tokens above "
        "--xtc-threshold but the least likely of them.",
    ),
    click.option(
        "--xtc-threshold",
        type=float,
        metavar="P",
        default=0.1,
        show_default=True,
        help="The probability above which XTC leaves tokens out.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Divide positive, multiply negative logits of the newest 20 tokens by X.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="Take X off the logits of the newest 20 tokens.",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="The same, for every occurrence.",
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_biases,
        metavar="ID=BIAS",
        help="Add BIAS to the logit of token ID (-inf forbids it); repeat it for more.",
    ),
    options.seed(random=True),
    click.option(
        "--verification",
        type=click.Choice(VERIFICATIONS),
        default="coupled",
        show_default=True,
        help="How draft tokens are accepted, with --temp and --draft. Only coupled "
        "gives the same text with every draft.",
    ),
    click.option(
        "--top-logprobs",
        type=click.IntRange(min=0),
        metavar="N",
        help="Write log-probabilities of tokens, and of the N likeliest at each "
        "position, to --output.",
    ),
)


def sampling_options(command: F) -> F:
    """Give ``command`` the options; it hands their values to :func:`params_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def params_of(
    *,
    drafts: bool,
    output_file: str | None,
    temp: float,
    top_logprobs: int | None,
    **same_names: Any,
) -> SamplingParams:
    """What the options ask for.

    Args:
        drafts: whether anything proposes tokens.

    Raises:
        click.UsageError: an option is left without effect by another.
        ConfigError: a value is out of range.
    """
    if is_given("verification") and (temp == 0 or not drafts):
        missing = "a draft (--draft)" if not drafts else "--temp above 0"
        raise click.UsageError(
            f"--verification needs {missing}: without it all are the same"
        )
    if top_logprobs is not None and output_file is None:
        raise click.UsageError("--top-logprobs needs --output: name a file for them")
    return SamplingParams(
        temperature=temp,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        **same_names,
    ).seeded()
