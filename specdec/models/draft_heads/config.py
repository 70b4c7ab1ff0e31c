"""Reads the configurations of published draft heads into one form.

A draft head is a small network that reads the target's hidden states. Its
configuration comes in several spellings: z-lab's (DFlash), DeepSeek's (DSpark),
SafeAILab's (EAGLE-3), and speculators' for all three.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ModelError, UnsupportedModelError
from ...utils.data_files import DataError, check_shape
from ...utils.printable import quoted

_NUMBER = (float, int)
# Keys about the layers. Speculators' format has them in a part of its own.
_SIZES: dict[str, Any] = {
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads?": (int, None),
    "head_dim?": (int, None),
    "rms_norm_eps?": _NUMBER,
    "vocab_size": int,
    "max_position_embeddings?": (int, None),
    "hidden_act?": str,
    "rope_theta?": (*_NUMBER, None),
    "rope_scaling?": (dict, None),
    "rope_parameters?": (dict, None),
    "layer_types?": ([str], None),
    "sliding_window?": (int, None),
}
_OWN: dict[str, Any] = {
    "draft_vocab_size?": (int, None),
    "target_hidden_size?": (int, None),
    "num_target_layers?": (int, None),
    "block_size?": (int, None),
    "mask_token_id?": (int, None),
    "target_layer_ids?": ([int], None),
    "aux_hidden_state_layer_ids?": ([int], None),
    "eagle_aux_hidden_state_layer_ids?": ([int], None),
    "sample_from_anchor?": (bool, None),
    "query_zero_predicts_next?": (bool, None),
    "sliding_window_non_causal?": (bool, None),
    "is_causal?": (bool, None),
    "rope_is_neox_style?": (bool, None),
    "is_neox_style?": (bool, None),
    "markov_rank?": (int, None),
    "markov_head_type?": (str, None),
    "norm_before_residual?": (bool, None),
    "norm_before_fc?": (bool, None),
    "fc_norm?": (bool, None),
    "norm_output?": (bool, None),
    "final_logit_softcapping?": (*_NUMBER, None),
}
_DFLASH: dict[str, Any] = {
    "target_layer_ids?": ([int], None),
    "mask_token_id?": (int, None),
    "block_size?": (int, None),
    "causal?": (bool, None),
    "sample_from_anchor?": (bool, None),
    "query_zero_predicts_next?": (bool, None),
    "use_swa?": (bool, None),
    "swa_window_size?": (int, None),
    "final_logit_softcapping?": (*_NUMBER, None),
    "output_multiplier?": (*_NUMBER, None),
    "input_embedding_scale?": (*_NUMBER, None),
}

# Numbers under these keys must be 1 or more.
_POSITIVE = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "sliding_window", "draft_vocab_size", "target_hidden_size", "num_target_layers",
}  # fmt: skip

# Kinds by the first of a configuration's ``architectures``. Speculators' format names
# the kind itself.
_BLOCK = ("DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
_EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
# Words in the names of known kinds of heads, supported or not.
_OTHERS = ("dflash", "dspark", "eagle", "domino", "medusa", "hydra", "dflare", "mtp")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a head's layers, which are built like those of Llama or Qwen3.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim,
            rms_norm_eps: as in a model's configuration.
        rope_theta, rope_scaling: of the rotary embedding, which rotates whole heads.
        rope_traditional: whether it rotates neighbours, not halves; ``None``: as the
            target does.
        max_positions: positions that the layers were made for; ``None``: not known.
        qk_norm: whether queries and keys have a norm for each head.
        bias: whether the query, key and value projections have a bias.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_traditional: bool | None = False
    max_positions: int | None = None
    qk_norm: bool = True
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The configuration that all draft heads share.

    Args:
        kind: the kind of head, for messages and reports.
        sizes: sizes of its layers.
        target_layers: layers of the target whose outputs it reads, counted from 0.
        num_target_layers: number of layers of the target that it was made for;
            ``None``: not known.
        target_size: width of the target's hidden states.
        vocab_size: vocabulary size of the target that it was made for.
        draft_vocab_size: number of tokens that it can propose.
        owns_embedding, owns_head: whether embedding and output head are stored with
            it; otherwise it uses the target's.
    """

    kind: str
    sizes: LayerSizes
    target_layers: tuple[int, ...]
    num_target_layers: int | None = None
    target_size: int
    vocab_size: int
    draft_vocab_size: int
    owns_embedding: bool = False
    owns_head: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A head that proposes a block of tokens in one forward: DFlash, DSpark.

    Args:
        block_size: tokens of a block, the newest committed one (the anchor) included.
        mask_token: stands for each token of the block that is to be proposed.
        from_anchor: whether each slot, from the anchor's on, predicts the token after
            it; otherwise each slot predicts the token in its own place.
        windows: tokens of each layer's sliding window; ``None``: it sees everything.
        causal: for each layer, whether later slots of the block are hidden from a slot.
        markov_rank: rank of the bias from the previous token; 0: there is no bias.
        owns_mask: whether the embedding of masks is stored with the head; otherwise
            it is the embedding of ``mask_token``.
        embedding_scale, logit_scale: factors of embeddings and of logits.
        logit_cap: cap of logits; 0: there is no cap.
    """

    block_size: int
    mask_token: int
    from_anchor: bool = False
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    markov_rank: int = 0
    owns_mask: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that it can propose in one block."""
        return self.block_size - (not self.from_anchor)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A head that proposes token after token: EAGLE-3 and 3.1.

    Args:
        norm_before_residual: whether the residual is the normed feature.
        norm_before_fc: whether one norm of all features precedes their projection.
        fc_norm: whether a norm of each feature precedes their projection.
        norm_output: whether the output is normed before it is fed back.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a draft head, not a whole model.

    Heads of kinds that are not supported count: :func:`head_config` refuses them.
    """
    kind = config.get("speculators_model_type") or _architecture(config)
    return any(name in str(kind).lower() for name in _OTHERS)


def head_config(
    config: Mapping[str, Any], names: Collection[str], source: str
) -> HeadConfig:
    """Parse a draft head's configuration.

    Args:
        config: as in ``config.json``.
        names: names of the arrays stored with it, as :func:`.loading.canonical` returns
            them.
        source: for messages.

    Raises:
        UnsupportedModelError: the head is of a kind that is not supported.
        ModelError: a value is missing or invalid.
    """
    try:
        return _parsed(config, names, source)
    except DataError as error:
        raise ModelError(
            f"{source}: its configuration cannot be read ({error}): download it again"
        ) from error


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else ""


def _parsed(
    config: Mapping[str, Any], names: Collection[str], source: str
) -> HeadConfig:
    kind = config.get("speculators_model_type")
    architecture = _architecture(config)
    check_shape(config, _OWN)
    if kind is None:
        layers, block = config, architecture in _BLOCK
        known = block or architecture in _EAGLE
    else:
        layers = check_shape(config, {"transformer_layer_config": dict}, source)[
            "transformer_layer_config"
        ]
        block = kind in ("dflash", "dspark")
        known = block or kind == "eagle3"
    if not known:
        raise UnsupportedModelError(
            f"{source} is a draft head of kind {quoted(kind or architecture)}, which "
            "is not supported (DFlash, DSpark and EAGLE-3 are)"
        )
    check_shape(layers, _SIZES)
    if layers.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{source} has the activation {quoted(layers['hidden_act'])}: only silu "
            "is supported"
        )
    for name, value in (*layers.items(), *config.items()):
        if name in _POSITIVE and isinstance(value, int) and value < 1:
            raise DataError(f"{name} is {value}: it must be 1 or more")
    common = _common(config, layers, names)
    sizes: LayerSizes = common["sizes"]
    if sizes.num_heads % sizes.num_kv_heads:
        raise DataError(
            f"num_key_value_heads is {sizes.num_kv_heads}, which does not divide "
            f"{sizes.num_heads} heads"
        )
    if block:
        return _block(config, layers, names, common, source)
    return _eagle(config, common)


def _sizes(
    config: Mapping[str, Any], layers: Mapping[str, Any], names: Collection[str]
) -> LayerSizes:
    heads = layers["num_attention_heads"]
    rope = layers.get("rope_parameters") or {}
    scaling = layers.get("rope_scaling") or rope or None
    theta = layers.get("rope_theta") or rope.get("rope_theta") or 10000.0
    neox = config.get("rope_is_neox_style")
    if neox is None:
        neox = config.get("is_neox_style")
    first = "layers.0.self_attn"
    return LayerSizes(
        hidden_size=layers["hidden_size"],
        intermediate_size=layers["intermediate_size"],
        num_layers=layers["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=layers.get("num_key_value_heads") or heads,
        head_dim=layers.get("head_dim") or layers["hidden_size"] // heads,
        rms_norm_eps=float(layers.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=scaling,
        rope_traditional=None if neox is None else not neox,
        max_positions=layers.get("max_position_embeddings"),
        qk_norm=f"{first}.q_norm.weight" in names,
        bias=f"{first}.q_proj.bias" in names,
    )


def _common(
    config: Mapping[str, Any], layers: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    sizes = _sizes(config, layers, names)
    return {
        "sizes": sizes,
        "num_target_layers": config.get("num_target_layers"),
        "target_size": config.get("target_hidden_size") or sizes.hidden_size,
        "vocab_size": layers["vocab_size"],
        "draft_vocab_size": config.get("draft_vocab_size") or layers["vocab_size"],
        "owns_embedding": "embed_tokens.weight" in names,
        "owns_head": "lm_head.weight" in names,
    }


def _block(
    config: Mapping[str, Any],
    layers: Mapping[str, Any],
    names: Collection[str],
    common: dict[str, Any],
    source: str,
) -> BlockConfig:
    more = check_shape(config.get("dflash_config") or {}, _DFLASH, "dflash_config")
    ours = config.get("speculators_model_type") is None

    def value(name: str) -> Any:
        found = more.get(name)
        return config.get(name) if found is None else found

    sizes: LayerSizes = common["sizes"]
    ids = value("target_layer_ids")
    if not ours and config.get("aux_hidden_state_layer_ids") is not None:
        # These numbers count the inputs of layers, not their outputs.
        ids = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    if ids is None and config.get("num_target_layers"):
        ids = spread_layers(config["num_target_layers"], sizes.num_layers)
    for name, found in (
        ("target_layer_ids", ids),
        ("mask_token_id", value("mask_token_id")),
        ("block_size", value("block_size")),
    ):
        if found is None or found == []:
            raise DataError(f"{name} is missing")
    if value("block_size") < 2:
        raise DataError(f"block_size is {value('block_size')}: it must be 2 or more")
    anchor = value("sample_from_anchor")
    if anchor is None:
        anchor = value("query_zero_predicts_next")
    if anchor is None:
        # All of DSpark's own checkpoints do this, but do not say so.
        anchor = ours and "DSpark" in _architecture(config)
    rank = _markov_rank(config, names, source)
    windows = _windows(layers, more, sizes.num_layers)
    return BlockConfig(
        kind="DSpark" if rank else "DFlash",
        target_layers=tuple(ids),
        block_size=value("block_size"),
        mask_token=value("mask_token_id"),
        from_anchor=bool(anchor),
        windows=windows,
        causal=_causal(config, more, windows, ours=ours),
        markov_rank=rank,
        owns_mask="mask_embedding" in names,
        embedding_scale=float(more.get("input_embedding_scale") or 1.0),
        logit_scale=float(more.get("output_multiplier") or 1.0),
        logit_cap=float(value("final_logit_softcapping") or 0.0),
        **common,
    )


def _markov_rank(config: Mapping[str, Any], names: Collection[str], source: str) -> int:
    if "markov_head.markov_w1.weight" not in names:
        return 0
    kind = config.get("markov_head_type") or "vanilla"
    if kind != "vanilla":
        raise UnsupportedModelError(
            f"{source} has a Markov head of kind {quoted(kind)}: only vanilla is "
            "supported"
        )
    rank = config.get("markov_rank")
    if not rank:
        raise DataError("markov_rank is missing")
    return int(rank)


def _windows(
    layers: Mapping[str, Any], more: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    types = layers.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers:
        raise DataError(f"layer_types has {len(types)} values, not {num_layers}")
    sliding = [kind == "sliding_attention" for kind in types]
    if more.get("use_swa") and not any(sliding):
        sliding = [True] * num_layers
    window = more.get("swa_window_size") or layers.get("sliding_window")
    if any(sliding) and not window:
        raise DataError("sliding_window is missing")
    return tuple(window if slides else None for slides in sliding)


def _causal(
    config: Mapping[str, Any],
    more: Mapping[str, Any],
    windows: tuple[int | None, ...],
    *,
    ours: bool,
) -> tuple[bool, ...]:
    said = config.get("is_causal")
    if said is None:
        said = more.get("causal")
    if not ours and said is None:
        said = not config.get("sliding_window_non_causal", True)
        # Layers without a window are never causal.
        return tuple(said and window is not None for window in windows)
    if said is None:
        return tuple(window is not None for window in windows)
    return (bool(said),) * len(windows)


def _eagle(config: Mapping[str, Any], common: dict[str, Any]) -> EagleConfig:
    more = check_shape(
        config.get("eagle_config") or {},
        {key: _OWN[key] for key in ("eagle_aux_hidden_state_layer_ids?",)},
        "eagle_config",
    )
    # SpecForge counts the outputs of layers, vLLM their inputs. Both use the same
    # fields, and conversions keep the numbers. Heads read the output of layer 1 first,
    # so a list that begins with 1 counts outputs; SGLang uses the same test. Without a
    # list, the target's depth decides.
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or more.get(key) or ()
    return EagleConfig(
        kind="EAGLE-3",
        target_layers=tuple(ids if ids[:1] == [1] else (i - 1 for i in ids)),
        norm_before_residual=bool(
            config.get("norm_before_residual") or more.get("norm_before_residual")
        ),
        norm_before_fc=bool(config.get("norm_before_fc") or more.get("norm_before_fc")),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
        **common,
    )


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Layers of a target that a DFlash head reads if its configuration names none.

    ``count`` layers, from the second one to the third from the end.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def default_eagle_layers(num_target_layers: int) -> tuple[int, ...]:
    """Layers of a target that an EAGLE-3 head reads if its configuration names none."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4
