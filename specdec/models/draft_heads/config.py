"""Reads what the configurations of published draft heads have in common.

A draft head is a small network that reads the target's hidden states. Its
configuration comes in several spellings: of the library that trained it, and
speculators' for all kinds. The file of a kind reads what only that kind has, and
:mod:`.kinds` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedModelError
from ...utils.data_files import DataError
from ...utils.printable import quoted
from ...utils.validation import Int, Number, check, table

# Keys about the layers. Speculators' format has them in a part of its own.
_SIZES = table(
    {
        "hidden_size": Int,
        "intermediate_size": Int,
        "num_hidden_layers": Int,
        "num_attention_heads": Int,
    },
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
         "sliding_window"), Int | None,
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict | None),
    rms_norm_eps=Number,
    rope_theta=Number | None,
    hidden_act=str | None,
    layer_types=list[str] | None,
)  # fmt: skip
# Keys about the head. SafeAILab's and z-lab's formats may have them in a part of
# their own.
_HEAD = table(
    {},
    **dict.fromkeys(("transformer_layer_config", "speculators_config"), dict | None),
    **dict.fromkeys(
        ("draft_vocab_size", "target_hidden_size", "num_target_layers", "block_size",
         "mask_token_id", "pard_token", "ptd_token_id", "swa_window_size",
         "markov_rank", "conv_kernel_size", "conv_group_size", "selector_rank",
         "selector_top_k", "num_centroids", "centroid_intermediate_top_k"), Int | None,
    ),
    **dict.fromkeys(
        ("target_layer_ids", "aux_hidden_state_layer_ids",
         "eagle_aux_hidden_state_layer_ids"), list[Int] | None,
    ),
    **dict.fromkeys(
        ("sample_from_anchor", "query_zero_predicts_next", "sliding_window_non_causal",
         "is_causal", "causal", "dflash_query_causal", "use_swa", "rope_is_neox_style",
         "is_neox_style", "log_snr_conditioning", "norm_before_residual",
         "norm_before_fc", "fc_norm", "norm_output"), bool | None,
    ),
    **dict.fromkeys(
        ("final_logit_softcapping", "output_multiplier", "input_embedding_scale"),
        Number | None,
    ),
    **dict.fromkeys(("markov_head_type", "projector_type"), str | None),
)  # fmt: skip
_PARTS = ("dflash_config", "eagle_config")

# Numbers under these keys must be 1 or more.
_POSITIVE = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "sliding_window", "draft_vocab_size", "target_hidden_size", "num_target_layers",
    "swa_window_size", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a head's layers, which are built like those of Llama or Qwen3.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim,
            rms_norm_eps: as in a model's configuration.
        rope_theta, rope_scaling: of the rotary embedding.
        rope_dims: numbers of a head that it rotates; ``None``: all.
        rope_traditional: whether it rotates neighbours, not halves; ``None``: as the
            target does.
        max_positions: positions that the layers were made for; ``None``: not known.
        qk_norm: whether queries and keys have a norm for each head.
        bias, output_bias: whether the query, key and value projections, and the output
            projection, have a bias.
        gated: whether a sigmoid of the layer's input multiplies what attention finds.
        sinks: whether each head's softmax has one more term, learned and without a
            value.
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
    rope_dims: int | None = None
    rope_traditional: bool | None = False
    max_positions: int | None = None
    qk_norm: bool = True
    bias: bool = False
    output_bias: bool = False
    gated: bool = False
    sinks: bool = False


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
        vocab_size: vocabulary size of the target that it was made for; 0: not known.
        draft_vocab_size: number of tokens that it can propose.
        mask_token: stands for each token that is to be proposed; ``None``: no token
            does.
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
    mask_token: int | None = None
    owns_embedding: bool = False
    owns_head: bool = False

    @property
    def lent_width(self) -> int:
        """Width of what it takes from the target."""
        owns_both = self.owns_embedding and self.owns_head
        return self.target_size if owns_both else self.sizes.hidden_size

    def completed(self, num_layers: int) -> HeadConfig:
        """It, with what the number of the target's layers decides."""
        return self


