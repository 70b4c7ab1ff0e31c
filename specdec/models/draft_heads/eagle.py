"""EAGLE-3: token after token, from the target's features and the token after each.

The pair of a feature at position t and the token at t + 1 predicts the token at t + 2.
The layers' output is the feature of the next pair until the target's is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .config import HeadConfig, Published
from .head import DraftHead
from .layers import HeadLayer


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A head that proposes token after token: EAGLE-3 and 3.1.

    Args:
        norm_before_residual: whether the residual is the normed feature.
        norm_before_fc: whether one norm of all features precedes their projection.
        fc_norm: whether a norm of each feature precedes their projection.
        norm_output: whether the output is normed before it is fed back.
        windows: tokens of each layer's sliding window; ``None``: it sees everything.
            Empty: no layer has one.
    """

    windows: tuple[int | None, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def completed(self, num_layers: int) -> HeadConfig:
        """Without a list, it reads three layers spread over the target."""
        if self.target_layers:
            return self
        return replace(self, target_layers=default_eagle_layers(num_layers))


class EagleHead(DraftHead):
    """An EAGLE-3 or 3.1 head."""

    args: EagleConfig
    reads_following = True

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        sizes = config.sizes
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        count = len(config.target_layers)
        self.fc = nn.Linear(config.target_size * count, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.target_size * count, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(config.target_size, eps) for _ in range(count)]
        self.layers = [HeadLayer(sizes, pair=i == 0) for i in range(sizes.num_layers)]
        self.norm = nn.RMSNorm(size, eps=eps)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each layer's sliding window; ``None``: it sees everything."""
        return self.args.windows or super().windows

    def feature(self, hidden: mx.array) -> mx.array:
        """The target's hidden states (B, S, F), projected to (B, S, D)."""
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts: Any = mx.split(hidden, len(self.fc_norm), axis=-1)
            each = zip(self.fc_norm, parts, strict=True)
            hidden = mx.concatenate([norm(part) for norm, part in each], axis=-1)
        feature: mx.array = self.fc(hidden)
        return feature

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write pairs of the target's features and the tokens after them."""
        return self.step(following, self.feature(hidden), caches)

    def step(self, tokens: mx.array, feature: mx.array, caches: list[Any]) -> mx.array:
        """Write pairs and return the features of the next pairs, (B, S, D).

        Args:
            tokens: shape (B, S).
            feature: features of the positions before the tokens, shape (B, S, D).
        """
        config, first = self.args, self.layers[0]
        normed = first.hidden_norm(feature)
        residual = normed if config.norm_before_residual else feature
        pair = mx.concatenate(
            [first.input_layernorm(self.embed(tokens)), normed], axis=-1
        )
        width = tokens.shape[1]
        mask = caches[0].make_mask(width)
        h = first.after_attention(residual, first.self_attn(pair, mask, caches[0]))
        for layer, cache in zip(self.layers[1:], caches[1:], strict=True):
            h = layer(h, cache.make_mask(width), cache)
        if config.norm_output:
            h = self.norm(h)
        return h

    def predict(self, h: mx.array) -> mx.array:
        """Logits of the head's own tokens from the output of :meth:`step`."""
        if not self.args.norm_output:
            h = self.norm(h)
        return self.logits(h)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) with zero features, to plan and check it like a model."""
        size = self.args.sizes.hidden_size
        feature = mx.zeros((*inputs.shape, size), self.norm.weight.dtype)
        return self.as_target(self.predict(self.step(inputs, feature, cache)))


def eagle_config(published: Published) -> EagleConfig:
    """The configuration of an EAGLE-3 head."""
    return EagleConfig(**eagle_values(published))


def eagle_values(published: Published) -> dict[str, Any]:
    """The arguments of :class:`EagleConfig`."""
    value = published.value
    # SpecForge counts the outputs of layers, vLLM their inputs. Both use the same
    # fields, and conversions keep the numbers. Heads read the output of layer 1 first,
    # so a list that begins with 1 counts outputs; SGLang uses the same test. Without a
    # list, the target's depth decides.
    ids: Any = value("eagle_aux_hidden_state_layer_ids") or ()
    options = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    layers = tuple(i - (ids[0] != 1) for i in ids)
    if not layers:  # DeepSeek's count outputs
        layers = tuple(value("target_layer_ids") or ())
    sizes = published.sizes()
    # Only speculators' training honours kinds of layers.
    windows = published.windows(sizes.num_layers) if published.speculators else ()
    return {
        **published.common(sizes),
        "kind": "EAGLE-3",
        "windows": windows,
        "target_layers": layers,
        **{name: bool(value(name)) for name in options},
    }


def default_eagle_layers(num_target_layers: int) -> tuple[int, ...]:
    """Layers of a target that an EAGLE-3 head reads if its configuration names none."""
    return 1, num_target_layers // 2 - 1, num_target_layers - 4
