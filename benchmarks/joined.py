"""Many prompts of mixed length: rows that join, waves, and mlx-lm's BatchGenerator.

Waves are what an engine does that fills its batch once: eight prompts at a time,
and the next eight when all of them have ended.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, wired_limit

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.cuda.fused_linear import separated
from specdec.model_names import short
from specdec.tools.bench.models import load_model, token_level
from specdec.tools.bench.tables import interleaved, markdown_table, show_spread

Record = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """The tokens of every prompt, and the decode steps that they took."""

    tokens: list[list[int]]
    steps: int


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each is to get."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def random(
        cls, number: int, prompt_tokens: int, max_tokens: int, vocab_size: int
    ) -> Workload:
        """Lengths from 8 on, up to the given ones, uniform in their logarithm."""
        draw = np.random.default_rng(0)

        def lengths(most: int) -> list[int]:
            logs = draw.uniform(np.log(min(8, most)), np.log(most + 1), number)
            return [int(n) for n in np.exp(logs)]

        return cls(
            [draw.integers(0, vocab_size, n).tolist() for n in lengths(prompt_tokens)],
            lengths(max_tokens),
        )

    @property
    def params(self) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=n) for n in self.max_tokens]


def joined(decoder: SpecDecoder, work: Workload) -> Output:
    """All prompts in one call: a row joins as soon as one is free."""
    results = decoder.generate(work.prompts, work.params)
    return Output([r.token_ids for r in results], decoder.stats.rounds)


def waves(decoder: SpecDecoder, work: Workload) -> Output:
    """As many prompts a call as the batch has rows."""
    size, steps, tokens = decoder.config.batch_size, 0, []
    for i in range(0, len(work.prompts), size):
        results = decoder.generate(
            work.prompts[i : i + size], work.params[i : i + size]
        )
        tokens += [r.token_ids for r in results]
        steps += decoder.stats.rounds
    return Output(tokens, steps)


def batch_generator(
    model: Any, work: Workload, batch_size: int, prefill_step_size: int
) -> Output:
    """mlx-lm's own continuous batching."""
    generator = BatchGenerator(
        model,
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
        prefill_step_size=prefill_step_size,
    )
    uids = generator.insert(work.prompts, work.max_tokens)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    steps = 0
    while responses := generator.next_generated():
        steps += 1
        for response in responses:
            tokens[response.uid].append(response.token)
    mx.synchronize(generator.stream)
    generator.close()
    return Output([tokens[uid] for uid in uids], steps)


