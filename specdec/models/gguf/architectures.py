"""The architectures of GGUF files: mlx-lm's names for their tensors and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import UnsupportedModelError
from .header import GGUFFile

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_QKV = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True)
class Architecture:
    """How an architecture's files differ from mlx-lm's folders.

    Args:
        model_type: the model type in mlx-lm.
        names: mlx-lm's names of a layer's tensors, without ``.weight``.
        biases: tensors that may have a bias as well as a weight.
        interleaved: whether rows of q and k are interleaved for RoPE over neighbours.
        traditional: whether mlx-lm's model can compute RoPE over neighbours; otherwise
            the rows go back to their places.
        norms_hold_one: whether norms hold 1 + w, while mlx-lm adds the 1 itself.
        head_dim: whether a head's width may differ from hidden size over heads.
        keys: mlx-lm's configuration keys by metadata keys.
        fixed: configuration that files do not have.
    """

    model_type: str
    names: Mapping[str, str]
    biases: tuple[str, ...] = ()
    interleaved: bool = False
    traditional: bool = True
    norms_hold_one: bool = False
    head_dim: bool = True
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)


_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}

ARCHITECTURES = {
    "llama": Architecture("llama", _ATTENTION | _MLP, interleaved=True),
    "smollm3": Architecture("smollm3", _ATTENTION | _MLP, interleaved=True),
    "qwen2": Architecture("qwen2", _ATTENTION | _MLP, biases=_QKV, head_dim=False),
    "qwen3": Architecture("qwen3", _ATTENTION | _HEAD_NORMS | _MLP),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _ATTENTION | _EXPERTS | _SHARED_EXPERT,
        biases=_QKV,
        head_dim=False,
        keys={
            **_EXPERT_KEYS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _ATTENTION | _HEAD_NORMS | _EXPERTS,
        keys={**_EXPERT_KEYS, "expert_feed_forward_length": "moe_intermediate_size"},
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "olmo2": Architecture(
        "olmo2",
        {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS_AFTER},
    ),
    "olmoe": Architecture(
        "olmoe", _ATTENTION | _HEAD_NORMS | _EXPERTS, keys=_EXPERT_KEYS
    ),
    "phi3": Architecture(
        "phi3",
        {
            **_ATTENTION,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        head_dim=False,
    ),
    "granite": Architecture(
        "granite",
        _ATTENTION | _MLP,
        interleaved=True,
        traditional=False,
        head_dim=False,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    "gemma": Architecture("gemma", _ATTENTION | _MLP, norms_hold_one=True),
    "gemma2": Architecture(
        "gemma2",
        {**_ATTENTION, **_MLP, **_GEMMA_NORMS},
        norms_hold_one=True,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_GEMMA_NORMS},
        norms_hold_one=True,
    ),
}
# Files of architecture llama with experts.
_MIXTRAL = Architecture(
    "mixtral",
    {
        **_ATTENTION,
        **{k: v.replace("mlp.", "block_sparse_moe.", 1) for k, v in _EXPERTS.items()},
    },
    interleaved=True,
    head_dim=False,
    keys={**_EXPERT_KEYS, "expert_count": "num_local_experts"},
)


def architecture_of(file: GGUFFile) -> str:
    """The name of the file's architecture.

    Raises:
        UnsupportedModelError: it is not one of :data:`ARCHITECTURES`.
    """
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} has the GGUF architecture {name!r:.60}, which is not "
            f"supported: use one of {', '.join(ARCHITECTURES)}, or an MLX folder"
        )
    return str(name)


def architecture(file: GGUFFile) -> Architecture:
    """The file's architecture.

    Raises:
        UnsupportedModelError: see :func:`architecture_of`.
    """
    name = architecture_of(file)
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]
