"""Plain decoding, every fixed draft length, and auto: one run, taking turns."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx_lm.generate import wired_limit

from benchmarks.common import (
    Script,
    encode_prompts,
    header_of,
    in_time,
    minutes_option,
    without_rows,
    write_report,
)
from specdec import EngineConfig
from specdec.config import NumDraftTokens
from specdec.decoder import SpecDecoder
from specdec.draft_names import DraftSpec
from specdec.errors import ConfigError
from specdec.model_names import short
from specdec.models import LoadedModel
from specdec.spec_decode import (
    DraftContext,
    DrafterFactory,
    DraftModel,
    NamedDrafter,
    Proposals,
    Round,
)
from specdec.tools.bench.engine import engine
from specdec.tools.bench.measure import measure
from specdec.tools.bench.models import load_model, random_prompts, token_level
from specdec.tools.bench.tables import markdown_table, show_spread
from specdec.tools.bench.waves import (
    Options,
    Record,
    full_rate,
    quiet_rate,
    rate,
    total,
)

TITLE = "Draft lengths"
WRONG = "wrong:"
WAVES = (
    "*all running*: while every row of the batch was, as where others take the places "
    "of those that end; batches here end with the rows that accept least. "
)
OTHERS_WAIT = (
    "Others wait to take the places of rows that end: all rates are of the time in "
    "which every row of a batch was running, until its first one ended. "
)


class WrongRows:
    """Rows of a draft model whose every proposal is another token than it chose."""

    def __init__(self, rows: Any, vocab_size: int):
        self._rows, self._vocab_size = rows, vocab_size

    def propose(self, round_: Round) -> Proposals:
        proposals: Proposals = self._rows.propose(round_)
        return replace(proposals, tokens=(proposals.tokens + 1) % self._vocab_size)

    def prefill(self) -> Iterator[None]:
        yield from self._rows.prefill()

    def extend(self, other: WrongRows) -> None:
        self._rows.extend(other._rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class WrongDraft(DraftModel):
    """A draft model that costs what it costs and is never right."""

    def rows(self, prompts: Any, *, max_length: int) -> Any:
        rows = super().rows(prompts, max_length=max_length)
        return WrongRows(rows, self.vocab_size)


def factory(name: str, target: LoadedModel, dtype: str | None) -> DrafterFactory:
    """A draft as commands name it, ``random:SHAPE:LAYERS``, or ``wrong:`` and one."""
    source = name.removeprefix(WRONG)
    if not source or WRONG in source:
        raise ConfigError(f"{name}: {WRONG} stands before the name of a model")
    if source.startswith("random:"):
        named = NamedDrafter(source, load_model(source, dtype))
    else:
        named = NamedDrafter.load(DraftSpec.parse(source), target, dtype=dtype)
    model = named.model and token_level(named.model.model)
    if source == name:
        return replace(named, model=model)
    if model is None or named.ngram is not None:
        raise ConfigError(f"{name}: {WRONG} stands before the name of a model")

    def make(context: DraftContext) -> DraftModel:
        return WrongDraft(
            context.runner(model),
            vocab_size=context.vocab_size,
            max_draft_tokens=context.max_draft_tokens,
        )

    return make


def key_of(draft: str, batch_size: int, k: NumDraftTokens) -> str:
    return f"{draft} B={batch_size} k={k}"


def table(
    drafts: Sequence[str],
    batches: Sequence[int],
    ks: Sequence[int],
    records: dict[str, list[Record]],
    *,
    others_wait: bool = False,
    quietly: bool = True,
) -> str:
    """A row per draft and batch; ratios are taken pass by pass."""
    rows = []
    counted = full_rate if others_wait else rate
    for draft in drafts:
        for b in batches:
            plain = records[key_of("plain", b, 0)][1:]
            fixed = {k: records[key_of(draft, b, k)][1:] for k in ks}
            auto = records[key_of(draft, b, "auto")][1:]
            best = max(ks, key=lambda k: statistics.median(map(counted, fixed[k])))
            against = fixed[best]
            if statistics.median(map(counted, plain)) > statistics.median(
                map(counted, against)
            ):
                best, against = 0, plain

            def ratios(
                a: list[Record],
                b: list[Record],
                of: Callable[[Record], float],
            ) -> str:
                pairs = [(of(x), of(y)) for x, y in zip(a, b, strict=True)]
                return show_spread([x / y for x, y in pairs if y], 3)

            steady = max(ks, key=lambda k: statistics.median(map(full_rate, fixed[k])))
            quiet_plain = quiet_rate(plain) or float("inf")
            quiet = {k: quiet_rate(fixed[k]) / quiet_plain for k in ks}
            limit = max(ks, key=lambda k: quiet[k])
            medians = [
                statistics.median(map(full_rate, passes)) for passes in (auto, plain)
            ]
            allowed = max(1.0, quiet[limit]) * medians[1]
            share = medians[0] / allowed if allowed else 0.0
            chosen: Counter[int] = Counter()
            for record in auto:
                for wave in record["waves"]:
                    chosen.update(k for k, _ in wave.get("rounds", ()))
            drafted = sum(total(r, "drafted") for rs in fixed.values() for r in rs)
            accepted = sum(total(r, "accepted") for rs in fixed.values() for r in rs)
            rows.append(
                [
                    "wrong" if draft.startswith(WRONG) else Path(draft).name,
                    b,
                    show_spread([counted(r) for r in plain]),
                    *(show_spread([counted(r) for r in fixed[k]]) for k in ks),
                    show_spread([counted(r) for r in auto]),
                    ratios(auto, plain, counted),
                    f"{ratios(auto, against, counted)} (k={best})",
                    *(
                        ()
                        if others_wait
                        else (
                            f"{ratios(fixed[steady], plain, full_rate)} (k={steady})",
                            ratios(auto, plain, full_rate),
                        )
                    ),
                    *(
                        (
                            f"{quiet[limit]:.3f} (k={limit})",
                            f"{quiet_rate(auto) / quiet_plain:.3f}",
                            f"{share:.3f}",
                        )
                        if quietly
                        else ()
                    ),
                    f"{accepted / drafted:.3f}" if drafted else "-",
                    " ".join(f"{k}:{n}" for k, n in sorted(chosen.items())),
                ]
            )
    header = [
        "draft",
        "B",
        "plain tok/s",
        *(f"k={k}" for k in ks),
        "auto",
        "auto / plain",
        "auto / best fixed",
        *(
            ()
            if others_wait
            else ("all running: best fixed / plain", "all running: auto / plain")
        ),
        *(
            ("quiet rounds: best fixed", "quiet rounds: auto", "share of the limit")
            if quietly
            else ()
        ),
        "acceptance rate",
        "auto's rounds by k",
    ]
    return markdown_table(header, rows)


def body(raw: dict[str, Any]) -> str:
    """What a raw result comes to, as Markdown."""
    options, records = raw["options"], raw["passes"]
    names = {
        short(key.rpartition(" B=")[0]): key.rpartition(" B=")[0] for key in records
    }
    explained = (
        f"Target {options['target']}, {options['dtype']}; {options['num_prompts']} "
        f"prompts, {options['max_tokens']} new tokens, greedy, no end of sequence. "
        f"Median (smallest to largest) of {options['repeat']} interleaved passes after "
        "the first, in which costs are measured where they are not on disk; ratios are "
        "taken pass by pass. *auto / best fixed*: against the best of all k by its "
        "median, 0 included. " + (OTHERS_WAIT if options["others_wait"] else WAVES)
    )
    # On a CPU a round that drafts is waited for, and others are read two at a time.
    quietly = raw["machine"]["backend"] != "cpu"
    if quietly:
        explained += (
            "*quiet rounds*: over plain decoding, all rows running, were every round "
            "as long as the quickest twentieth of its k take at most, over all passes. "
            "*share of the limit*: auto over plain decoding, medians with all rows "
            "running, over what those rounds allow the best of all k, 0 included."
        )
    explained = f"{explained.rstrip()} *acceptance rate*: of all fixed k together."
    return f"{explained}\n\n" + table(
        [names[draft] for draft in options["drafts"]],
        options["batch"],
        options["num_draft_tokens"],
        records,
        others_wait=options["others_wait"],
        quietly=quietly,
    )


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", required=True, help="Folder, hub id, .gguf, random:SHAPE.")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    required=True,
    help="As specdec run names drafts, or random:SHAPE:LAYERS; wrong:MODEL proposes "
    "other tokens than the model. Repeat it.",
)
@click.option("--prompts", "path", help="Prompt file; needed unless random.")
@click.option("--prompt-tokens", default=32, help="Random prompts without --prompts.")
@click.option("--num-prompts", default=8)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(1, 2, 4))
@click.option("--max-tokens", default=64)
@click.option("--repeat", default=3, help="Passes after the first.")
@click.option(
    "--others-wait",
    is_flag=True,
    help="Others wait to take the places of rows that end; what is counted ends with "
    "the first row of a wave.",
)
@minutes_option
@click.option("--dtype", default="bfloat16")
@click.option("--ignore-chat-template", is_flag=True)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    drafts: tuple[str, ...],
    path: str | None,
    prompt_tokens: int,
    num_prompts: int,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    max_tokens: int,
    repeat: int,
    others_wait: bool,
    minutes: float | None,
    dtype: str,
    ignore_chat_template: bool,
    out: str | None,
) -> None:
    """Compare auto with plain decoding and with every fixed k."""
    if path and target.startswith("random:"):
        raise ConfigError("--prompts needs a tokenizer, which a random model lacks")
    if repeat < 1:
        raise click.UsageError("--repeat must be 1 or more")
    loaded = load_model(target, dtype)
    bare = token_level(loaded.model)
    if path:
        prompts = encode_prompts(
            loaded.tokenizer,
            path,
            num_prompts,
            ignore_chat_template=ignore_chat_template,
        )
    else:
        vocab_size = loaded.model(mx.array([[0]])).shape[-1]
        prompts = random_prompts(num_prompts, prompt_tokens, vocab_size)
    options = Options(max_tokens, 512)
    runs: dict[str, Callable[[], Record]] = {}

    def add(name: str, made: DrafterFactory | None, b: int, k: NumDraftTokens) -> None:
        config = EngineConfig(batch_size=b, num_draft_tokens=k)

        # One decoder for all passes: what auto has learnt, and graphs that were
        # compiled, serve the next wave, as in a server.
        @cache
        def make() -> SpecDecoder:
            return SpecDecoder(bare, drafter=made, config=config)

        def run() -> Record:
            run = engine(make, options, others_wait=others_wait)
            return measure(run, prompts, b)

        runs[key_of(name, b, k)] = run

    made = {name: factory(name, loaded, dtype) for name in drafts}
    for b in batches:
        add("plain", None, b, 0)
        for name in drafts:
            for k in (*ks, "auto"):
                add(name, made[name], b, k)  # type: ignore[arg-type]
    records: dict[str, list[Record]] = {key: [] for key in runs}
    with wired_limit(loaded.model):
        for number, key, record in in_time(runs, repeat + 1, minutes):
            found = full_rate(record) if others_wait else rate(record)
            print(f"pass {number}: {key}: {found:.1f} tok/s", file=sys.stderr)
            record.pop("tokens", None)
            record["decode_tokens_per_second"] = found
            records[key].append(without_rows(record))

    repeat = len(next(iter(records.values()))) - 1
    raw = header_of(TITLE)
    raw["options"] = {
        "target": short(target),
        "drafts": [short(d) for d in drafts],
        "prompts": path and short(path),
        "num_prompts": len(prompts),
        "batch": list(batches),
        "num_draft_tokens": list(ks),
        "max_tokens": max_tokens,
        "repeat": repeat,
        "others_wait": others_wait,
        "minutes": minutes,
        "dtype": dtype,
    }
    raw["passes"] = records
    write_report(out, raw, body(raw))


if __name__ == "__main__":
    main()
