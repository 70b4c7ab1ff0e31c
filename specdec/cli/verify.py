"""``specdec verify``: compares the engine with plain decoding, and gives a verdict."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..config import DEFAULT_BATCH_SIZE, EngineConfig
from ..prompts import read_records
from ..sampling_params import SamplingParams
from ..utils.printable import counted
from . import options, ranks
from .options import is_given
from .output import (
    FAILURE,
    OutputFile,
    command_line,
    places_named,
    share_text,
    show,
    show_warnings,
)
from .progress import Progress, announce

if TYPE_CHECKING:
    from ..decoder import SpecDecoder
    from ..tools.parity import Certificate

# Enough rounds for caches to be written, trimmed and written again many times.
DEFAULT_MAX_TOKENS = 64
# Fixed, so that a certificate can be reproduced.
DEFAULT_NUM_DRAFT_TOKENS = 3
# A row's first token, a round of all its draft tokens, and the round after it.
TOKENS_BEYOND_DRAFT = 3


@click.command(
    cls=options.Command, short_help="Compare the output with plain decoding."
)
@options.models(
    draft_help="Draft, named as for `specdec run`. With none, batches are compared."
)
@options.engine(
    options.batch(
        default=DEFAULT_BATCH_SIZE, help="Prompts that the engine decodes together."
    ),
    options.positive(
        "--num-draft-tokens",
        default=DEFAULT_NUM_DRAFT_TOKENS,
        help="Tokens that the draft proposes in a round.",
    ),
    options.kv_bits(
        help="Store keys and values quantized, also in plain decoding. [default: not "
        "quantized]"
    ),
    options.kv_group_size(),
)
@options.prompts(
    help="Prompts, one per line: text, or JSON as for `specdec run`. '-' reads "
    "standard input."
)
@options.num_prompts(help="Take the first N prompts. [default: all]")
@options.max_tokens(
    help="Generate at most N tokens for each prompt. [default: "
    f"{DEFAULT_MAX_TOKENS}; for a distribution, a round and one token on either side]"
)
@options.temp()
@options.seed()
@options.verification(
    help="How sampled draft tokens are accepted. coupled is compared token for token, "
    "the others by the distribution of many draws."
)
@options.positive(
    "--draws",
    default=256,
    low=20,
    help="For a distribution: decode each prompt N times.",
)
@options.positive(
    "--max-restarts",
    default=16,
    low=0,
    help="Continue a prompt after a tie at most N times.",
)
@options.ignore_chat_template()
@options.file(
    "--json",
    "json_file",
    help="Write all measurements, with machine, versions and options, to FILE.",
)
@options.quiet()
def verify(
    *,
    models: options.Models,
    config: EngineConfig,
    file: str,
    num_prompts: int | None,
    max_tokens: int | None,
    temp: float,
    seed: int,
    verification: Any,
    draws: int,
    max_restarts: int,
    ignore_chat_template: bool,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Compare the engine's output with mlx-lm's plain decoding of the target alone.

    Where a prompt's tokens first differ, this is shown: the position, both tokens, how
    close they were, and how much this machine's rounding differs between the two shapes
    of forward (measured without a draft). A difference that rounding explains is a tie,
    and the comparison goes on after it. Any other is a failure, with exit code 1.

    \b
      specdec verify --draft self:4bit --prompts questions.jsonl --json exact.json
    """  # noqa: D301 - click's mark for lines to keep
    sampled = temp > 0 and verification != "coupled"
    _check_together(temp, sampled=sampled)
    if max_tokens is None:
        short = config.max_draft_tokens + TOKENS_BEYOND_DRAFT
        max_tokens = short if sampled else DEFAULT_MAX_TOKENS
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temp, seed=seed, verification=verification
    )
    records = read_records(file)[:num_prompts]
    output = OutputFile("--json", json_file, file) if json_file else None

    show_warnings(notes=not quiet)
    loading = models.arguments(config)
    decoder, _ = ranks.load(None, quiet=quiet, **loading)
    from ..tools.parity import certify, summary

    prompts = counted(len(records), "prompt")
    announce(
        f"decoding {prompts} {draws} times, to compare the tokens with the target's "
        "distribution"
        if sampled
        else f"decoding {prompts} with the engine, then one by one without it",
        quiet=quiet,
    )
    rows = len(records) * (draws if sampled else 1)
    with places_named(records), Progress("row", rows, quiet=quiet) as progress:

        def shown(what: str, done: int, total: int, share: float) -> None:
            progress.show(done, total, what=what, share=lambda: share)

        certificate = certify(
            decoder,
            [record.prompt for record in records],
            params,
            draws=draws,
            max_restarts=max_restarts,
            ignore_chat_template=ignore_chat_template,
            progress=shown,
        )
    if output is not None:
        settings = {
            "prompts": file,
            "num_prompts": len(records),
            "max_tokens": max_tokens,
            "batch_size": config.batch_size,
            "num_draft_tokens": config.num_draft_tokens if decoder.draft_name else 0,
            "temperature": temp,
            "seed": seed,
            "verification": verification,
            "kv_bits": config.kv_bits,
            "kv_group_size": config.kv_group_size if config.kv_bits else None,
            **models.loading,
            "ignore_chat_template": ignore_chat_template,
            "max_restarts": max_restarts,
        }
        output.write(_record(decoder, certificate, settings), indent=1)
    show(_header(decoder, certificate, params))
    show(summary(certificate))
    if not certificate.passed:
        sys.exit(FAILURE)


def _check_together(temp: float, *, sampled: bool) -> None:
    """Refuse options without effect, before a model is loaded."""
    if is_given("seed") and temp == 0:
        raise click.UsageError("--seed needs --temp: at 0 nothing is drawn")
    if is_given("draws") and not sampled:
        raise click.UsageError("--draws needs --verification rejection or block")
    if is_given("max_restarts") and sampled:
        raise click.UsageError("--max-restarts is for a comparison token for token")


def _header(
    decoder: SpecDecoder, certificate: Certificate, params: SamplingParams
) -> str:
    from ..model_names import short

    draft, k = decoder.draft_name, decoder.max_draft_tokens
    how = "greedy"
    if params.temperature:
        how = f"temperature {params.temperature:g}, {params.verification}"
    rate = certificate.accepted / certificate.drafted if certificate.drafted else 0.0
    bits = decoder.config.kv_bits
    packed = f", keys and values in {bits} bits" if bits else ""
    return (
        f"target:  {short(decoder.target_name)}\n"
        f"draft:   {f'{short(draft)}, up to {k} a round' if draft else 'none'}"
        f"{share_text(decoder.stats.vocabulary_share)}"
        f"{f', acceptance rate {rate:.3f}' if certificate.drafted else ''}\n"
        f"decoded: {how}, batch {decoder.config.batch_size}, "
        f"up to {params.max_tokens} tokens{packed}\n"
    )


def _record(
    decoder: SpecDecoder, certificate: Certificate, options: dict[str, object]
) -> dict[str, object]:
    from ..backend import describe

    return {
        "verdict": certificate.verdict,
        "passed": certificate.passed,
        "command": command_line(),
        "machine": describe(),
        "target": decoder.target_name,
        "draft": decoder.draft_name,
        "vocabulary_share": decoder.stats.vocabulary_share,
        "options": options,
        "result": certificate.to_dict(),
    }
