"""Decode rates of mlx-lm and of this engine: one run, same model, same prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import click
import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.common import (
    MIB,
    Script,
    encode_prompts,
    header_of,
    in_time,
    minutes_option,
    write_report,
)
from specdec import EngineConfig, backend
from specdec.cuda.fused_linear import separated
from specdec.decoder import SpecDecoder
from specdec.errors import ConfigError
from specdec.model_names import short
from specdec.models import LoadedModel, check_same_vocabulary
from specdec.tools.bench.engine import engine
from specdec.tools.bench.measure import measure
from specdec.tools.bench.models import load_model, random_prompts, token_level
from specdec.tools.bench.peers import mlx_lm_batch, mlx_lm_plain, mlx_lm_speculative
from specdec.tools.bench.tables import markdown_table, show_spread
from specdec.tools.bench.waves import Options, Record, Run, rate, step_ms, total


@dataclass(frozen=True)
class System:
    """One line of the table."""

    name: str
    batch_size: int
    k: int | None
    run: Run

    @property
    def key(self) -> str:
        k = "" if self.k is None else f" k={self.k}"
        return f"{self.name} B={self.batch_size}{k}"


def make_systems(
    target: LoadedModel,
    draft: LoadedModel | None,
    batches: Sequence[int],
    ks: Sequence[int],
    options: Options,
    *,
    read_bucket: int | None,
    lookahead: int | None,
) -> list[System]:
    """Plain first: the others' tokens are compared with its."""
    model, theirs = target.model, separated(target.model)
    defaults = backend.defaults()
    if lookahead is not None:
        defaults = replace(defaults, lookahead=lookahead)

    def ours(draft: Any, k: int, batch_size: int) -> Run:
        config = EngineConfig(
            batch_size=batch_size,
            num_draft_tokens=k,
            prefill_step_size=options.prefill_step_size,
            read_bucket=read_bucket,
        )

        @cache  # graphs that were compiled serve the next wave, as in a server
        def make() -> SpecDecoder:
            with patch.object(backend, "defaults", lambda: defaults):
                return SpecDecoder(
                    token_level(model, options.eos_token_ids),
                    None if draft is None else token_level(draft),
                    config=config,
                )

        return engine(make, options)

    made = [System("mlx-lm plain", 1, None, mlx_lm_plain(theirs, options))]
    drafts = [(k, draft.model) for k in ks] if draft else []
    for k, draft_model in drafts:
        run = mlx_lm_speculative(theirs, separated(draft_model), k, options)
        made.append(System("mlx-lm speculative", 1, k, run))
    for b in batches:
        run = mlx_lm_batch(theirs, options)
        made.append(System("mlx-lm batch_generate", b, None, run))
        run = ours(None, 0, b)
        made.append(System("specdec", b, None, run))
        for k, draft_model in drafts:
            run = ours(draft_model, k, b)
            made.append(System("specdec, draft", b, k, run))
    return made


# -- exactness -------------------------------------------------------------


def gap(model: Any, prompt: list[int], prefix: list[int]) -> dict[str, Any]:
    """How close the target's two best tokens behind ``prefix`` are.

    ``noise`` is the largest difference that the shape of the computation alone
    makes to a logit: all tokens in one forward, or the last one by itself.
    """
    tokens = mx.array([prompt + prefix])
    at_once = model(tokens)[0, -1].astype(mx.float32)
    cache = make_prompt_cache(model)
    if tokens.shape[1] > 1:
        model(tokens[:, :-1], cache=cache)
    alone = model(tokens[:, -1:], cache=cache)[0, -1].astype(mx.float32)
    best = mx.argsort(alone)[-2:][::-1]
    return {
        "top2": best.tolist(),
        "gap": (alone[best[0]] - alone[best[1]]).item(),
        "noise": mx.abs(at_once - alone).max().item(),
    }


