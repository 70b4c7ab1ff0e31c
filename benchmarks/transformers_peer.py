"""Hugging Face transformers and this engine: one run, same weights, same prompts.

Needs PyTorch and a GPU that both can use. transformers' ``generate`` is timed as a
whole; its decode rate is that of all tokens but the first, the time of a call for one
token taken off.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.common import (
    Script,
    encode_prompts,
    header_of,
    in_time,
    minutes_option,
    write_report,
)
from specdec import EngineConfig
from specdec.decoder import SpecDecoder
from specdec.errors import ConfigError
from specdec.model_names import short
from specdec.models import LoadedModel
from specdec.spec_decode import NamedDrafter, NgramDrafter
from specdec.tools.bench.engine import engine
from specdec.tools.bench.measure import measure
from specdec.tools.bench.models import load_model, token_level
from specdec.tools.bench.tables import markdown_table, show_spread
from specdec.tools.bench.waves import Options, Prompts, Record, rate, total


def torch_model(loaded: LoadedModel) -> Any:
    """The same weights as a transformers model on the GPU."""
    from transformers import AutoModelForCausalLM

    left_out = ("quantization", "quantization_config")
    config = {k: v for k, v in loaded.config.items() if k not in left_out}
    with tempfile.TemporaryDirectory() as folder:
        weights = dict(tree_flatten(loaded.model.parameters()))
        mx.save_safetensors(f"{folder}/model.safetensors", weights, {"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    return model.cuda().eval()


def theirs(model: Any, draft: Any, k: int, prompts: Prompts, options: Options) -> Any:
    """Tokens of each prompt by ``generate``, and the seconds that it took."""
    import torch

    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    more: dict[str, Any] = {}
    if draft is not None:
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        more["assistant_model"] = draft
    begun = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            torch.tensor(padded, device="cuda"),
            attention_mask=torch.tensor(mask, device="cuda"),
            max_new_tokens=options.max_tokens,
            min_new_tokens=options.max_tokens,
            do_sample=False,
            pad_token_id=0,
            **more,
        )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return [row[longest:].tolist() for row in made], seconds


def measure_theirs(
    model: Any, draft: Any, k: int, prompts: Prompts, options: Options, batch: int
) -> Record:
    """One pass over the prompts in batches."""
    one = Options(1, options.prefill_step_size)
    waves: list[Record] = []
    tokens: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        wave = prompts[first : first + batch]
        _, before = theirs(model, None, 0, wave, one)
        made, seconds = theirs(model, draft, k, wave, options)
        tokens += made
        waves.append(
            {
                "decode_seconds": seconds - before,
                "decode_tokens": len(wave) * (options.max_tokens - 1),
                "wall_seconds": seconds,
            }
        )
    return {"tokens": tokens, "waves": waves}


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", required=True, help="MLX folder, .gguf or hub id.")
@click.option("--draft", help="The same; for assisted generation.")
@click.option("--prompts", "path", required=True)
@click.option("--num-prompts", default=32)
@click.option("--assisted-prompts", default=4, help="For rows decoded one by one.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "k", default=4)
@click.option("--max-tokens", default=128)
@click.option("--repeat", default=2, help="Passes after the first.")
@minutes_option
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str | None,
    path: str,
    num_prompts: int,
    assisted_prompts: int,
    batches: tuple[int, ...],
    k: int,
    max_tokens: int,
    repeat: int,
    minutes: float | None,
    out: str | None,
) -> None:
    """Compare with transformers: plain, batched, assisted."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError("PyTorch is not installed: pip install torch") from error
    if not torch.cuda.is_available():
        raise ConfigError("PyTorch sees no GPU: this comparison needs one")
    raw = header_of("transformers and specdec")
    raw["peers"] = {n: metadata.version(n) for n in ("torch", "transformers")}
    loaded = load_model(target, "bfloat16")
    prompts = encode_prompts(loaded.tokenizer, path, num_prompts)
    options = Options(max_tokens, 512)
    model, bare = torch_model(loaded), token_level(loaded.model)
    runs: dict[str, Callable[[], Record]] = {}

    def add(b: int) -> None:
        some = prompts if b > 1 else prompts[:assisted_prompts]
        runs[f"transformers B={b}"] = lambda: measure_theirs(
            model, None, 0, some, options, b
        )

        def ours(name: str, k: Any, drafter: Any) -> None:
            @cache
            def make() -> SpecDecoder:
                config = EngineConfig(batch_size=b, num_draft_tokens=k)
                return SpecDecoder(bare, drafter=drafter, config=config)

            runs[f"{name} B={b}"] = lambda: measure(engine(make, options), some, b)

        ours("specdec", 0, None)
        ours("specdec, ngram, auto", "auto", lambda context: NgramDrafter())
        if draft is not None:
            theirs_, mlx_draft = drafts
            if b == 1:
                runs[f"transformers, assisted, k={k} B=1"] = lambda: measure_theirs(
                    model, theirs_, k, some, options, 1
                )
            ours(f"specdec, draft, k={k}", k, NamedDrafter(draft, mlx_draft))

    drafts: tuple[Any, Any] = None, None
    if draft is not None:
        of_draft = load_model(draft, "bfloat16", loaded)
        drafts = torch_model(of_draft), token_level(of_draft.model)
    for b in batches:
        add(b)
    records: dict[str, list[Record]] = {key: [] for key in runs}
    for number, key, record in in_time(runs, repeat + 1, minutes):
        print(f"pass {number}: {key}: {rate(record):.1f} tok/s", file=sys.stderr)
        records[key].append(record)
    repeat = len(next(iter(records.values()))) - 1
    rows: list[Sequence[object]] = []
    for key, found in records.items():
        name, _, b = key.rpartition(" B=")
        base = records[f"transformers B={b}"]
        ups = [rate(x) / rate(y) for x, y in zip(found[1:], base[1:], strict=True)]
        same = sum(
            x == y for x, y in zip(found[0]["tokens"], base[0]["tokens"], strict=True)
        )
        seconds = [total(r, "wall_seconds") for r in found[1:]]
        rows.append(
            [
                name,
                b,
                show_spread([rate(r) for r in found[1:]]),
                show_spread(ups, 2),
                show_spread(seconds, 2),
                f"{same}/{len(found[0]['tokens'])}",
            ]
        )
    for found in records.values():
        for record in found:
            record.pop("tokens", None)
    raw["passes"] = records
    header = ["system", "B", "decode tokens/s", "/ transformers", "total s", "equal"]
    intro = (
        f"Target {short(target)}, bfloat16; {max_tokens} new tokens, greedy, no end of "
        f"sequence; {num_prompts} prompts, {assisted_prompts} of them at B=1. torch "
        f"{raw['peers']['torch']}, transformers {raw['peers']['transformers']}, eager "
        f"and uncompiled as installed. Median (smallest to largest) of {repeat} "
        "interleaved passes after the first. *equal*: prompts with the tokens of "
        "transformers at the same batch size (other kernels round differently).\n\n"
    )
    write_report(out, raw, intro + markdown_table(header, rows))


if __name__ == "__main__":
    main()
