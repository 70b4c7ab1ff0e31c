"""Small random models that see, as folders in the form of mlx-community."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.prompts.images import Image

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}MARKER{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}
_MISTRAL_IMAGES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_LFM_IMAGES = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"] + [
    f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)
]
_QWEN_IMAGES = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
_GEMMA_IMAGES = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
_GEMMA4_IMAGES = ["<|image|>", "<|image>", "<image|>"]
_GEMMA4_TEXT = {
    **_TEXT, "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 4,
    "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    "sliding_window": 12, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
_GEMMA4_TOWER = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2,
    "default_output_length": 6, "position_embedding_size": 64,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 32, "num_attention_heads": 2, "image_size": 112,
}  # fmt: skip
_MISTRAL_TEXT = {**_TEXT, "model_type": "mistral", "head_dim": 8}
#: The text part's settings are at the top. All frequencies turn fast enough to matter.
_QWEN2 = {
    **_TEXT, "rope_theta": 4.0, "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
}  # fmt: skip
_QWEN3_TOWER = {
    "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_heads": 2,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}  # fmt: skip
#: By family: special tokens (the marker first), and the configuration.
FAMILIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "mistral3": (
        _MISTRAL_IMAGES,
        {
            "text_config": _MISTRAL_TEXT,
            "vision_config": {**_PIXTRAL, "patch_size": 14},
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
    ),
    "pixtral": (
        _MISTRAL_IMAGES,
        {
            "text_config": _MISTRAL_TEXT,
            "vision_config": {**_PIXTRAL, "patch_size": 16},
            "vision_feature_layer": -1,
        },
    ),
    "lfm2-vl": (
        _LFM_IMAGES,
        {
            "text_config": {
                **_TEXT, "model_type": "lfm2", "norm_eps": 1e-5, "conv_L_cache": 3,
                "conv_bias": False, "block_dim": 32, "block_ff_dim": 64,
                "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "model_type": "lfm2_vl", "hidden_size": 16, "intermediate_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3,
                "image_size": 64, "patch_size": 8, "num_patches": 16,
            },
            "downsample_factor": 2, "encoder_patch_size": 8, "tile_size": 32,
            "projector_hidden_size": 32, "vision_feature_layer": -1,
        },
    ),
    "gemma3": (
        _GEMMA_IMAGES,
        {
            "text_config": {
                **_TEXT, "model_type": "gemma3_text", "head_dim": 8,
                "num_hidden_layers": 3, "sliding_window": 12,
                "sliding_window_pattern": 2, "query_pre_attn_scalar": 8,
                "mm_tokens_per_image": 4,
            },
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 16,
                "num_hidden_layers": 2, "intermediate_size": 32,
                "num_attention_heads": 2, "patch_size": 8, "image_size": 32,
            },
            "hidden_size": 32,
        },
    ),
    "gemma4": (  # as E2B and E4B: causal, with an embedding for each layer
        _GEMMA4_IMAGES,
        {
            "text_config": {
                **_GEMMA4_TEXT, "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 1, "use_double_wide_mlp": True,
            },
            "vision_config": _GEMMA4_TOWER,
        },
    ),
    "gemma4-large": (  # as 26B and 31B
        _GEMMA4_IMAGES,
        {
            "model_type": "gemma4",
            "text_config": {**_GEMMA4_TEXT, "use_bidirectional_attention": "vision"},
            "vision_config": _GEMMA4_TOWER,
        },
    ),
    "gemma4_unified": (  # as 12B, which has no tower
        _GEMMA4_IMAGES,
        {
            "text_config": {
                **_GEMMA4_TEXT, "model_type": "gemma4_unified_text",
                "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            "vision_config": {
                "model_type": "gemma4_unified_vision", "patch_size": 8,
                "pooling_kernel_size": 2, "model_patch_size": 16, "mm_embed_dim": 64,
                "mm_posemb_size": 64, "num_soft_tokens": 6, "output_proj_dims": 64,
            },
        },
    ),
    "qwen2_5_vl": (
        _QWEN_IMAGES,
        {
            **_QWEN2,
            "vision_config": {
                "depth": 2, "hidden_size": 16, "intermediate_size": 32,
                "out_hidden_size": 32, "num_heads": 2, "patch_size": 14,
                "spatial_merge_size": 2, "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    "qwen2_vl": (
        _QWEN_IMAGES,
        {
            **_QWEN2,
            "vision_config": {
                "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2,
                "patch_size": 14, "spatial_merge_size": 2, "mlp_ratio": 2,
            },
        },
    ),
    "qwen3_5": (
        _QWEN_IMAGES,
        {
            "text_config": {
                **_TEXT, "model_type": "qwen3_5_text", "head_dim": 16,
                "num_hidden_layers": 4, "full_attention_interval": 2,
                "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
                "rope_parameters": {
                    "type": "default", "mrope_section": [2, 1, 1],
                    "rope_theta": 4.0, "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": {
                **_QWEN3_TOWER, "model_type": "qwen3_5", "depth": 2,
                "deepstack_visual_indexes": [],
            },
        },
    ),
    "qwen3_vl": (
        _QWEN_IMAGES,
        {
            "text_config": {
                **_TEXT, "model_type": "qwen3", "head_dim": 8, "rope_theta": 4.0,
                "num_hidden_layers": 3, "tie_word_embeddings": True,
                "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
            },
            "vision_config": {
                **_QWEN3_TOWER, "model_type": "qwen3_vl", "depth": 3,
                "deepstack_visual_indexes": [0, 1],
            },
        },
    ),
}  # fmt: skip
_QWEN3 = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 32 * 32, "max_pixels": 32 * 32 * 12,
}  # fmt: skip
_GEMMA4 = {
    "image_processor": {
        "patch_size": 8, "max_soft_tokens": 6, "pooling_kernel_size": 2,
    }
}  # fmt: skip
_MISTRAL = {
    "size": {"longest_edge": 112}, "image_mean": [0.5] * 3, "image_std": [0.3] * 3,
}  # fmt: skip
_QWEN2_IMAGES = {
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12,
}  # fmt: skip
_PREPROCESSORS = {
    "mistral3": {**_MISTRAL, "patch_size": 14},
    "pixtral": {**_MISTRAL, "patch_size": 16},
    "lfm2-vl": {
        "encoder_patch_size": 8, "tile_size": 32, "downsample_factor": 2,
        "min_image_tokens": 2, "max_image_tokens": 4,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 4,
        "size": {"height": 32, "width": 32}, "do_pan_and_scan": False,
    },
    "qwen2_vl": _QWEN2_IMAGES, "qwen2_5_vl": _QWEN2_IMAGES,
    "qwen3_5": _QWEN3, "qwen3_vl": _QWEN3, "gemma4": _GEMMA4,
    "gemma4-large": _GEMMA4, "gemma4_unified": _GEMMA4,
}  # fmt: skip


def write_vision_folder(
    path: Path, family: str, seed: int = 0, *, layers: int = 0, **tower: int
) -> Any:
    """Write a random model of a family; return mlx-vlm's model of it.

    Args:
        layers: how many the text part has, if not the usual number.
        tower: sizes of the tower, if not the usual ones.
    """
    path.mkdir(parents=True, exist_ok=True)
    special, config = FAMILIES[family]
    tokenizer = _tokenizer(special)
    config = {"model_type": family} | json.loads(json.dumps(config))
    config["vision_config"] |= tower
    if layers:
        config.get("text_config", config)["num_hidden_layers"] = layers
    at = special[special is _GEMMA_IMAGES]
    config["image_token_index"] = tokenizer.convert_tokens_to_ids(at)
    config["image_token_id"] = config["image_token_index"]
    config.get("text_config", {})["vocab_size"] = len(tokenizer)
    config["vocab_size"] = len(tokenizer)
    for key, name in (("vision_start", "<|vision_start|>"), ("video", "<|video_pad|>")):
        if name in special:
            config[f"{key}_token_id"] = tokenizer.convert_tokens_to_ids(name)
    config["eos_token_id"] = tokenizer.eos_token_id
    model = vision_model(config, seed)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[family]))
    if special is _GEMMA_IMAGES:
        (path / "processor_config.json").write_text('{"image_seq_length": 4}')
    tokenizer.save_pretrained(path)
    return model


def vision_model(config: dict[str, Any], seed: int = 0) -> Any:
    """mlx-vlm's model with random weights, wide enough that logits lie far apart."""
    utils = import_module("mlx_vlm.utils")
    module, _ = utils.get_model_and_args(config)
    settings = json.loads(json.dumps(config))
    model_config = utils.update_module_configs(
        module.ModelConfig.from_dict(settings), module, settings, ["text", "vision"]
    )
    mx.random.seed(seed)
    model: nn.Module = module.Model(model_config)

    def draw(path: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2 or weight.dtype != mx.float32:
            return weight
        scale: float = 2 * weight.shape[-1] ** -0.5
        if "gemma4" in config["model_type"] and path.endswith("embed_tokens.weight"):
            scale /= 4  # Gemma 4 multiplies by more, and would repeat each token
        return mx.random.normal(weight.shape) * scale

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model.eval()


def random_image(width: int, height: int, seed: int = 0) -> Image:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image(width, height, pixels.tobytes())


def _tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<end>", "<user>", "<assistant>", "<system>", *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    named: dict[str, str] = {}
    if special is _GEMMA_IMAGES or special is _GEMMA4_IMAGES:
        keys = ["boi_token", "image_token", "eoi_token"]
        if special is _GEMMA4_IMAGES:
            keys[:2] = keys[1::-1]
        named = dict(zip(keys, special, strict=True))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": named} if named else {}),
    )
    marker = special[0]
    if special is _QWEN_IMAGES:
        marker = f"<|vision_start|>{marker}<|vision_end|>"
    fast.chat_template = TEMPLATE.replace("MARKER", marker)
    if special is _LFM_IMAGES:
        fast.image_token = special[0]
    return fast
