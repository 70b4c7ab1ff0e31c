"""Assistants of Gemma 4: heads that attend to the target's own keys and values.

An assistant keeps none. A step reads the newest token and a state, at the position of
the last token that the target's caches hold:

    z = pre_projection [E(token); state]      E: the target's embedding
    o = norm(layers(z))                       queries alone; keys and values are those
                                              of the target's last layer of the kind
    logits = embed_tokens(o)                  state of the next step: post_projection(o)

The first state is the target's own, after its last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...utils.data_files import DataError
from ...utils.validation import Int, check, table
from ..layers import TargetEnds
from .config import HeadConfig, LayerSizes, Published
from .gemma import GemmaLayer, gemma_sizes
from .head import DraftHead
from .layers import HeadAttention

# How far below the others the logit of a token is that no chosen centroid stands for.
_BELOW = 1e4

#: Attends for queries (B, H, 1, d), with the layer's attention and its input.
Attend = Callable[[HeadAttention, mx.array, mx.array], mx.array]


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """An assistant of Gemma 4.

    Args:
        layers: kind and sizes of each layer.
        centroids: number of groups of tokens; 0: logits of all tokens are computed.
        chosen: groups whose tokens get logits.
    """

    layers: tuple[tuple[str, LayerSizes], ...]
    centroids: int = 0
    chosen: int = 0

    @property
    def lent_width(self) -> int:
        """Width of what it takes from the target."""
        return self.target_size

    def completed(self, num_layers: int) -> HeadConfig:
        """It reads the target's last layer."""
        return replace(self, target_layers=(num_layers - 1,))


class QueryAttention(HeadAttention):
    """Attention that makes only queries."""

    def __init__(self, sizes: LayerSizes):
        super().__init__(sizes, sizes.hidden_size)
        self.scale = 1.0
        for name in ("k_proj", "v_proj", "k_norm"):
            del self[name]


class CentroidHead(nn.Module):
    """Groups of tokens, of which only the likeliest get logits.

    Args:
        config: the assistant's configuration.
    """

    def __init__(self, config: AssistantConfig):
        super().__init__()  # type: ignore[no-untyped-call]
        self._chosen = config.chosen
        self.centroids = nn.Linear(
            config.sizes.hidden_size, config.centroids, bias=False
        )
        self.token_ordering = mx.zeros((config.vocab_size,), mx.int32)

    def logits(self, o: mx.array, embedding: nn.Module) -> mx.array:
        """Logits (B, S, V) of states (B, S, D)."""
        count, groups = self._chosen, self.centroids.weight.shape[0]
        scores = self.centroids(o)
        best = mx.argpartition(-scores, count - 1, axis=-1)[..., :count]
        ids = self.token_ordering.reshape(groups, -1)[best].flatten(-2)
        logits = (embedding(ids) @ o[..., None])[..., 0]
        rest = mx.broadcast_to(
            logits.min(axis=-1, keepdims=True) - _BELOW,
            (*o.shape[:-1], self.token_ordering.size),
        )
        return mx.put_along_axis(rest, ids, logits, axis=-1)


