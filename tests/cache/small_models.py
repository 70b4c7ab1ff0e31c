"""Arguments of small random models, of every kind of layer that is supported.

Windows and chunks are 8 tokens, so that a short run goes far past them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from mlx_lm.models.llama import ModelArgs, TransformerBlock

WINDOW = 8

_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

#: name -> (architecture, arguments beside those of the ``tiny_model`` fixture)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "sliding": ("llama", _ALTERNATING),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt-oss": (  # attention sinks
        "gpt_oss",
        {
            **_ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "mistral": (  # queries scaled by position
        "ministral3",
        {
            **_ALTERNATING,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "latent": (  # takes masks for boolean arrays
        "deepseek_v3",
        {**_LATENT, "n_routed_experts": None, "first_k_dense_replace": 9},
    ),
    "list": (  # two caches a layer
        "longcat_flash",
        {
            **_LATENT,
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "ffn_hidden_size": 64,
            "moe_topk": 1,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 2,
            "zero_expert_num": 1,
            "num_layers": 2,
            "routed_scaling_factor": 1.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
        },
    ),
    "shared-kv": (  # fewer caches than layers
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    ),
    "shared-kv-3n": (
        "gemma3n",
        {
            "text_config": {
                "model_type": "gemma3n_text",
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "head_dim": 8,
                "rms_norm_eps": 1e-5,
                "vocab_size": 97,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 97,
                "sliding_window": WINDOW,
                "max_position_embeddings": 4096,
                "rope_local_base_freq": 1e4,
                "rope_theta": 1e4,
                "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.0] * 4,
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "altup_coef_clip": 120.0,
                "altup_correct_scale": True,
                "altup_active_idx": 0,
                "laurel_rank": 4,
            }
        },
    ),
}

LLAMA4 = {
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": WINDOW,
        "head_dim": 8,
        "hidden_size": 32,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 512,
        "model_type": "llama4_text",
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1e4,
        "use_qk_norm": True,
        "vocab_size": 97,
    }
}


class ChunkedModel(nn.Module):
    """llama4's kind of attention, with masks that come from the cache.

    Without caches it attends by a mask of its own: the reference.
    """

    def __init__(self, hidden_size: int = 32, head_dim: int = 8):
        super().__init__()  # type: ignore[no-untyped-call]
        args = ModelArgs(
            model_type="llama",
            hidden_size=hidden_size,
            num_hidden_layers=3,
            intermediate_size=2 * hidden_size,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=97,
        )
        self.embed = nn.Embedding(97, hidden_size)
        self.layers = [TransformerBlock(args) for _ in range(3)]
        self.out = nn.Linear(hidden_size, 97, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed(inputs)
        if cache is None:
            masks = self._masks(inputs.shape[1])
            cache = [None] * 3
        else:
            masks = [create_attention_mask(h, c) for c in cache]
        for layer, mask, c in zip(self.layers, masks, cache, strict=True):
            h = layer(h, mask, c)
        logits: mx.array = self.out(h)
        return logits

    def _masks(self, length: int) -> list[mx.array]:
        chunk = mx.arange(length) // WINDOW
        full = create_causal_mask(length)
        chunked = full & (chunk[:, None] == chunk[None])
        return [chunked, full, chunked]

    def make_cache(self) -> list[Any]:
        return [ChunkedKVCache(WINDOW), KVCache(), ChunkedKVCache(WINDOW)]


#: Layers without keys of their own, which turn their queries by the columns that they
#: are handed.
AFM7 = {
    "hidden_dim": 32,
    "num_layers": 4,
    "num_kv_reuse_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 2.0,
}

#: Attention to some blocks of keys, chosen by the columns that are read.
MINIMAX_M3 = {
    "text_config": {
        "model_type": "minimax_m3",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rotary_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    }
}

#: A mask one token wider than the ring that decoding reads.
PLAMO3 = {
    "window_size": WINDOW,
    "sliding_window_pattern": 2,
    "rope_local_theta": 1e4,
    "tie_word_embeddings": False,
}
