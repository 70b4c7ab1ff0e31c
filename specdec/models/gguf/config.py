"""Converts GGUF metadata to the configuration that mlx-lm's model classes take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import shorten
from ..folder import check_sizes
from .architectures import Architecture, architecture, architecture_of
from .header import GGUFFile
from .tensors import read_float_rows

# llama.cpp has these in its code, not in the file.
_GEMMA3_SLIDING_PATTERN = 6
_GEMMA3_LOCAL_ROPE_BASE = 10_000.0
# Number of layers of the models that do not scale queries by their head width.
_27B_BLOCKS = {"gemma2": 46, "gemma3": 62}
# The scaling that Llama 3.1 and later were trained with; files hold only its result.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Bytes of two tensors that are compared at a time.
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True)
class _Metadata:
    """Metadata of one architecture, by the key after its prefix."""

    file: GGUFFile
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"{self.file.path} lacks the metadata {self.architecture}.{key}: "
                "convert it again with a current llama.cpp"
            )
        return value


def stored_dtype(file: GGUFFile) -> mx.Dtype:
    """The float type that loses least of what the file stores.

    float32 for a file of float32 matrices, else :func:`half_dtype`.
    """
    return mx.float32 if _matrix_types(file) == {"F32"} else half_dtype(file)


def half_dtype(file: GGUFFile) -> mx.Dtype:
    """The 16-bit float type that loses least of what the file stores.

    This is bfloat16: the models were trained in it, and their activations may need its
    range. Packed scales, which are float16 in the file, lose up to 0.4%. It is float16
    for llama files that store no wider type, because their activations fit.

    The CPU computes in float32, but packed scales pass through this type there too. So
    a file has the same weights on every backend and in the folder that it converts to.
    """
    wide = _matrix_types(file) & {"F32", "BF16"}
    llama = architecture_of(file) == "llama"
    return mx.float16 if llama and not wide else mx.bfloat16


def _matrix_types(file: GGUFFile) -> set[str]:
    return {info.type_name for info in file.tensors.values() if len(info.shape) >= 2}


def build_config(file: GGUFFile) -> dict[str, Any]:
    """The configuration of the file's model, for mlx-lm's ``ModelArgs``.

    Raises:
        UnsupportedModelError: the architecture, or a feature of it, is not
            supported.
        ModelError: metadata is missing.
    """
    name = architecture_of(file)
    kind = architecture(file)
    meta = _Metadata(file, name)
    heads = int(_uniform(meta, "attention.head_count"))
    hidden = int(meta.need("embedding_length"))
    head_dim = int(meta.get("attention.key_length", hidden // heads))
    _refuse_unsupported(meta, kind, hidden, heads, head_dim)
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "intermediate_size": int(_uniform(meta, "feed_forward_length")),
        "num_hidden_layers": int(meta.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_uniform(meta, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": _tidy(meta.need("attention.layer_norm_rms_epsilon")),
        "vocab_size": _tensor_rows(file, "token_embd.weight"),
        "max_position_embeddings": int(meta.need("context_length")),
        "rope_theta": _tidy(meta.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": is_tied(file),
    }
    for key, ours in kind.keys.items():
        value = _uniform(meta, key)
        config[ours] = int(value) if isinstance(value, int) else _tidy(value)
    config.update(kind.fixed)
    check_sizes(config, file.path)
    _check_tensors(meta, config)
    scaling = _rope_scaling(meta, head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if kind.interleaved and kind.traditional:
        config["rope_traditional"] = True
    if name in _27B_BLOCKS:
        config["query_pre_attn_scalar"] = _query_scalar(meta, config)
    if name == "gemma3":
        config.update(_gemma3(meta))
    if name == "phi3":
        config.update(_phi3(meta, head_dim))
    for key in ("bos", "eos", "padding"):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{'pad' if key == 'padding' else key}_token_id"] = int(token)
    return config


def _check_tensors(meta: _Metadata, config: dict[str, Any]) -> None:
    """Refuse sizes that the tensors do not have, before layers are built from them."""
    file, heads = meta.file, config["head_dim"]
    found_blocks = (re.match(r"blk\.(\d+)\.", name) for name in file.tensors)
    blocks = {block[1] for block in found_blocks if block}
    sizes = [("block_count", config["num_hidden_layers"], len(blocks))]
    for key, size, name, axis in (
        ("embedding_length", config["hidden_size"], "token_embd", 1),
        ("feed_forward_length", config["intermediate_size"], "blk.0.ffn_down", 1),
        (
            "attention.head_count",
            config["num_attention_heads"] * heads,
            "blk.0.attn_q",
            0,
        ),
        (
            "attention.head_count_kv",
            config["num_key_value_heads"] * heads,
            "blk.0.attn_k",
            0,
        ),
    ):
        info = file.tensors.get(f"{name}.weight")
        if info is not None:  # else loading reports it
            sizes.append((key, size, info.shape[axis]))
    for key, size, there in sizes:
        if size != there:
            raise ModelError(
                f"{file.path} says {meta.architecture}.{key} for {shorten(size)}, and "
                f"its tensors are for {there}: download it again"
            )


def _tidy(value: float) -> float:
    """A float32 as the shortest decimal that means it: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


def _uniform(meta: _Metadata, key: str, default: Any = None) -> Any:
    """A value that some files give per layer; it must be the same for all layers."""
    value = meta.need(key) if default is None else meta.get(key, default)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(
            f"{meta.file.path}: {key} differs from layer to layer, which is not "
            "supported: use another model"
        )
    return value[0]


