"""``specdec advise``: whether a draft is worth it for a target, and how to use it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..config import MAX_AUTO_DRAFT_TOKENS, EngineConfig
from ..prompts import Encoding, PromptRecord, read_records
from ..sampling_params import SamplingParams
from ..utils.data_files import json_text
from ..utils.printable import counted, shorten
from ..utils.tables import text_table
from . import options, ranks
from .busy import busy_note, others_running
from .output import (
    places_named,
    share_text,
    show,
    show_warnings,
)
from .progress import Progress, Share, announce

if TYPE_CHECKING:
    from ..decoder import SpecDecoder
    from ..outputs import GenerationResult
    from ..spec_decode.draft_length import ForwardCosts
    from ..tools.advice import Advice, Division


@click.command(
    cls=options.Command,
    short_help="Find out whether a draft is worth it, and how to use it.",
)
@options.models(draft_default="auto")
@options.prompts(
    help="Prompts like those to come, one per line; '-' reads standard input."
)
@options.num_prompts(default=20, help="Decode the first N of them.")
@options.max_tokens(
    default=48, low=2, help="Generate at most N tokens for each prompt."
)
@options.positive(
    "--num-draft-tokens",
    high=MAX_AUTO_DRAFT_TOKENS,
    default=4,
    help="Measure acceptance at N positions; it is extrapolated beyond them.",
)
@options.batches(default=(1, 8), help="Batch size to predict for; repeat it for more.")
@options.temp()
@options.ignore_chat_template()
@click.option(
    "--tensor-parallel",
    "devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="Time rounds with the target divided between N devices of this machine, too. "
    "[default: all that CUDA has]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options.quiet()
def advise(
    *,
    models: options.Models,
    file: str,
    num_prompts: int,
    max_tokens: int,
    num_draft_tokens: int,
    batch_sizes: tuple[int, ...],
    temp: float,
    ignore_chat_template: bool,
    devices: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Decode a few prompts, time forwards, and predict the speed-up of drafting.

    With several devices, rounds are timed on one and with the target divided between
    all.

    \b
      specdec advise --prompts questions.jsonl
      specdec advise --target Qwen/Qwen3-4B --prompts questions.jsonl
      specdec advise --target MODEL --draft MODEL --prompts questions.jsonl
    """  # noqa: D301 - click's mark for lines to keep
    if models.spec is None and models.draft is None:
        models = models.automatic()
    if models.spec is None:
        raise click.UsageError("there is no draft to advise on: name one with --draft")
    show_warnings(notes=not quiet)
    records = read_records(file)[:num_prompts]
    sizes = sorted(set(batch_sizes))
    config = EngineConfig(batch_size=sizes[0], num_draft_tokens=num_draft_tokens)
    loading = models.arguments(config)
    decoder, _ = ranks.load(None, quiet=quiet, **loading)
    announce(
        f"decoding {counted(len(records), 'prompt')}, then timing forwards at batch "
        f"{', '.join(map(str, sizes))}",
        quiet=quiet,
    )
    from ..backend import describe
    from ..model_names import short
    from ..tools.advice import advice_of

    params = SamplingParams(max_tokens=max_tokens, temperature=temp, seed=0)
    encoding: Encoding = {"ignore_chat_template": ignore_chat_template}
    others = others_running()
    results = _decode(decoder, records, params, encoding, quiet=quiet)
    stats = decoder.stats
    stats.check_draft()
    others += others_running()
    costs = _time_forwards(decoder, sizes, quiet=quiet)
    busy = busy_note(others + others_running())
    most = min(MAX_AUTO_DRAFT_TOKENS, decoder.max_proposals or MAX_AUTO_DRAFT_TOKENS)
    advice, sureness = advice_of(results, costs, sizes, most, busy=bool(busy))
    target, draft = decoder.target_name, decoder.draft_name
    longest = decoder.max_draft_tokens
    del decoder
    division = _divide(loading, advice, devices, quiet=quiet)
    if as_json:
        record = {
            "target": target,
            "draft": draft,
            "vocabulary_share": stats.vocabulary_share,
            "prompts": len(records),
            "prompts_file": file,
            "rounds": stats.row_rounds,
            "machine": describe(),
            **asdict(advice),
            "verdict": advice.verdict,
            "worth_it": advice.worth_it,
            **asdict(sureness),
            "sure": sureness.sure,
        }
        if division is not None:
            record["division"] = {**asdict(division), "verdict": division.verdict}
        show(json_text(record, indent=2))
        return
    show(
        f"target: {short(target)}\n"
        f"draft:  {draft}{share_text(stats.vocabulary_share)}\n"
        f"{counted(len(records), 'prompt')} of "
        f"{'standard input' if file == '-' else shorten(file)}, "
        f"{counted(stats.row_rounds, 'round')} of up to "
        f"{counted(longest, 'draft token')}\n\n{_table(advice)}\n\n"
        f"from {counted(len(results), 'prompt')}: {sureness.words}"
    )
    if busy:
        show(busy)
    if division is not None:
        if division.alone:
            show(f"\n{_division_table(division)}")
        show(f"{division.devices} devices: {division.verdict}")
    show(f"verdict{'' if sureness.sure else ' (unsure)'}: {advice.verdict}")