def differences(
    model: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    tokens: list[list[int]],
    gaps: dict[tuple[int, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The first difference of every prompt whose tokens are not as expected.

    Args:
        gaps: of positions met before, by (prompt, position); filled here.
    """
    found: list[dict[str, Any]] = []
    for i, (want, got) in enumerate(zip(expected, tokens, strict=True)):
        if want == got:
            continue
        pairs = zip(want, got, strict=False)
        at = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
        at = min(len(want), len(got)) if at is None else at
        if (i, at) not in gaps:
            gaps[i, at] = gap(model, prompts[i], want[:at])
        found.append(
            {
                "prompt": i,
                "position": at,
                "expected": want[at] if at < len(want) else None,
                "got": got[at] if at < len(got) else None,
                **gaps[i, at],
            }
        )
    return found


# -- report ----------------------------------------------------------------


def equality(record: Record, number: int) -> str:
    differing = record["differences"]
    text = f"{number - len(differing)}/{number}"
    if differing:
        d = max(differing, key=lambda d: d["gap"])
        text += f", gap at most {d['gap']:.3g} (noise {d['noise']:.2g})"
    return text


def table(made: Sequence[System], records: dict[str, list[Record]], n: int) -> str:
    """One row per system: the first pass, and the spread of those after it."""
    rows = []
    for system in made:
        cold, *warm = records[system.key]
        peer = records.get(f"mlx-lm batch_generate B={system.batch_size}")
        against = "-"
        if peer and peer is not records[system.key]:
            ratios = [
                rate(a) / rate(b)
                for a, b in zip(warm, peer[1:], strict=True)
                if rate(b)
            ]
            against = show_spread(ratios, 3) if ratios else "-"
        drafted, rounds = total(cold, "drafted"), total(cold, "row_rounds")
        accepted = total(cold, "accepted")
        peak = [r["peak_memory_bytes"] - r["memory_before_bytes"] for r in warm]
        rows.append(
            [
                system.name,
                system.batch_size,
                "-" if system.k is None else system.k,
                show_spread([rate(r) for r in warm]),
                against,
                f"{rate(cold):.1f}",
                show_spread([step_ms(r) for r in warm], 2),
                show_spread([total(r, "wall_seconds") for r in warm], 2),
                f"{max(peak) / MIB:.1f}",
                f"{accepted / drafted:.3f}" if drafted else "-",
                f"{1 + accepted / rounds:.2f}" if drafted else "-",
                f"{total(cold, 'steps'):.0f}",
                equality(cold, n),
            ]
        )
    header = [
        "system",
        "B",
        "k",
        "decode tok/s",
        "/ batch_generate",
        "first pass tok/s",
        "ms per full step",
        "total s",
        "peak MiB above weights",
        "acceptance rate",
        "acceptance length",
        "steps",
        "equal to plain",
    ]
    return markdown_table(header, rows)


def explain(raw: Record, n: int) -> str:
    o = raw["options"]
    end = "end-of-sequence honoured" if o["eos"] else "no end of sequence"
    lengths = o["prompt_tokens"]
    draft = f", draft {o['draft']}" if o["draft"] else ""
    return (
        f"Target {o['target']}{draft}, {o['dtype']}; {n} prompts of {min(lengths)} to "
        f"{max(lengths)} tokens, {o['max_tokens']} new tokens, {end}, greedy. Median "
        f"(smallest to largest) of {o['repeat']} interleaved passes after the first, "
        "which is shown apart.\n\n"
        "*decode tok/s*: tokens that arrive after every row of the batch has its "
        "first, over the time until the last. */ batch_generate*: of the same batch "
        "size, pass by pass. *ms per full step*: median time between the arrivals of "
        "two steps (rounds) with all rows running. *total*: prefill included. "
        "*equal to plain*: prompts of the first pass with mlx-lm's plain tokens.\n"
    )


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", required=True, help="Folder, hub id, .gguf, random:SHAPE.")
@click.option("--draft", help="The same, self:4bit, or random:SHAPE:LAYERS.")
@click.option("--prompts", "path", help="Prompt file; needed unless random.")
@click.option("--prompt-tokens", default=128, help="Random prompts without --prompts.")
@click.option("--num-prompts", default=8)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(2, 4))
@click.option("--max-tokens", default=64)
@click.option("--repeat", default=3, help="Passes after the first.")
@minutes_option
@click.option(
    "--dtype",
    default="bfloat16",
    type=click.Choice(["float32", "bfloat16", "float16", "stored"]),
)
@click.option("--eos", is_flag=True, help="Stop rows at end-of-sequence tokens.")
@click.option("--ignore-chat-template", is_flag=True)
@click.option("--prefill-step-size", default=512)
@click.option("--read-bucket", type=int, help="Of this engine; the backend's default.")
@click.option("--lookahead", type=int, help="Of this engine; the backend's default.")
@click.option("--only", multiple=True, help="Systems whose line starts so, with plain.")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str | None,
    path: str | None,
    prompt_tokens: int,
    num_prompts: int,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    max_tokens: int,
    repeat: int,
    minutes: float | None,
    dtype: str,
    eos: bool,
    ignore_chat_template: bool,
    prefill_step_size: int,
    read_bucket: int | None,
    lookahead: int | None,
    only: tuple[str, ...],
    out: str | None,
) -> None:
    """Compare mlx-lm and this engine."""
    if any(num_prompts % b for b in batches):
        raise click.UsageError("--num-prompts must be a multiple of every --batch")
    if path and target.startswith("random:"):
        raise ConfigError("--prompts needs a tokenizer, which a random model lacks")
    if eos and target.startswith("random:"):
        raise ConfigError("--eos needs a tokenizer, which a random model lacks")
    if repeat < 1:
        raise click.UsageError("--repeat must be 1 or more")
    floats = None if dtype == "stored" else dtype
    loaded = load_model(target, floats)
    loaded_draft = load_model(draft, floats, loaded) if draft else None
    if loaded_draft and loaded.tokenizer and loaded_draft.tokenizer:
        check_same_vocabulary(loaded, loaded_draft)
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
    stop = loaded.tokenizer.eos_token_ids if eos else ()
    options = Options(max_tokens, prefill_step_size, frozenset(stop))
    plain, *others = make_systems(
        loaded,
        loaded_draft,
        batches,
        ks,
        options,
        read_bucket=read_bucket,
        lookahead=lookahead,
    )
    made = [plain, *(s for s in others if not only or s.key.startswith(only))]

    raw = header_of("Decode rates")
    raw["options"] = {
        "target": short(target),
        "draft": draft and short(draft),
        "prompts": path and short(path),
        "prompt_tokens": [len(p) for p in prompts],
        "batch": list(batches),
        "num_draft_tokens": list(ks) if draft else [],
        "max_tokens": max_tokens,
        "repeat": repeat,
        "minutes": minutes,
        "dtype": dtype,
        "eos": eos,
        "chat_template": bool(path) and not ignore_chat_template,
        "prefill_step_size": prefill_step_size,
        "read_bucket": read_bucket,
        "lookahead": lookahead,
    }
    records: dict[str, list[Record]] = {s.key: [] for s in made}
    runs: dict[str, Callable[[], Record]] = {
        s.key: lambda s=s: measure(s.run, prompts, s.batch_size)  # type: ignore[misc]
        for s in made
    }
    with wired_limit(loaded.model):
        for number, key, record in in_time(runs, repeat + 1, minutes):
            print(f"pass {number}: {key}: {rate(record):.1f} tok/s", file=sys.stderr)
            records[key].append(record)
    expected = records[plain.key][0]["tokens"]
    raw["options"]["repeat"] = len(records[plain.key]) - 1
    gaps: dict[tuple[int, int], dict[str, Any]] = {}
    for kept in records.values():
        for number, record in enumerate(kept):
            tokens = record.pop("tokens")
            for wave in record["waves"]:
                for name in ("rounds", "requests", "first_tokens", "prefix_tokens"):
                    del wave[name]
            record["pass"] = number
            record["decode_tokens_per_second"] = rate(record)
            record["full_step_ms"] = step_ms(record)
            record["differences"] = differences(
                loaded.model, prompts, expected, tokens, gaps
            )
    raw["plain_tokens"] = expected
    raw["passes"] = records
    write_report(
        out, raw, explain(raw, num_prompts) + "\n" + table(made, records, num_prompts)
    )


if __name__ == "__main__":
    main()