@dataclass(frozen=True)
class Published:
    """A head as it is published.

    Args:
        config: as in ``config.json``.
        names: the arrays stored with it, or their names, as
            :func:`.loading.canonical` returns them.
        source: for messages.
    """

    config: Mapping[str, Any]
    names: Collection[str]
    source: str

    def __post_init__(self) -> None:
        check(_HEAD, self.config)
        for name in _PARTS:
            check(_HEAD, self.config.get(name) or {}, name)

    @property
    def speculators(self) -> bool:
        """Whether it is in speculators' format."""
        return self.config.get("speculators_model_type") is not None

    @property
    def architecture(self) -> str:
        """The first of its ``architectures``, or an empty string."""
        listed = self.config.get("architectures")
        return str(listed[0]) if isinstance(listed, list) and listed else ""

    @property
    def layers(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the layers."""
        layers = self.config
        if self.speculators:
            key = "transformer_layer_config"
            layers = check(table({key: dict}), self.config, self.source)[key]
        check(_SIZES, layers)
        for name, value in (*layers.items(), *self.config.items()):
            if name in _POSITIVE and isinstance(value, int) and value < 1:
                raise DataError(f"{name} is {value}: it must be 1 or more")
        return layers

    def value(self, *names: str) -> Any:
        """The first value under these names, in a part of the configuration or above.

        ``None`` if there is none.
        """
        parts = [self.config.get(part) or {} for part in _PARTS]
        for name in names:
            for part in (*parts, self.config):
                if part.get(name) is not None:
                    return part[name]
        return None

    def required(self, *names: str) -> Any:
        """The first value under these names.

        Raises:
            DataError: there is none.
        """
        value = self.value(*names)
        if value is None or value == []:
            raise DataError(f"{names[0]} is missing")
        return value

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Tokens of each layer's sliding window; ``None``: it sees everything.

        Raises:
            DataError: the kinds of layers are not as many as layers, or sliding ones
                have no window.
        """
        layers = self.layers
        types = layers.get("layer_types") or ["full_attention"] * num_layers
        if len(types) != num_layers:
            raise DataError(f"layer_types has {len(types)} values, not {num_layers}")
        sliding = [kind == "sliding_attention" for kind in types]
        if self.value("use_swa") and not any(sliding):
            sliding = [True] * num_layers
        window = self.value("swa_window_size") or layers.get("sliding_window")
        if any(sliding) and not window:
            raise DataError("sliding_window is missing")
        return tuple(window if slides else None for slides in sliding)

    def sizes(self, activation: str = "silu") -> LayerSizes:
        """Sizes of the layers.

        Raises:
            UnsupportedModelError: they have another activation.
        """
        layers = self.layers
        named = layers.get("hidden_act") or layers.get("hidden_activation")
        if (named or activation) != activation:
            raise UnsupportedModelError(
                f"{self.source} has the activation {quoted(named)}: only "
                f"{activation} is supported"
            )
        heads = layers["num_attention_heads"]
        kv_heads = layers.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise DataError(
                f"num_key_value_heads is {kv_heads}, which does not divide "
                f"{heads} heads"
            )
        rope = layers.get("rope_parameters") or {}
        theta = layers.get("rope_theta") or rope.get("rope_theta") or 10000.0
        neox = self.config.get("rope_is_neox_style")
        if neox is None:
            neox = self.config.get("is_neox_style")
        scaling: dict[str, Any] = layers.get("rope_scaling") or rope
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind == "yarn" and layers.get("max_position_embeddings"):
            # The default of the library that heads were trained with; mlx-lm's is 4096.
            key = "original_max_position_embeddings"
            scaling = {key: layers["max_position_embeddings"]} | scaling
        first = "layers.0.self_attn"
        return LayerSizes(
            hidden_size=layers["hidden_size"],
            intermediate_size=layers["intermediate_size"],
            num_layers=layers["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=layers.get("head_dim") or layers["hidden_size"] // heads,
            rms_norm_eps=float(layers.get("rms_norm_eps", 1e-6)),
            rope_theta=float(check(Number, theta, "rope_theta")),
            rope_scaling=scaling or None,
            rope_traditional=None if neox is None else not neox,
            max_positions=layers.get("max_position_embeddings"),
            qk_norm=f"{first}.q_norm.weight" in self.names,
            bias=f"{first}.q_proj.bias" in self.names,
            output_bias=f"{first}.o_proj.bias" in self.names,
            sinks=f"{first}.attention_sink_bias" in self.names,
        )

    def common(self, sizes: LayerSizes) -> dict[str, Any]:
        """The arguments of :class:`HeadConfig` that are read in the same way."""
        vocab_size = self.layers.get("vocab_size") or 0
        return {
            "sizes": sizes,
            "num_target_layers": self.value("num_target_layers"),
            "target_size": self.config.get("target_hidden_size") or sizes.hidden_size,
            "vocab_size": vocab_size,
            "draft_vocab_size": self.config.get("draft_vocab_size") or vocab_size,
            "owns_embedding": "embed_tokens.weight" in self.names,
            "owns_head": "lm_head.weight" in self.names,
        }


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Layers of a target that a DFlash head reads if its configuration names none.

    ``count`` layers, from the second one to the third from the end.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))