def measure(run: Callable[[], Output]) -> Record:
    """One pass: seconds by the clock, and of processor time of the whole process."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    start, busy = time.perf_counter(), time.process_time()
    output = run()
    mx.synchronize()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - busy,
        "peak_bytes": mx.get_peak_memory() - before,
        "steps": output.steps,
        "tokens": output.tokens,
    }


def gaps(decoder: SpecDecoder, work: Workload) -> Record:
    """How long rows that run wait for their next token while others join."""
    session = decoder.session()
    for prompt, params in zip(work.prompts, work.params, strict=True):
        session.add(prompt, params)
    last: dict[int, float] = {}
    waited: list[float] = []
    start = time.perf_counter()
    while session.busy:
        events = session.step()
        now = time.perf_counter()
        for event in events:
            if event.token_ids:
                if event.index in last:
                    waited.append(now - last[event.index])
                last[event.index] = now
    return {
        "longest_gap_ms": max(waited) * 1e3,
        "median_gap_ms": statistics.median(waited) * 1e3,
        "seconds": time.perf_counter() - start,
    }


def chunk_ms(decoder: SpecDecoder, batch_size: int, tokens: int) -> float:
    """What prefill of one full chunk of every row takes by itself."""
    rows = [[1] * (tokens + 1)] * batch_size
    params = SamplingParams(max_tokens=1)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        decoder.generate(rows, params)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def differing(a: Sequence[list[int]], b: Sequence[list[int]]) -> int:
    """How many prompts got other tokens."""
    return sum(x != y for x, y in zip(a, b, strict=True))


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", default="random:10m", help="Folder, .gguf, random:SHAPE.")
@click.option("--dtype", default="float32")
@click.option("--num-prompts", default=64)
@click.option("--prompt-tokens", default=64, help="Of the longest prompt.")
@click.option("--max-tokens", default=128, help="Of the longest row.")
@click.option("--batch", "batch_size", default=8)
@click.option("--prefill-step-size", default=512)
@click.option("--gap-chunks", multiple=True, type=int, default=(16, 64, 256))
@click.option("--gap-prompt-tokens", default=256, help="Longest prompt for the gaps.")
@click.option("--repeat", default=3, help="Passes after the first.")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    dtype: str,
    num_prompts: int,
    prompt_tokens: int,
    max_tokens: int,
    batch_size: int,
    prefill_step_size: int,
    gap_chunks: tuple[int, ...],
    gap_prompt_tokens: int,
    repeat: int,
    out: str | None,
) -> None:
    """Compare joining rows with waves and with mlx-lm's BatchGenerator."""
    if repeat < 1:
        raise click.UsageError("--repeat must be 1 or more")
    model = load_model(target, dtype).model
    theirs = separated(model)
    vocab_size = int(model(mx.array([[0]])).shape[-1])

    def decoder(step_size: int) -> SpecDecoder:
        config = EngineConfig(batch_size=batch_size, prefill_step_size=step_size)
        return SpecDecoder(token_level(model), config=config)

    work = Workload.random(num_prompts, prompt_tokens, max_tokens, vocab_size)
    ours = decoder(prefill_step_size)
    systems: dict[str, Callable[[], Output]] = {
        "joined": lambda: joined(ours, work),
        "waves": lambda: waves(ours, work),
        "mlx-lm BatchGenerator": lambda: batch_generator(
            theirs, work, batch_size, prefill_step_size
        ),
    }
    raw = header_of("Prompts of mixed length")
    raw["options"] = {
        "target": short(target),
        "dtype": dtype,
        "batch": batch_size,
        "prefill_step_size": prefill_step_size,
        "prompt_tokens": [len(p) for p in work.prompts],
        "max_tokens": work.max_tokens,
        "repeat": repeat,
    }
    passes: dict[str, list[Record]] = {name: [] for name in systems}
    runs = {name: (lambda run=run: measure(run)) for name, run in systems.items()}
    with wired_limit(model):
        for number, name, record in interleaved(runs, repeat + 1):
            print(f"pass {number}: {name}: {record['seconds']:.2f} s", file=sys.stderr)
            passes[name].append(record)
        expected = passes["joined"][0]["tokens"]
        for kept in passes.values():
            for record in kept:
                record["differ"] = differing(record.pop("tokens"), expected)
        raw["passes"] = passes
        # Short rows run while prompts of several chunks join.
        long = Workload.random(num_prompts // 2, gap_prompt_tokens, 32, vocab_size)
        raw["gaps"] = {}
        for size in gap_chunks:
            one = decoder(size)
            raw["gaps"][size] = {
                "chunk_ms": chunk_ms(one, batch_size, size),
                "passes": [gaps(one, long) for _ in range(repeat)],
            }
            print(f"gaps with chunks of {size}: done", file=sys.stderr)
    write_report(out, raw, report(raw, sum(work.max_tokens)))


def report(raw: dict[str, Any], tokens: int) -> str:
    """Both tables."""
    o, passes = raw["options"], raw["passes"]
    rows = []
    for name, (_, *warm) in passes.items():
        ratios = {
            what: [
                a[what] / b[what]
                for a, b in zip(warm, passes["joined"][1:], strict=True)
            ]
            for what in ("seconds", "cpu_seconds")
        }
        rows.append(
            [
                name,
                show_spread([r["seconds"] for r in warm], 2),
                show_spread(ratios["seconds"], 2),
                show_spread([r["cpu_seconds"] for r in warm], 2),
                show_spread(ratios["cpu_seconds"], 2),
                show_spread([tokens / r["seconds"] for r in warm]),
                warm[0]["steps"],
                f"{max(r['peak_bytes'] for r in warm) / 2**20:.1f}",
                sum(r["differ"] for r in passes[name]),
            ]
        )
    header = [
        "system",
        "s",
        "/ joined",
        "CPU s",
        "/ joined",
        "tokens/s",
        "steps",
        "peak MiB above weights",
        "prompts that differ",
    ]
    first = markdown_table(header, rows)
    gap_rows = []
    for size, found in raw["gaps"].items():
        each = found["passes"]
        gap_rows.append(
            [
                size,
                show_spread([g["longest_gap_ms"] for g in each]),
                show_spread([g["median_gap_ms"] for g in each]),
                f"{found['chunk_ms']:.1f}",
                show_spread([g["seconds"] for g in each], 2),
            ]
        )
    gap_header = [
        "prefill_step_size",
        "longest gap, ms",
        "median gap, ms",
        "full chunk alone, ms",
        "all, s",
    ]
    n = len(o["prompt_tokens"])
    return (
        f"Target {o['target']}, {o['dtype']}; {n} prompts of "
        f"{min(o['prompt_tokens'])} to {max(o['prompt_tokens'])} tokens, "
        f"{min(o['max_tokens'])} to {max(o['max_tokens'])} new ones ({tokens} in all), "
        f"batch {o['batch']}, no draft, greedy, no end of sequence. Median (smallest "
        f"to largest) of {o['repeat']} interleaved passes after the first; ratios are "
        "taken pass by pass. *CPU s*: processor time of all threads. *steps*: of the "
        "batch, those of prefill left out.\n\n"
        f"{first}\n"
        "Longest and median time between two tokens of a row, while prompts of "
        "several chunks join; a chunk alone is one of every row at once, prefilled, "
        "with its first token.\n\n"
        f"{markdown_table(gap_header, gap_rows)}"
    )


if __name__ == "__main__":
    main()
