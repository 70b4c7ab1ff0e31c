"""Compare a run's planned memory with its measured peak, including loading.

The plan is made from the files alone, before anything is loaded. MLX's peak is read
after the run. Both count MLX's allocations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import click
import mlx.core as mx

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.engine.admission import row_needs
from specdec.memory import MemoryPlan
from specdec.memory.planning import plan_memory
from specdec.model_names import draft_for, short
from specdec.models.model_outline import outline, outline_draft
from specdec.spec_decode.factory import ngram_of

TEXT = (
    "In the year {year}, a ship left the harbour with {year} sailors, and it came back "
    "after three years with spices, maps and stories that nobody believed. "
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: rows of equal length.

    Args:
        rows: number of rows that decode together.
        prompt, generated: prompt tokens and generated tokens of each row.
        dtype, draft: as for ``specdec run``.
        config, params: other options of the engine, and of the requests.
        fallback: bits of keys and values to which ``kv_bits="auto"`` must fall back.
            The memory limit is what the run needs with these bits.
    """

    rows: int
    prompt: int
    generated: int
    dtype: str = "float32"
    draft: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    fallback: int | None = None

    @property
    def name(self) -> str:
        """The run's name in the table."""
        words = [f"{self.rows} x ({self.prompt} + {self.generated})", self.dtype]
        if self.draft is not None:
            words.append(f"draft {self.draft}")
        words += [f"{k}={v}" for k, v in {**self.config, **self.params}.items()]
        if self.fallback is not None:
            words.append("kv_bits=auto and a limit")
        return ", ".join(words)


WARM: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "top_logprobs": 5}
BLOCK: dict[str, Any] = {"temperature": 0.8, "verification": "block"}
RUNS = (
    Run(rows=1, prompt=40, generated=24),
    Run(rows=2, prompt=60, generated=24, draft="self:4bit"),
    Run(rows=2, prompt=60, generated=24, draft="ngram"),
    Run(rows=4, prompt=20, generated=24, params=WARM),
    Run(rows=4, prompt=20, generated=24, params=PENALTIES),
    Run(rows=4, prompt=20, generated=24, draft="self:4bit", params=BLOCK),
    Run(rows=2, prompt=250, generated=8, config={"kv_bits": 4}),
    Run(rows=4, prompt=200, generated=12, dtype="bfloat16", params=WARM),
    Run(rows=2, prompt=300, generated=12),
    Run(rows=1, prompt=1000, generated=4, fallback=8),
)
QUICK = (Run(rows=2, prompt=8, generated=4, draft="ngram", params=WARM),)


@click.command(cls=Script)
@click.option(
    "--target",
    "targets",
    multiple=True,
    required=True,
    metavar="MODEL",
    help="As for specdec run; repeat it for more models.",
)
@click.option("--quick", is_flag=True, help="Two short runs, to see that it works.")
@click.option("--out", metavar="NAME", help="Write NAME.json and NAME.md.")
def main(targets: tuple[str, ...], quick: bool, out: str | None) -> None:
    """Compare the memory that was planned for runs with MLX's peak."""
    raw = header_of("Memory: planned before a run, and measured")
    raw["runs"] = []
    for target in targets:
        for run in QUICK if quick else RUNS:
            found = measure(target, run)
            if found is not None:
                click.echo(f"{found['target']}: {found['run']}", err=True)
                raw["runs"].append(found)
    lines = [
        "Megabytes; a limit is what is planned for 8-bit keys and values.",
        "",
        "| model | run | tokens | weights | planned | measured | planned / measured |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in raw["runs"]:
        sizes = " | ".join(
            f"{r[key] / 1e6:.1f}" for key in ("weights", "planned", "measured")
        )
        lines.append(
            f"| {r['target']} | {r['run']} | {r['generated_tokens']} | {sizes} "
            f"| {r['planned'] / r['measured']:.3f} |"
        )
    write_report(out, raw, "\n".join(lines) + "\n")


def measure(target: str, run: Run) -> dict[str, Any] | None:
    """Plan a run from its files, then load its models and decode.

    Returns:
        ``None`` if packed keys and values would not lower the peak, since it is reached
        while loading.
    """
    params = SamplingParams(max_tokens=run.generated, **run.params)
    config = EngineConfig(
        **{"batch_size": run.rows, "num_draft_tokens": 3, **run.config}
    )
    kv_bits = run.fallback if run.fallback is not None else config.kv_bits
    plan = plan_of(target, run, {**run.config, "kv_bits": kv_bits})
    needs = [row_needs(run.prompt, params)] * run.rows
    planned = plan.peak(needs)
    if run.fallback is not None:
        dense = plan_of(target, run, run.config).peak(needs)
        if planned == dense:
            return None
        limits: dict[str, Any] = {"kv_bits": "auto", "memory_limit": planned}
        config = EngineConfig(batch_size=run.rows, num_draft_tokens=3, **limits)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    decoder = SpecDecoder.from_pretrained(
        target, run.draft, dtype=run.dtype, config=config
    )
    results = decoder.generate(
        [prompt_of(decoder, i, run.prompt) for i in range(run.rows)], params
    )
    peak = mx.get_peak_memory()
    if run.fallback is not None:
        assert {r.kv_bits for r in results} == {run.fallback}
    return {
        "target": short(target),
        "run": run.name,
        "generated_tokens": sum(r.generated_tokens for r in results),
        "weights": plan.weight_bytes,
        "planned": planned,
        "moments": {m.name: m.total for m in plan.moments(needs)},
        "measured": peak - before,
        "held_before": before,
    }


def plan_of(target: str, run: Run, options: dict[str, Any]) -> MemoryPlan:
    """Plan a run's memory from the files of its models."""
    config = EngineConfig(**{"batch_size": run.rows, "num_draft_tokens": 3, **options})
    of_target, of_draft = outline(target, dtype=run.dtype), None
    spec = draft_for(target, run.draft)
    if spec is not None and spec.model is not None:
        of_draft = outline_draft(spec.model, of_target, dtype=run.dtype)
    ngram = None if spec is None else ngram_of(spec)
    return plan_memory(
        of_target,
        of_draft,
        config,
        backend.defaults(),
        drafts=spec is not None,
        lookup_bytes=0 if ngram is None else ngram.nbytes(run.rows),
    )


def prompt_of(decoder: SpecDecoder, index: int, length: int) -> list[int]:
    """Exactly ``length`` tokens of a text that differs for every row."""
    text = "".join(TEXT.format(year=1500 + 10 * index + i) for i in range(length // 20))
    tokens: list[int] = decoder.tokenizer.encode(text + TEXT.format(year=1500 + index))
    return tokens[:length]


if __name__ == "__main__":
    main()
