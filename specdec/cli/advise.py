"""``specdec advise``: whether a draft pays for a target, and how to use it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..config import MAX_AUTO_DRAFT_TOKENS, EngineConfig
from ..prompts import read_records
from ..sampling_params import SamplingParams
from ..utils.data_files import json_text
from . import options
from .progress import Progress
from .prompts import places_named
from .quiet import silence_third_parties
from .streams import show

if TYPE_CHECKING:
    from ..spec_decode.draft_length import Advice


@click.command(short_help="Tell whether a draft pays, and with which settings.")
@options.target()
@options.draft()
@options.prompts("Prompts like those to come, one a line; '-' reads standard input.")
@options.num_prompts("Decode the first N of them.", default=20)
@options.max_tokens("Tokens to generate for a prompt.", default=48, low=2)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(1, MAX_AUTO_DRAFT_TOKENS),
    metavar="N",
    default=4,
    show_default=True,
    help="Positions at which acceptance is measured; beyond, it is continued.",
)
@options.batches("Batch size to predict for; repeat it for more.", default=(1, 8))
@options.temp()
@options.dtype()
@options.trust_remote_code()
@options.ignore_chat_template()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options.quiet()
def advise(
    *,
    target: str | None,
    draft: str | None,
    file: str,
    num_prompts: int,
    max_tokens: int,
    num_draft_tokens: int,
    batch_sizes: tuple[int, ...],
    temp: float,
    dtype: str | None,
    trust_remote_code: bool,
    ignore_chat_template: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Decode a few prompts, time forwards, and say what drafting would bring.

    \b
      specdec advise --prompts questions.jsonl
      specdec advise --target MODEL --draft MODEL --prompts questions.jsonl
    """  # noqa: D301 - click's mark for lines to keep
    if options.check_pair(target, draft) is None:
        raise click.UsageError("there is no draft to advise on: name one with --draft")
    records = read_records(file)[:num_prompts]
    silence_third_parties()
    from ..backend import describe
    from ..decoder import SpecDecoder
    from ..model_names import short
    from ..spec_decode.draft_length import ForwardCosts, survival_of
    from ..spec_decode.draft_length import advise as advice_of

    sizes = sorted(set(batch_sizes))
    config = EngineConfig(batch_size=sizes[0], num_draft_tokens=num_draft_tokens)
    decoder = SpecDecoder.from_pretrained(
        target,
        draft,
        dtype=dtype,
        config=config,
        trust_remote_code=trust_remote_code,
    )
    with places_named(records):
        events = decoder.stream(
            [record.prompt for record in records],
            SamplingParams(max_tokens=max_tokens, temperature=temp, seed=0),
            ignore_chat_template=ignore_chat_template,
        )
    with Progress("prompt", len(records), quiet=quiet) as progress:
        for event in events:
            progress.add(event.result is not None, what="decoding")
    stats = decoder.stats
    stats.check_draft()
    survival = survival_of(
        stats.drafted_at,
        stats.accepted_at,
        rounds=stats.row_rounds,
        rows=stats.prompts,
    )
    costs = ForwardCosts()
    with Progress("batch size", len(sizes), quiet=quiet) as progress:
        for b in sizes:
            progress.add(0, what=f"timing forwards of {b}")
            costs.add(decoder.measure_forwards(b))
            progress.add(1, what=f"timing forwards of {b}")
    found = advice_of(survival, costs, sizes, MAX_AUTO_DRAFT_TOKENS)
    if as_json:
        record = {
            "target": decoder.target_name,
            "draft": decoder.draft_name,
            "prompts": len(records),
            "rounds": stats.row_rounds,
            "machine": describe(),
            **asdict(found),
            "verdict": found.verdict,
            "worth_it": found.worth_it,
        }
        show(json_text(record, indent=2))
        return
    show(
        f"target: {short(decoder.target_name)}\ndraft:  {decoder.draft_name}\n"
        f"{len(records)} prompts, {stats.row_rounds} rounds of {num_draft_tokens}\n"
    )
    show(_tables(found))
    show(f"\nverdict: {found.verdict}")


def _tables(found: Advice) -> str:
    def numbers(values: list[float] | tuple[float, ...], mark: int = -1) -> str:
        return "".join(
            f"{value:>7.2f}{'*' if i == mark else ' '}"
            for i, value in enumerate(values)
        )

    most = len(found.survival)
    lines = [
        f"{'draft tokens k':<22}" + "".join(f"{k:>7} " for k in range(most + 1)),
        f"{'accepted, at least k':<22}" + numbers([1.0, *found.survival]),
    ]
    if found.measured < most:
        lines[-1] += f" (continued behind {found.measured})"
    for p in found.predictions:
        lines += [
            f"batch {p.num_rows}: plain step {p.plain_seconds * 1e3:.1f} ms, "
            f"draft step {p.draft_step:.2f} of it",
            f"{'  verify, plain steps':<22}" + numbers(p.verify),
            f"{'  predicted speed-up':<22}" + numbers(p.speedup, p.best),
        ]
    return "\n".join(lines)
