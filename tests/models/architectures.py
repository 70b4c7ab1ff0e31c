"""Small arguments for mlx-lm's architectures: one table that all take theirs from."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCABULARY = 61

#: By the names that mlx-lm's arguments have; an architecture takes those that it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    # experts
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "num_dense_layers": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # recurrent layers
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_expand": 2,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "conv_kernel": 4,
    "n_groups": 1,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "time_step_limit": (0.001, 100.0),
    "layer_group_size": 2,
    "group_norm_size": 2,
}

_ATTENTION_SECOND = ["linear_attention", "full_attention"] * 2
_MAMBA = ["mamba", "attention"] * 2
_KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
}
_LFM2 = {"layer_types": ["conv", "full_attention"] * 2}

#: What an architecture wants beside, or otherwise.
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": {**COMMON, "num_experts": 0}},
    "qwen3_5_moe": {"text_config": COMMON},
    "lfm2": {
        **_LFM2,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": _LFM2,
    "granitemoehybrid": {
        "layer_types": _MAMBA,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "E"],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 32},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "mamba2": {"num_heads": 4},
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": 512,
        "full_attention_idx": [],
    },
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 512},
    "kimi_k3": {
        "text_config": {
            **COMMON,
            "linear_attn_config": _KDA,
            "activation_situ_beta": 1.0,
            "attn_res_block_size": 2,
            "num_experts_per_token": 2,
        }
    },
    "olmo_hybrid": {
        "layer_types": _ATTENTION_SECOND,
        "linear_allow_neg_eigval": True,
    },
    "bailing_moe_linear": {"moe_router_enable_expert_bias": True},
    "bailing_moe_v3": {"short_conv_kernel_size": 4},
    "baichuan_m1": {
        "sliding_window": 16,
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
    "longcat_flash_ngram": {
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "hidden_size": 36,
        "ngram_vocab_size_ratio": 2,
    },
}


def build(arch: str, seed: int = 0) -> nn.Module:
    """A small random model in float32."""
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    arguments = {**COMMON, "model_type": arch, **OWN.get(arch, {})}
    mx.random.seed(seed)
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
