"""Every architecture of mlx-lm: small arguments, and what specdec makes of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING

from specdec.errors import UnsupportedModelError
from specdec.models import vision
from specdec.models.draft_heads.mtp import FAMILIES
from specdec.models.layers import (
    TargetEnds,
    caches_of_layers,
    has_text_model,
    record_layers,
)
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import Accepted, Drafter, DraftRows, Proposals, Round

from ..plain import AT_ONCE, run_rows

VOCABULARY = 61
#: Of packed keys and values.
GROUP_SIZE = 32

#: By the names that mlx-lm's arguments have; an architecture takes those that it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-05, "layer_norm_epsilon": 1e-05,
    "norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "attention_bias": False,
    # experts
    "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_expert_bias": True,
    "num_dense_layers": 1,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # recurrent layers
    "full_attention_interval": 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "conv_bias": True,
    "conv_L_cache": 3, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_d_head": 8, "mamba_head_dim": 8, "mamba_n_groups": 1,
    "mamba_proj_bias": False, "mamba_conv_bias": True, "mamba_expand": 2,
    "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4,
    "n_groups": 1, "state_size": 8, "ssm_state_size": 8,
    # other spellings of the same
    "hidden_dim": 32, "d_model": 32, "n_embd": 32, "model_dim": 32, "num_layers": 2,
    "n_layers": 2, "n_layer": 2, "num_heads": 4, "n_heads": 4, "n_head": 4,
    "num_kv_heads": 2, "n_kv_heads": 2, "n_inner": 48, "n_ctx": 512, "n_positions": 512,
    "block_size": 512, "layer_norm_eps": 1e-05, "layernorm_epsilon": 1e-05,
    "post_norm_eps": 1e-05, "rotary_dim": 8, "rotary_pct": 1.0,
    "rotary_emb_base": 10000, "num_local_experts": 4, "moe_num_experts": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_shared_expert": 1, "moe_topk": 2,
    "moe_top_k": 2, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "shared_intermediate_size": 16,
    "dense_intermediate_size": 48, "intermediate_size_mlp": 48,
    "expert_ffn_hidden_size": 16, "moe_hidden_size": 16, "share_expert_dim": 16,
    # scales
    "logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "output_multiplier": 1.0, "dim_model_base": 32,
    "scale_depth": 1.4, "scale_emb": 1.0, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8,
    # attention
    "qk_norm": True, "use_qk_norm": True, "post_norm": False, "use_qkv_bias": True,
    "hidden_act": "silu", "sliding_window": 8, "window_size": 8,
    "sliding_window_size": 8, "sliding_window_pattern": 2,
    "rope_local_base_freq": 10000.0, "rope_local_theta": 10000.0,
    "attention_chunk_size": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "kv_channels": 8, "rope_scaling": None, "time_step_rank": 4,
    "time_step_limit": (0.001, 100.0), "layer_group_size": 2, "group_norm_size": 2,
}  # fmt: skip

_ATTENTION_SECOND = ["linear_attention", "full_attention"] * 2
_MAMBA = ["mamba", "attention"] * 2
_KDA = {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8,
    "short_conv_kernel_size": 4,
}  # fmt: skip
_LFM2 = {
    "layer_types": ["conv", "full_attention"] * 2, "block_dim": 32, "block_ff_dim": 48,
    "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip

_SLIDING = ["sliding_attention", "full_attention"] * 2
_YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_BY_LAYER = {
    "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
_LLAMA4_SCALED = {
    **_YARN,
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
}
_GEMMA4 = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}
_GEMMA3N = {
    **_GEMMA4, "layer_types": _SLIDING, "activation_sparsity_pattern": [0.0] * 4,
    "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True,
    "altup_active_idx": 0, "laurel_rank": 4,
}  # fmt: skip
_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 48,
    "zero_expert_num": 1, "num_layers": 2, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}  # fmt: skip

# Two layers have one of each kind, but for these.
_FOUR_LAYERS = {
    "afm7",
    "afmoe",
    "deepseek_v41",
    "gear",
    "gemma3n",
    "gemma4",
    "gemma4_text",
    "granitemoehybrid",
    "llama4",
    "ministral3",
    "nemotron-nas",
    "olmo_hybrid",
    "openelm",
    "spark2_5",
}

#: What an architecture wants beside, or otherwise.
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5": {"num_experts": 0}, "lfm2": _LFM2, "lfm2-vl": _LFM2, "lfm2_moe": _LFM2,
    "granitemoehybrid": {"layer_types": _MAMBA},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M", "E"]},
    "falcon_h1": {"mamba_d_ssm": 32},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "plamo2": {
        "hidden_size_per_head": 8, "attention_window_size": 512,
        "full_attention_idx": [],
    },
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 512},
    "kimi_k3": {
        "linear_attn_config": _KDA, "hidden_act": "situ", "activation_situ_beta": 1.0,
        "attn_res_block_size": 2, "num_experts_per_token": 2,
    },
    "olmo_hybrid": {"layer_types": _ATTENTION_SECOND, "linear_allow_neg_eigval": True},
    "bailing_moe_linear": {"moe_router_enable_expert_bias": True},
    "bailing_moe_v3": {"short_conv_kernel_size": 4},
    "baichuan_m1": {
        "sliding_window": 16, "sliding_window_layers": [1, 3], "conv_window": 2,
    },
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 4, "v_low_rank_dim": 4, "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "hidden_size": 36, "ngram_vocab_size_ratio": 2},
    "prism_hadamard_qwen35": {"num_experts": 0},
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 2.0},
    "afmoe": {"layer_types": _SLIDING},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    # A window alone, groups of four, and two layers that share groups of two.
    "deepseek_v41": {
        "compress_ratios": (0, 4, 2, 2), "kv_source_layer_ids": (1, 2),
        "index_source_layer_ids": (1, 2, 3), "candidate_source_layer_id": 2,
        "candidate_block_size": 2, "qk_rope_head_dim": 4, "index_n_heads": 8,
        "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "hc_sinkhorn_iters": 3,
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": _SLIDING}, "gemma3": {"num_key_value_heads": 2},
    "gemma3n": _GEMMA3N, "gemma4": _GEMMA4, "gemma4_text": _GEMMA4,
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt_oss": {
        "layer_types": _SLIDING, "rope_scaling": {**_YARN, "rope_type": "yarn"},
    },
    "hunyuan": {
        "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "laguna": {"layer_types": _SLIDING},
    "llama4": {
        "interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "floor_scale": 4,
    },
    "lille-130m": {"n_embd": 256, "n_head": 4},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "mellum": {"layer_types": _SLIDING, "rope_parameters": _BY_LAYER},
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 64,
        },
    },
    "ministral3": {"layer_types": _SLIDING, "rope_parameters": _LLAMA4_SCALED},
    "mistral4": {"rope_parameters": _LLAMA4_SCALED},
    "muse_spark": {
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0, 10000.0, 0.0], "layer_types": _SLIDING,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
        ],
    },
    "plamo": {"n_shared_head": 2, "num_key_value_heads": 4},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "swa_v_head_dim": 8,
    },
    "minimax_m3_vl": {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1,
    },
    "nemotron": {"hidden_act": "relu2"}, "olmo3": {"layer_types": _SLIDING},
    "openelm": {
        "num_transformer_layers": 4, "ffn_dim_divisor": 8, "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4, "ffn_multipliers": [1.0] * 4,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 48,
        "gegelu_limit": 20.0, "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 3,
        "vocab_size": 100352,
    },
    "phixtral": {"num_vocab": VOCABULARY, "rotary_dim": 8},
    "spark2_5": {
        "rope_parameters": _BY_LAYER, "layer_types": _SLIDING, "hidden_act": "gelu",
    },
    "step3p5": {"num_attention_groups": 2, "layer_types": _SLIDING},
    "muse_glimmer": {"layer_types": _SLIDING},
}  # fmt: skip


#: What the text part of an architecture wants otherwise.
TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text"},
    "mistral3": {"model_type": "llama"},
}


# mlx-lm looks at a class's signature for every argument that it is offered.
_SIGNATURES = SimpleNamespace(signature=cache(inspect.signature))


def arguments_of(arch: str, **changes: Any) -> dict[str, Any]:
    """Arguments of a small model, by mlx-lm's names; ``changes`` are some of them."""
    layers = {"num_hidden_layers": 4, "num_layers": 4} if arch in _FOUR_LAYERS else {}
    own = {**layers, **OWN.get(arch, {}), **changes}
    arguments = {**COMMON, "model_type": arch, **own}
    return {**arguments, "text_config": {**arguments, **TEXT.get(arch, {})}}


