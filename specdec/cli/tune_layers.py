"""``specdec tune-layers``: which layers of a target make a good draft."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..prompts import read_records
from . import options
from .interrupts import last_words
from .progress import Progress
from .prompts import places_named
from .quiet import silence_third_parties
from .report import INTERRUPTED
from .streams import show

if TYPE_CHECKING:
    from ..tools.tuning import Candidate

# For each layer of the target: one alone, four that a step tries, one to exchange.
_EVALUATIONS_PER_LAYER = 6


@click.command("tune-layers", short_help="Find layers of a target that make a draft.")
@options.target()
@options.prompts("Prompts like those that will be decoded: as for specdec run.")
@options.num_prompts("Use the first N of them.", default=4)
@options.max_tokens(
    "Tokens that the target writes for each, to be agreed with.", default=32, low=2
)
@options.positive(
    "--layers",
    "keep",
    text="Layers to keep. [default: as many as the best predicted speed-up has]",
)
@options.positive(
    "--max-evaluations",
    text="Most sets of layers to try; each takes a forward of all these texts. "
    f"[default: {_EVALUATIONS_PER_LAYER} for each layer of the target]",
    low=2,
)
@options.dtype()
@options.trust_remote_code()
@options.ignore_chat_template()
@options.quiet()
def tune_layers(
    *,
    target: str | None,
    file: str,
    num_prompts: int,
    max_tokens: int,
    keep: int | None,
    max_evaluations: int | None,
    dtype: str | None,
    trust_remote_code: bool,
    ignore_chat_template: bool,
    quiet: bool,
) -> None:
    """Search for the layers to name in --draft layers:SPEC.

    The target writes an answer to each prompt. Sets of its layers are then judged by
    how often they choose the same next token, and by how few they are. The table
    shows the best set of each size; the last line, what to use.

    \b
      specdec tune-layers --target MODEL --prompts questions.jsonl
    """  # noqa: D301 - click's mark for lines to keep
    options.check_target(target)
    records = read_records(file)[:num_prompts]
    prompts = [record.prompt for record in records]
    silence_third_parties()
    from ..backend import defaults
    from ..decoder import SpecDecoder
    from ..errors import ConfigError
    from ..model_names import target_name
    from ..models import load
    from ..models.layers import check_trunk, layers_of
    from ..prompts import encode_all
    from ..sampling_params import SamplingParams
    from ..tools.tuning import Agreement, ranked, search_layers

    loaded = load(target_name(target), dtype=dtype, trust_remote_code=trust_remote_code)
    check_trunk(loaded.model, loaded.name, "skipping layers")
    num_layers = len(layers_of(loaded.model))
    if keep is not None and keep >= num_layers:
        raise ConfigError(
            f"--layers is {keep}: the target has {num_layers}, keep fewer"
        )
    budget = max_evaluations or _EVALUATIONS_PER_LAYER * num_layers
    decoder = SpecDecoder(loaded)
    with places_named(records):
        events = decoder.stream(
            prompts,
            SamplingParams(max_tokens=max_tokens),
            ignore_chat_template=ignore_chat_template,
        )
    answers: dict[int, list[int]] = {}
    with Progress("prompt", len(prompts), quiet=quiet) as progress:
        progress.add(0, what="answering")
        for event in events:
            if event.result is not None:
                answers[event.index] = event.result.token_ids
            progress.add(event.result is not None, what="answering")
    encoded = encode_all(
        loaded.tokenizer, prompts, ignore_chat_template=ignore_chat_template
    )
    agreement = Agreement(
        loaded,
        [(e.token_ids, answers[i]) for i, e in enumerate(encoded)],
    )
    if not agreement.num_tokens:
        raise ConfigError("the target ends every prompt at once: give it other prompts")
    if not quiet:
        show(
            f"trying up to {budget} sets of layers on {agreement.num_tokens} tokens of "
            f"{len(prompts)} prompts",
            err=True,
        )
    tried: list[Candidate] = []

    def conclude(*, interrupted: bool) -> None:
        """Tell what was found so far."""
        if interrupted:
            kept = ": the best of them" if tried else ""
            sets = f"{len(tried)} sets were tried{kept}"
            show(f"specdec: interrupted: {sets}", err=True)
        if tried:
            show("\n".join(_table(ranked(tried, keep), agreement.num_tokens)))

    def note(candidate: Candidate) -> None:
        tried.append(candidate)
        progress.add(1)

    progress = Progress("set", budget, quiet=quiet, time_left=True)
    try:
        with progress, last_words(lambda: conclude(interrupted=True)):
            search_layers(
                agreement, num_layers, keep=keep, max_evaluations=budget, progress=note
            )
    except KeyboardInterrupt:
        conclude(interrupted=True)
        sys.exit(INTERRUPTED)
    conclude(interrupted=False)
    if defaults().name == "cpu" and not quiet:
        show(
            "specdec: note: on a CPU verifying costs nearly as much as decoding, so "
            "these speed-ups are not to be had: specdec advise tells",
            err=True,
        )


def _table(found: list[Candidate], num_tokens: int) -> list[str]:
    best = found[0]
    by_size = {len(c.layers): c for c in reversed(found)}
    lines = [
        f"agreement with {num_tokens} tokens of the target; speed-up predicted for "
        "k draft tokens, with verification as cheap as a step",
        f"{'layers':>6}  {'agreement':>9}  {'k':>2}  {'speed-up':>8}  draft",
    ]
    for size in sorted(by_size, reverse=True):
        c = by_size[size]
        mark = "  <- best" if c == best else ""
        lines.append(
            f"{size:>6}  {c.agreement:>9.3f}  {c.best_k:>2}  {c.best_speed_up:>8.2f}"
            f"  {c.name}{mark}"
        )
    if best.best_speed_up <= 1:
        lines.append("none of them is predicted to be faster than no draft")
    else:
        lines.append(f"use: --draft {best.name} --num-draft-tokens {best.best_k}")
    return lines