def _decode(
    decoder: SpecDecoder,
    records: Sequence[PromptRecord],
    params: SamplingParams,
    encoding: Encoding,
    *,
    quiet: bool,
) -> list[GenerationResult]:
    """Decode the prompts with the draft, and show how many are done."""
    with places_named(records):
        prompts = [record.prompt for record in records]
        events = decoder.stream(prompts, params, **encoding)
    results = []
    share = Share(len(records), params.max_tokens)
    with Progress("prompt", len(records), quiet=quiet) as progress:
        progress.add(0, what="decoding")
        for event in events:
            if event.result is not None:
                results.append(event.result)
            ended = event.result is not None
            share.take(event.index, len(event.token_ids), done=ended)
            progress.add(ended, what="decoding", share=share)
    return results


def _time_forwards(
    decoder: SpecDecoder, sizes: Sequence[int], *, quiet: bool
) -> ForwardCosts:
    """Time the forwards of both models at each batch size."""
    from ..spec_decode.draft_length import ForwardCosts

    costs = ForwardCosts()
    with Progress("batch size", len(sizes), quiet=quiet) as progress:
        for size in sizes:
            progress.add(0, what=f"timing forwards of {size}")
            costs.add(decoder.measure_forwards(size))
            progress.add(1, what=f"timing forwards of {size}")
    return costs


def _divide(
    loading: Mapping[str, Any], advice: Advice, devices: int | None, *, quiet: bool
) -> Division | None:
    """Time the advised rounds on one device and on several; ``None``: there is one."""
    import mlx.core as mx

    from ..tools.advice import WORTH_IT, Division
    from .timing import count_devices, seconds_of_rounds

    devices = devices or count_devices()
    if devices == 1:
        return None
    batches = tuple(
        (p.num_rows, p.best if p.speedup[p.best] >= WORTH_IT else 0)
        for p in advice.predictions
    )
    gc.collect()  # the models leave the device
    mx.clear_cache()
    times: list[tuple[float, ...]] = []
    with Progress("timing", 2, quiet=quiet) as progress:
        for number in (1, devices):
            what = f"timing rounds on {counted(number, 'device')}"
            progress.add(0, what=what)
            seconds = seconds_of_rounds(loading, batches, number)
            if isinstance(seconds, str):
                return Division(devices, batches, problem=seconds)
            times.append(tuple(seconds))
            progress.add(1, what=what)
    alone, divided = times
    return Division(devices, batches, alone, divided)


def _division_table(division: Division) -> str:
    columns = zip(
        division.batches,
        division.alone,
        division.divided,
        division.speedup,
        strict=True,
    )
    rows = [
        ["ms of a round", "1 device", f"{division.devices} devices", "times as fast"],
        *(
            [f"batch {b}, k = {k}", f"{one * 1e3:.1f}", f"{all_ * 1e3:.1f}", f"{x:.2f}"]
            for (b, k), one, all_, x in columns
        ),
    ]
    return text_table(rows, align="right")


def _table(advice: Advice) -> str:
    def numbers(values: Iterable[float], mark: int = -1) -> list[str]:
        return [f"{x:.2f}{'*' if i == mark else ' '}" for i, x in enumerate(values)]

    most = len(advice.survival)
    beyond = f" (extrapolated beyond {advice.measured})" * (advice.measured < most)
    rows = [
        ["draft tokens k", *(f"{k} " for k in range(most + 1))],
        ["rounds accepting at least k", *numbers([1.0, *advice.survival])],
    ]
    for p in advice.predictions:
        rows += [
            [f"batch {p.num_rows}: verify, in plain steps", *numbers(p.verify)],
            [f"batch {p.num_rows}: predicted speed-up", *numbers(p.speedup, p.best)],
        ]
    steps = [
        f"batch {p.num_rows}: a plain step takes {p.plain_seconds * 1e3:.1f} ms, "
        + (
            f"drafting {p.draft_once:.2f} of it and {p.draft_step:.2f} for each token"
            if p.draft_once
            else f"a draft step {p.draft_step:.2f} of it"
        )
        for p in advice.predictions
    ]
    shares = f"share of rounds accepting at least k tokens{beyond}; * is the best k"
    return "\n".join([shares, text_table(rows, align="right"), "", *steps])
