"""Small GGUF files with random weights, written as llama.cpp's converters do.

Nothing here comes from ``specdec``: names, permutation and the norms' 1 are
written down a second time, so that a mistake on either side shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 320
LAYERS = {"gemma3": 7, "smollm3": 5}
MODULES = {
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "mixtral": "mixtral",
}
# What a file says of itself, where that is not the name here.
FILE_NAMES = {"mixtral": "llama"}
# Files with rows of q and k interleaved, and with norms of 1 + w.
INTERLEAVED = ("llama", "smollm3", "granite", "mixtral")
NORMS_HOLD_ONE = ("gemma", "gemma2", "gemma3")

F32 = gguf.GGMLQuantizationType.F32
Array = npt.NDArray[Any]
Kinds = Callable[[str], gguf.GGMLQuantizationType]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    # Phi 3's joined ones, and experts.
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.switch_mlp.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.switch_mlp.up_proj": "ffn_up_exps",
    "block_sparse_moe.switch_mlp.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OLMO_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OTHER_NAMES = {"gemma2": GEMMA_NAMES, "gemma3": GEMMA_NAMES, "olmo2": OLMO_NAMES}
# Configuration by mlx-lm's names, beside the common one; and its keys in a file.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
        "query_pre_attn_scalar": 32,
    },
    "granite": {
        "logits_scaling": 4.0, "attention_multiplier": 0.125,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.25,
        "attention_bias": False, "mlp_bias": False,
    },
    "granitemoehybrid": {
        "logits_scaling": 4.0, "attention_multiplier": 0.125,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.25,
        "attention_bias": False, "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_proj_bias": False,
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "qwen2moe": {
        **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    },
    "qwen3moe": {
        **EXPERTS, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "olmoe": EXPERTS, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5": {
        "full_attention_interval": 2, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}  # fmt: skip
KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_OWN_HEADS = ("qwen3", "qwen3moe", "gemma", "gemma2", "gemma3")


def arguments(arch: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a small model, by mlx-lm's names."""
    common: dict[str, Any] = {
        "model_type": MODULES.get(arch, arch),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS.get(arch, 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if arch in _OWN_HEADS else 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    }
    if arch == "gemma3":
        common |= {
            "sliding_window": 4,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 32,
        }
    return common | MORE.get(arch, {}) | changes


def random_model(arch: str, seed: int = 0, **changes: Any) -> nn.Module:
    """mlx-lm's own model with random float32 weights, norms and biases too."""
    config = arguments(arch, **changes)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if arch == "gemma3":
        model.sanitize({})  # drops the output projection
    rng = np.random.default_rng(seed)
    flat: Any = tree_flatten(model.parameters())
    drawn = [
        (name, mx.array(rng.normal(0, 0.3, value.shape).astype(np.float32)))
        for name, value in flat
    ]
    model.update(tree_unflatten(drawn))
    return model.eval()


def gguf_name(arch: str, name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` is ``blk.0.ffn_up.weight``."""
    names = OTHER_NAMES.get(arch, NAMES)
    layer, _, kind = name.rpartition(".")
    if layer.startswith("model.layers."):
        number, _, part = layer.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{names[part]}.{kind}"
    return f"{names[layer]}.{kind}"


def interleaved(weight: Array, heads: int) -> Array:
    """q or k with the halves of each head interleaved, row by row."""
    size = weight.shape[0] // heads
    order = [h * size + i // 2 + (i % 2) * size // 2 for h in range(heads)
             for i in range(size)]  # fmt: skip
    return weight[order]


def file_tensors(arch: str, model: nn.Module) -> dict[str, Array]:
    """The model's weights as the file has them, float32."""
    args: Any = model.args
    tensors = {}
    flat: Any = tree_flatten(model.parameters())
    for name, value in flat:
        weight = np.array(value)
        if arch in INTERLEAVED and name.endswith("q_proj.weight"):
            weight = interleaved(weight, args.num_attention_heads)
        if arch in INTERLEAVED and name.endswith("k_proj.weight"):
            weight = interleaved(weight, args.num_key_value_heads)
        if arch in NORMS_HOLD_ONE and "norm" in name:
            weight = weight + np.float32(1)
        tensors[gguf_name(arch, name)] = weight
    return tensors


def metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file's metadata, for a model of that configuration."""
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 512),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if arch in _OWN_HEADS:
        values["attention.key_length"] = config["head_dim"]
        values["attention.value_length"] = config["head_dim"]
    if arch == "gemma3":
        values["attention.sliding_window"] = config["sliding_window"]
    if arch == "llama":
        values["rope.dimension_count"] = config["head_dim"]
    for ours, key in KEYS.items():
        if ours in config:
            values[key] = config[ours]
    name = FILE_NAMES.get(arch, arch)
    return {f"{name}.{key}": value for key, value in values.items()}


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(moved)) for b in range(256)]


@dataclass
class Vocabulary:
    """A tokenizer's metadata."""

    model: str = "gpt2"
    pre: str | None = "smollm"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, token: str, kind: int = 1, score: float = 0.0) -> int:
        self.tokens.append(token)
        self.types.append(kind)
        self.scores.append(score)
        return len(self.tokens) - 1


MERGES = (
    "1 2", "12 3", "Ġ t", "h e", "Ġt he", "' t", "n 't", "Ġ Ġ", "Ċ Ċ", "a b",
    "Ã ©", "e Ì", "Ġ d", "o n", "Ġd on", "l l", "l e", "Ġ x",
)  # fmt: skip


def byte_level(pre: str | None = "smollm", **extra: Any) -> Vocabulary:
    """A byte-level BPE vocabulary with digits, spaces and contractions to merge.

    Padded to :data:`VOCAB` with unused tokens, as converters do.
    """
    made = Vocabulary(pre=pre, extra=dict(extra))
    for character in byte_characters():
        made.add(character)
    for merge in MERGES:
        token = merge.replace(" ", "")
        made.merges.append(merge)
        made.add(token)
    for token, role in (
        ("<|endoftext|>", "bos"),
        ("<|im_start|>", None),
        ("<|im_end|>", "eos"),
    ):
        index = made.add(token, 3)
        if role:
            made.extra.setdefault(f"tokenizer.ggml.{role}_token_id", index)
    made.add("<tool_call>", 4)
    made.extra.setdefault(
        "tokenizer.chat_template",
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}",
    )
    while len(made.tokens) < VOCAB:
        made.add(f"[PAD{len(made.tokens)}]", 5)
    return made


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, Array],
    values: Mapping[str, Any],
    vocabulary: Vocabulary | None = None,
    kinds: Kinds = lambda name: F32,
) -> Path:
    """Write a file; matrices are quantized to what ``kinds`` says of their name."""
    writer = gguf.GGUFWriter(path, arch)
    vocabulary = byte_level() if vocabulary is None else vocabulary
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    if vocabulary.tokens:
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
    for key, value in {**values, **vocabulary.extra}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = kinds(name) if tensor.ndim > 1 else F32
        data = stored(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(values: Array, kind: gguf.GGMLQuantizationType) -> Array:
    """As the file has them; random blocks of a type that nobody writes in Python."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        width = values.shape[-1] // elements * size
        rng = np.random.default_rng(values.size)
        # Scales, wherever they are, are finite float16.
        return rng.integers(0, 0x28, (*values.shape[:-1], width)).astype(np.uint8)


def write_model(
    path: Path,
    arch: str,
    model: nn.Module,
    *,
    kinds: Kinds = lambda name: F32,
    vocabulary: Vocabulary | None = None,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> Path:
    """Write a model of :func:`random_model`; ``values`` and ``tensors`` are added."""
    args: Any = model.args
    config = {**vars(args)}
    return write_gguf(
        path,
        FILE_NAMES.get(arch, arch),
        {**file_tensors(arch, model), **(tensors or {})},
        {**metadata(arch, config), **(values or {})},
        vocabulary,
        kinds,
    )
