"""Time models with recurrent layers: plain steps, and verify forwards with rollback.

    python -m benchmarks.hybrid --out benchmarks/results/hybrid-h200

The weights are random, in two shapes: Qwen3.5 4B, and eight layers of Qwen3-Next
80B-A3B. A step keeps different numbers of tokens in its rows, so the next step begins
with a rollback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from specdec.backend import defaults
from specdec.config import EngineConfig
from specdec.models.loading import fit
from specdec.models.runner import ModelRunner
from specdec.utils.tables import markdown_table

from .common import Script, header_of, pipelined, write_report

CONTEXT = 100
TOKENS = (1, 2, 3, 5)

# From the models' configurations on the hub.
_LINEAR = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "head_dim": 256, "num_attention_heads": 16,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5 4B": ("qwen3_5", {
        **_LINEAR, "model_type": "qwen3_5_text", "hidden_size": 2560,
        "intermediate_size": 9216, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "vocab_size": 248320, "tie_word_embeddings": True, "num_experts": 0,
    }),
    "Qwen3-Next, 8 layers": ("qwen3_next", {
        **_LINEAR, "model_type": "qwen3_next", "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 8, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 512,
        "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }),
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 200, "intermediate_size": 64,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_FEW_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def random_model(name: str, *, tiny: bool) -> nn.Module:
    """A model of the shape with random weights, in bfloat16 or, if tiny, in float32."""
    arch, config = SHAPES[name]
    if tiny:
        config = {**config, **_TINY, **(_FEW_EXPERTS if config["num_experts"] else {})}
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    if arch == "qwen3_5":
        config = {"model_type": arch, "text_config": config}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))

    def filled(a: mx.array) -> mx.array:
        if a.ndim > 1:
            a = mx.random.uniform(-0.02, 0.02, a.shape)
        # On a CPU, MLX gathers experts only in float32.
        a = a.astype(mx.float32 if tiny else mx.bfloat16)
        mx.eval(a)
        return a

    model.update(tree_map(filled, model.parameters()))
    return model


def engine_step(model: nn.Module, b: int, s: int) -> Callable[[], Any]:
    """The engine's forwards of ``s`` tokens; row ``i`` rejects ``i % s`` of them."""
    runner = ModelRunner(model, "model", EngineConfig(), defaults())
    prompts = [[3] * CONTEXT] * b
    rows = runner.rows(prompts, max_round=s, max_length=6 * CONTEXT, single_stays=True)
    for _ in rows.prefill():
        mx.synchronize()
    tokens = mx.ones((b, s), mx.int32)
    rejected = mx.array([i % s for i in range(b)], mx.int32)

    def step() -> Any:
        chosen = mx.argmax(rows.forward(tokens), axis=-1)
        if s > 1:
            rows.trim_per_sequence(rejected, s)
        return [chosen, rows.offset]

    return step


def peer_step(model: nn.Module, b: int) -> Callable[[], Any]:
    """mlx-lm's plain steps of a batch of equally long rows."""
    caches: Any = make_prompt_cache(model)
    mx.eval(model(mx.ones((b, CONTEXT), mx.int32), cache=caches))
    tokens = mx.ones((b, 1), mx.int32)
    return lambda: mx.argmax(model(tokens, cache=caches), axis=-1)


def body_of(records: Sequence[dict[str, Any]]) -> str:
    """The measurements as a table."""
    header = ["shape", "rows", "mlx-lm, 1 token", *(f"{s} tokens" for s in TOKENS)]
    rows: dict[tuple[str, int], list[str]] = {}
    for r in records:
        row = rows.setdefault((r["shape"], r["rows"]), [r["shape"], str(r["rows"])])
        row.append(f"{r['ms']:.1f}")
    intro = (
        f"Random weights in bfloat16, {CONTEXT} tokens of context; median milliseconds "
        "of a forward, built while the one before runs. Rows keep different numbers of "
        "their tokens, which the next forward rolls back.\n\n"
    )
    return intro + markdown_table(header, [*rows.values()])


@click.command(cls=Script)
@click.option("--rows", multiple=True, type=int, default=(1, 8, 32))
@click.option("--repeat", default=12)
@click.option("--tiny", is_flag=True, help="Small shapes, to try it.")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(rows: tuple[int, ...], repeat: int, tiny: bool, out: str | None) -> None:
    """Steps of hybrid models, and mlx-lm's."""
    raw = header_of("Steps of hybrid models")
    raw["milliseconds"] = records = []
    for name in SHAPES:
        model = random_model(name, tiny=tiny)
        theirs = [1e3 * pipelined(peer_step(model, b), repeat) for b in rows]
        fit(model)  # as loading does with every model
        for b, ms in zip(rows, theirs, strict=True):
            found = [{"shape": name, "rows": b, "tokens": 1, "of": "mlx-lm", "ms": ms}]
            for s in TOKENS:
                ms = 1e3 * pipelined(engine_step(model, b, s), repeat)
                kind = {"shape": name, "rows": b, "tokens": s, "of": "specdec"}
                found.append({**kind, "ms": ms})
            records += found
            print(*(f"{r['ms']:.2f}" for r in found), file=sys.stderr, flush=True)
    write_report(out, raw, body_of(records))


if __name__ == "__main__":
    main()