class AssistantHead(DraftHead):
    """An assistant of Gemma 4."""

    args: AssistantConfig
    reads_prompts = False

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        size, eps = config.sizes.hidden_size, config.sizes.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.pre_projection = nn.Linear(2 * config.target_size, size, bias=False)
        self.post_projection = nn.Linear(size, config.target_size, bias=False)
        self.layers = [GemmaLayer(s, QueryAttention(s)) for _, s in config.layers]
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.centroids:
            self.masked_embedding = CentroidHead(config)
        #: For each layer, the place in the target's caches of what it attends to.
        self.places: Sequence[int] = ()

    def bind(self, ends: TargetEnds) -> None:
        """Use the target's embedding, keys and values.

        Raises:
            UnsupportedModelError: the target has no such layers as Gemma 4's.
        """
        super().bind(ends)
        trunk: Any = ends.trunk
        config = getattr(trunk, "config", None)
        if not hasattr(trunk, "previous_kvs") or config is None:
            raise UnsupportedModelError(
                "an assistant of Gemma 4 attends to the target's keys and values: name "
                "the Gemma 4 model that it was made for"
            )
        last = dict[str, int]()
        first_shared = config.num_hidden_layers - config.num_kv_shared_layers
        for place, kind in enumerate(config.layer_types[:first_shared]):
            last[kind] = place
        for kind, sizes in self.args.layers:
            theirs = trunk.layers[last[kind]].self_attn if kind in last else None
            if (
                theirs is None
                or theirs.head_dim != sizes.head_dim
                or sizes.num_heads % theirs.n_kv_heads
            ):
                raise UnsupportedModelError(
                    f"the assistant's {sizes.num_heads} heads of {sizes.head_dim} do "
                    f"not fit the {kind} layers of the target: name the Gemma 4 model "
                    "that it was made for"
                )
        self.places = [last[kind] for kind, _ in self.args.layers]

    def make_cache(self) -> list[Any]:
        """No caches: it keeps nothing."""
        return []

    def embed(self, tokens: mx.array, *, raw: bool = False) -> mx.array:
        """The target's embeddings (B, S, H) of tokens (B, S)."""
        return self.ends.embed(tokens)

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """The states that proposing begins with: the target's, normed."""
        normed: mx.array = self.ends.trunk["norm"](hidden)
        return normed

    def output(
        self,
        tokens: mx.array,
        state: mx.array,
        position: Any,
        attends: Sequence[Attend],
    ) -> mx.array:
        """The normed output (B, 1, D) of a step.

        Args:
            tokens: the newest tokens, shape (B, 1).
            state: shape (B, 1, H).
            position: of the last token in the target's caches, shape (B,).
            attends: attends to the target's keys and values, for each layer.
        """
        x = self.pre_projection(mx.concatenate([self.embed(tokens), state], axis=-1))
        for layer, attend in zip(self.layers, attends, strict=True):

            def attended(
                y: mx.array, layer: Any = layer, attend: Any = attend
            ) -> mx.array:
                attention = layer.self_attn
                out: mx.array = attend(attention, y, attention.queries(y, position))
                return out

            x = layer.around(x, attended)
        normed: mx.array = self.norm(x)
        return normed

    def following_state(self, o: mx.array) -> mx.array:
        """The state of the next step from the output of a step."""
        state: mx.array = self.post_projection(o)
        return state

    def predict(self, o: mx.array) -> mx.array:
        """Logits (B, S, V) from the output of a step."""
        if "masked_embedding" in self:
            return self.masked_embedding.logits(o, self.embed_tokens)
        logits: mx.array = self.embed_tokens.as_linear(o)
        return logits

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) without keys and values, to plan it like a model."""
        state = mx.zeros((*inputs.shape, self.args.target_size), self.norm.weight.dtype)

        def itself(attention: HeadAttention, y: mx.array, q: mx.array) -> mx.array:
            return attention.attend(y, q, q, q, None)

        attends = [itself] * len(self.layers)
        return self.predict(self.output(inputs, state, 0, attends))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Ids of tokens have 64 bits; a tied output head may be stored twice."""
        arrays = {n: a for n, a in weights.items() if n != "lm_head.weight"}
        key = "masked_embedding.token_ordering"
        if key in arrays:
            arrays[key] = arrays[key].astype(mx.int32)
        return arrays


def assistant_config(published: Published) -> AssistantConfig:
    """The configuration of an assistant."""
    top = check(
        table(
            {"text_config": dict, "backbone_hidden_size": Int},
            use_ordered_embeddings=bool | None,
            num_centroids=Int | None,
            centroid_intermediate_top_k=Int | None,
        ),
        published.config,
    )
    inner = replace(published, config=top["text_config"])
    base = inner.layers
    kinds = base.get("layer_types")
    if kinds is None or len(kinds) != base["num_hidden_layers"]:
        raise DataError("layer_types does not name the kind of each layer")
    sizes = {kind: gemma_sizes(inner, kind) for kind in kinds}
    common = inner.common(sizes[kinds[0]])
    groups = chosen = 0
    if top.get("use_ordered_embeddings"):
        groups = published.required("num_centroids")
        chosen = published.required("centroid_intermediate_top_k")
        if not 0 < chosen <= groups or common["vocab_size"] % groups:
            raise DataError(
                f"num_centroids is {groups}, and {chosen} of them are taken"
            )
    return AssistantConfig(
        **common
        | {
            "kind": "Gemma 4 assistant",
            "target_layers": (),
            "target_size": top["backbone_hidden_size"],
            # Its embedding is its output head alone.
            "owns_embedding": False,
            "owns_head": False,
        },
        layers=tuple((kind, sizes[kind]) for kind in kinds),
        centroids=groups,
        chosen=chosen,
    )