def _tensor_rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {name}: download it again")
    return file.tensors[name].shape[0]


def _refuse_unsupported(
    meta: _Metadata, kind: Architecture, hidden: int, heads: int, head_dim: int
) -> None:
    reason = None
    caps = ("final_logit_softcapping", "attn_logit_softcapping")
    partial = meta.get("rope.dimension_count", head_dim) != head_dim
    if meta.get("expert_count", 0) and "expert_count" not in kind.keys:
        reason = "mixture of experts"
    elif partial and meta.architecture != "phi3":
        reason = "RoPE over a part of the head"
    elif meta.get("attention.value_length", head_dim) != head_dim:
        reason = "values of another width than keys"
    elif any(meta.get(cap) and cap not in kind.keys for cap in caps):
        reason = "soft-capped logits"
    elif not kind.head_dim and head_dim * heads != hidden:
        reason = "a head width of its own"
    if reason is not None:
        raise UnsupportedModelError(
            f"{meta.file.path} uses {reason}, which is not supported for "
            f"{meta.architecture} GGUF files: use an MLX folder"
        )


def _query_scalar(meta: _Metadata, config: dict[str, Any]) -> int:
    """The number by whose square root Gemma divides queries."""
    if config["num_hidden_layers"] == _27B_BLOCKS[meta.architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(meta: _Metadata, head_dim: int) -> dict[str, Any]:
    """Configuration for RoPE over a part of the head, and factors for long contexts."""
    turned = int(meta.get("rope.dimension_count", head_dim))
    original = meta.get("rope.scaling.original_context_length")
    settings: dict[str, Any] = {"partial_rotary_factor": turned / head_dim}
    factors = {}
    for length in ("long", "short"):
        info = meta.file.tensors.get(f"rope_factors_{length}.weight")
        if info is not None:
            rows = read_float_rows(meta.file, info, 0, info.rows).reshape(-1)
            factors[f"{length}_factor"] = [_tidy(factor) for factor in rows]
    if len(factors) == 2 and original is not None:
        settings["rope_scaling"] = {"type": "longrope", **factors}
        settings["original_max_position_embeddings"] = int(original)
    return settings


def _gemma3(meta: _Metadata) -> dict[str, Any]:
    pattern = meta.get("attention.sliding_window_pattern", _GEMMA3_SLIDING_PATTERN)
    if isinstance(pattern, list):  # one flag per layer, true for a sliding one
        period = pattern.index(False) + 1 if False in pattern else len(pattern) + 1
        expected = [(i + 1) % period != 0 for i in range(len(pattern))]
        if [bool(flag) for flag in pattern] != expected:
            raise UnsupportedModelError(
                f"{meta.file.path} has sliding-window layers without a fixed "
                "period, which is not supported: use an MLX folder"
            )
        pattern = period
    return {
        "sliding_window": int(meta.need("attention.sliding_window")),
        "sliding_window_pattern": int(pattern),
        "rope_local_base_freq": _tidy(
            meta.get("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_BASE)
        ),
    }


def _rope_scaling(
    meta: _Metadata, head_dim: int, theta: float
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in meta.file.tensors:
        return _llama3_scaling(meta, head_dim, theta)
    if meta.architecture == "phi3":
        return None  # _phi3 sets its own
    kind = meta.get("rope.scaling.type")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    if kind == "none" or factor in (None, 0, 1):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": _tidy(factor)}
    if kind == "yarn":
        original = meta.get("rope.scaling.original_context_length")
        scaling = {
            "rope_type": "yarn",
            "factor": _tidy(factor),
            "original_max_position_embeddings": int(
                meta.need("context_length") if original is None else original
            ),
        }
        for key in ("beta_fast", "beta_slow"):
            value = meta.get(f"rope.scaling.yarn_{key}")
            if value is not None:
                scaling[key] = _tidy(value)
        return scaling
    raise UnsupportedModelError(
        f"{meta.file.path} uses the RoPE scaling {kind!r:.60}, which is not supported: "
        "use a file with none, linear or yarn"
    )


def _llama3_scaling(meta: _Metadata, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, from the frequency factors that the file stores instead."""
    info = meta.file.tensors["rope_freqs.weight"]
    factors = read_float_rows(meta.file, info, 0, 1).reshape(-1)
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT / wavelengths
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(turns < _LLAMA3_LOW, factor, expected)
    expected = np.where(turns > _LLAMA3_HIGH, 1.0, expected)
    if factors.shape != expected.shape or not np.allclose(factors, expected, 1e-3):
        raise UnsupportedModelError(
            f"{meta.file.path} stores RoPE factors other than Llama 3's, which is "
            "not supported: use an MLX folder"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def is_tied(file: GGUFFile) -> bool:
    """Whether the output projection is the token embedding.

    It is if there is no ``output.weight``, or if that equals the embedding byte for
    byte. Any other ``output.weight`` is used as it is. The small Qwen files hold one
    matrix quantized twice, but a head that was trained a little further looks the same.
    """
    if "output.weight" not in file.tensors:
        return True
    head, embedding = file.tensors["output.weight"], file.tensors["token_embd.weight"]
    if (head.shape, head.type_id) != (embedding.shape, embedding.type_id):
        return False
    step = max(1, _COMPARED_BYTES // head.row_bytes)
    return all(
        np.array_equal(
            file.raw_rows(head, start, min(start + step, head.rows)),
            file.raw_rows(embedding, start, min(start + step, head.rows)),
        )
        for start in range(0, head.rows, step)
    )