def build(arch: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A small random model in float32; ``changes`` are arguments by mlx-lm's names."""
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    arguments = arguments_of(arch, **changes)
    mx.random.seed(seed)
    with patch.object(base, "inspect", _SIGNATURES):
        model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments))

    def draw(weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        # Wider than the default, so that logits lie far apart; norms are about one.
        scale: float = 0.1 if weight.ndim < 2 else 2 * weight.shape[-1] ** -0.5
        noise = mx.random.normal(weight.shape) * scale
        return weight + noise if weight.ndim < 2 else noise

    model.update(tree_map(draw, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model.eval()


def names() -> list[str]:
    """Every architecture of the installed mlx-lm: a module with a ``Model``."""
    found = [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [n for n in found if _has_model(n)]


@cache
def _has_model(name: str) -> bool:
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    assert spec is not None
    assert spec.origin is not None
    code = ast.parse(Path(spec.origin).read_text("utf-8")).body
    found = {n.name for n in code if isinstance(n, ast.ClassDef)}
    imports = (n.names for n in code if isinstance(n, ast.ImportFrom))
    found |= {name.asname or name.name for each in imports for name in each}
    return {"Model", "ModelArgs"} <= found


def other_names() -> str:
    """A sentence of docs/models.md: model types that mlx-lm runs as another one."""
    each = ", ".join(f"{a} as {b}" for a, b in sorted(MODEL_REMAPPING.items()))
    return f"mlx-lm runs some models as others: {each}."


class Guesses(Drafter):
    """Knows how every row goes on, and says so two times of three.

    ``heard[text]`` has the states of the layers that it listens to, by position.
    """

    def __init__(self, texts: Sequence[Sequence[int]], layers: tuple[int, ...] = ()):
        self.texts = {tuple(t) for t in texts}
        self.hidden_layers = layers
        self.heard: dict[tuple[int, ...], dict[int, mx.array]] = {}

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> GuessRows:
        texts = [
            next((t for t in self.texts if t[: len(p)] == tuple(p)), (0,))
            for p in prompts
        ]
        return GuessRows(self, texts)


class GuessRows(DraftRows):
    def __init__(self, drafter: Guesses, texts: list[tuple[int, ...]]):
        self.drafter, self.texts = drafter, texts

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        for text, states, n in zip(self.texts, hidden, lengths, strict=True):
            heard = self.drafter.heard.setdefault(text, {})
            heard |= {len(heard) + j: states[j] for j in range(n)}

    def commit(self, round_: Round, accepted: Accepted) -> None:
        if accepted.hidden is None:
            return
        arrays: list[Any] = [round_.lengths, accepted.kept]
        each = zip(*(a.tolist() for a in arrays), strict=True)
        for text, states, (n, kept) in zip(
            self.texts, accepted.hidden, each, strict=True
        ):
            heard = self.drafter.heard.setdefault(text, {})
            heard |= {n - 1 + j: states[j] for j in range(kept)}

    def propose(self, round_: Round) -> Proposals:
        lengths: Any = round_.lengths.tolist()
        rows = []
        for text, n in zip(self.texts, lengths, strict=True):
            right = [*text[n:], *[0] * round_.num_draft_tokens]
            rows.append(
                [
                    token if (n + j) % 3 else (token + 1) % VOCABULARY
                    for j, token in enumerate(right[: round_.num_draft_tokens])
                ]
            )
        return Proposals(mx.array(rows, mx.int32))

    def filter(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[i] for i in rows]

    def extend(self, other: GuessRows) -> None:
        self.texts = self.texts + other.texts


#: What mlx-lm itself does not run on a CPU, or not from small random weights.
NOT_RUN = {
    "bitnet": "mlx-lm runs it on Metal only",
    "muse_spark": "mlx-lm runs it on Metal only",
    "olmo": "mlx-lm needs the package ai2-olmo for it",
    "prism_hadamard_qwen35": "mlx-lm runs it from packed weights only; its layers are "
    "those of qwen3_5",
}
#: Those whose second cache of a layer is an indexer's, which stays as it is.
INDEXED = ("deepseek_v32", "glm_moe_dsa")
#: Of these layers nobody reads hidden states.
UNHEARD = ("afm7", "deepseek_v41", "gemma3n", "iquestloopcoder")
#: What is refused, before any work, and why; the reason is in the error.
REFUSED: dict[str, str] = {}

PROMPTS = [[3], [(7 * j + 1) % VOCABULARY for j in range(12)], [5, 9, 2, 40]]
NEW_TOKENS = 6
#: What mlx-lm puts out depends on the size of a chunk: its windows and masks do.
BY_TOKEN = {"phi3small", "plamo3"}


class Rounding:
    """A cache of mlx-lm's that holds what packed keys and values can hold.

    Attributes that a model reads or sets are the cache's.
    """

    def __init__(self, cache: Any, bits: int):
        vars(self).update(cache=cache, bits_=bits)

    def update_and_fetch(self, *arrays: mx.array) -> Any:
        return self.cache.update_and_fetch(*map(self._rounded, arrays))

    def _rounded(self, array: mx.array) -> mx.array:
        packing = {"group_size": GROUP_SIZE, "bits": self.bits_}
        return mx.dequantize(*mx.quantize(array, **packing), **packing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cache, name, value)


def rounding(arch: str, cache: Any, bits: int) -> Any:
    """The cache, or those of a list, that keep keys and values rounded."""
    if isinstance(cache, CacheList):
        n = 1 if arch in INDEXED else None
        rounded = [rounding(arch, each, bits) for each in cache.caches[:n]]
        return CacheList(*rounded, *cache.caches[len(rounded) :])
    return cache if isinstance(cache, ArraysCache) else Rounding(cache, bits)


def plain(
    model: Any,
    prompt: Sequence[int],
    *,
    by_token: bool = False,
    kv_bits: int | None = None,
) -> list[int]:
    """Greedy tokens of one sequence, with mlx-lm's own caches."""
    caches = make_prompt_cache(model)
    if kv_bits is not None:
        caches = [rounding(model.model_type, cache, kv_bits) for cache in caches]
    step = 1 if by_token else len(prompt)
    for i in range(0, len(prompt), step):
        logits = model(mx.array([prompt[i : i + step]]), cache=caches)
    tokens = [mx.argmax(logits[:, -1], axis=-1)]
    while len(tokens) < NEW_TOKENS:
        logits = model(tokens[-1][None], cache=caches)
        tokens.append(mx.argmax(logits[:, -1], axis=-1))
    found: Any = mx.concatenate(tokens).tolist()
    return list(found)


def differences(
    arch: str, model: Any, kv_bits: int | None = None, backend: Any = AT_ONCE
) -> list[int]:
    """Prompts whose tokens are others in a batch than alone; none is exact.

    A batch of two rows for three prompts, of 1 to 12 tokens, prefilled in chunks; a
    third of what is proposed is wrong.

    Raises:
        UnsupportedModelError: the architecture is refused.
    """
    prompts = [p * 8 if arch == "phi3small" else p for p in PROMPTS]  # blocks of 32
    by_token = arch in BY_TOKEN
    wanted = [plain(model, p, by_token=by_token, kv_bits=kv_bits) for p in prompts]
    assert len({tuple(tokens) for tokens in wanted}) > 1
    texts = [[*p, *t] for p, t in zip(prompts, wanted, strict=True)]
    heard_layers = () if arch in UNHEARD or kv_bits is not None else (0, -1)
    drafter = Guesses(texts, heard_layers)
    got = run_rows(
        model,
        None,
        prompts,
        [SamplingParams(max_tokens=NEW_TOKENS)] * len(prompts),
        batch_size=2,
        num_draft_tokens=3,
        drafter=drafter,
        prefill_step_size=5,
        backend=backend,
        kv_bits=kv_bits,
        kv_group_size=GROUP_SIZE,
    )
    assert sum(row.accepted for row in got) >= NEW_TOKENS
    wrong = [i for i, row in enumerate(got) if row.tokens != wanted[i]]
    heard = [
        heard_well(model, drafter, text, 1 if by_token else len(text)) for text in texts
    ]
    return wrong + [i for i, well in enumerate(heard) if not well]


def heard_well(model: Any, drafter: Guesses, text: Sequence[int], step: int) -> bool:
    """Whether states that were heard of a row are those of plain forwards."""
    if not drafter.hidden_layers:
        return True
    listened, states = record_layers(model, drafter.hidden_layers, "model")
    caches, found = make_prompt_cache(model), []
    for first in range(0, len(text), step):
        listened(mx.array([list(text[first : first + step])]), cache=caches)
        found.append(states.take()[0])
    expected, heard = mx.concatenate(found), drafter.heard[tuple(text)]
    most = float(mx.abs(expected).max())
    return all(
        bool(mx.abs(heard[i] - expected[i]).max() <= 1e-3 * most)
        for i in range(len(text) - 1)
    )


def takes_heads(model: Any) -> bool:
    """Whether draft heads can read its hidden states, and share its ends."""
    tokens = mx.array([[1, 2]])
    try:
        listened, states = record_layers(model, (0,), "model")
        wanted = listened(tokens[:, :1]).shape[-1]
        states.check("model")
        ends = TargetEnds(model, "model")
        return bool(ends.logits(ends.embed(tokens)).shape[-1] == wanted)
    except UnsupportedModelError:
        return False


def line(arch: str, model: Any) -> str:
    """The architecture's line in docs/models.md."""
    reason = NOT_RUN.get(arch, REFUSED.get(arch))
    caches = (
        "" if model is None else ", ".join(sorted(_kinds(make_prompt_cache(model))))
    )
    if reason is not None:
        return f"| {arch} | no: {reason} | {caches} | |"
    assert model is not None
    drafts = ["`layers:`"] * (caches_of_layers(model) is not None)
    drafts += ["distilled"] * has_text_model(model)
    drafts += ["heads"] * takes_heads(model)
    drafts += ["`mtp`"] * (arch in FAMILIES)
    code = inspect.getsource(importlib.import_module(f"mlx_lm.models.{arch}"))
    runs = "text only" if re.search("vision|visual|audio", code) else "yes"
    if arch in {MODEL_REMAPPING.get(kind, kind) for kind in vision.FAMILIES}:
        runs = "text, [images](images.md)"
    return f"| {arch} | {runs} | {caches} | {', '.join([*drafts, 'any other'])} |"


def _kinds(caches: Sequence[Any]) -> set[str]:
    kinds: set[str] = set()
    for each in caches:
        if isinstance(each, CacheList):
            kinds |= _kinds(each.caches)
        else:
            kinds.add(_KINDS.get(type(each).__name__, type(each).__name__))
    return kinds


_KINDS = {
    "KVCache": "full",
    "LayerCache": "compressed, sliding window",
    "RotatingKVCache": "sliding window",
    "ChunkedKVCache": "chunks",
    "ArraysCache": "recurrent",
}
