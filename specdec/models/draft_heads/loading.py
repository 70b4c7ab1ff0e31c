"""Loads draft heads from folders, and checks that they fit a target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...cuda.modules import modules_of
from ...errors import ModelError, UnsupportedModelError
from ...utils.data_files import DataError, read_json
from ...utils.printable import shorten
from ..folder import check_files, check_sizes, explained, read_arrays
from ..layers import TargetEnds
from ..loaded import Described, LoadedModel
from ..precision import cast
from .block import BlockConfig
from .config import HeadConfig
from .head import DraftHead
from .kinds import HEADS, head_config, is_head, is_mtp
from .mtp import open_mtp_folder
from .weights import fill, rehearse

# Arrays that only training needs, that can be computed, or that are not used.
_LEFT_OUT = re.compile(
    r"^(t2d|verifier_.*|confidence_head\..*|.*rotary_emb\.inv_freq)$"
)
_RENAMED = (
    (re.compile(r"^(model|logit_head)\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
    (re.compile(r"^(mask_embedding|.*_codebook)\.weight$"), r"\1"),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
)


def read_head_config(folder: Path) -> dict[str, Any] | None:
    """The configuration of a draft head's folder; ``None``: it is not a head's.

    Raises:
        ModelError: the head's weights are in files that are not read.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, DataError):
        return None  # loading it as a model reports what is wrong
    if not isinstance(config, dict) or not is_head(config):
        return None
    check_files(folder)
    check_sizes(config, folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has no .safetensors file, and other weights can hold code: "
            "convert them to safetensors"
        )
    if (folder / "mask_embedding.pt").exists():
        raise ModelError(
            f"{folder} has a mask_embedding.pt, and such files can hold code: convert "
            "it with PyTorch in that folder, and remove it: "
            "from safetensors.torch import save_file; "
            "save_file({'mask_embedding': torch.load('mask_embedding.pt', "
            "weights_only=True)}, 'mask_embedding.safetensors')"
        )
    return config


def canonical(names: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Arrays under the names that the classes of heads use."""
    renamed = {}
    for name, array in names.items():
        for pattern, instead in _RENAMED:
            name = pattern.sub(instead, name)
        if not _LEFT_OUT.match(name):
            renamed[name] = array
    return renamed


def open_head(
    folder: Path, config: Mapping[str, Any], source: str, target: Described
) -> DraftHead:
    """A head bound to its target, with weights that are not computed yet.

    Args:
        folder: the head's folder.
        config: as :func:`read_head_config` returns it.
        source: for messages.
        target: a model, or an outline of one.

    Raises:
        UnsupportedModelError: the head is of a kind that is not supported, or does not
            fit the target.
        ModelError: the head is damaged.
    """
    if is_mtp(config):
        return open_mtp_folder(folder, source, target)
    with explained(source):
        weights = canonical(read_arrays(sorted(folder.glob("*.safetensors")), source))
        ends = TargetEnds(target.model, target.name)
        offsets = weights.pop("d2t", None)
        if (mask := weights.get("mask_embedding")) is not None:
            weights["mask_embedding"] = mask.reshape(-1)
        fitted = _fitted(head_config(config, weights, source), source, target, ends)
        head = make_head(fitted)
        head.bind(ends)
        if fitted.draft_vocab_size < fitted.vocab_size:
            _take_offsets(head, offsets, source)
        fill(head, head.sanitize(weights), source)
        head.eval()
        rehearse(head)
    return head


def make_head(config: HeadConfig) -> DraftHead:
    """A head with random weights, bound to no target.

    Raises:
        UnsupportedModelError: its rotary embedding is of a kind that mlx-lm does not
            have.
    """
    try:
        return HEADS[type(config)](config)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        scaling = config.sizes.rope_scaling
        raise UnsupportedModelError(
            f"a {config.kind} head with the rotary embedding {shorten(scaling)} is not "
            f"supported ({shorten(error)})"
        ) from error


def ready(
    head: DraftHead,
    config: Mapping[str, Any],
    source: str,
    target: LoadedModel,
    dtype: mx.Dtype | None,
) -> LoadedModel:
    """A head with its weights computed; its tokenizer is the target's."""
    cast_head(head, dtype)
    mx.eval(head)
    if head.frequent is not None:
        mx.eval(head.frequent.model)
    return LoadedModel(head, target.tokenizer, flat(config), source)


def load_head(
    folder: Path,
    config: Mapping[str, Any],
    source: str,
    target: LoadedModel,
    dtype: mx.Dtype | None = None,
) -> LoadedModel:
    """A draft head that is ready to run; its tokenizer is the target's.

    Args:
        folder, config, source: as for :func:`open_head`.
        target: lends its embedding and output head if the head has none.
        dtype: type of the head's weights; ``None``: the target's type if that has 16
            bits, otherwise as they are stored.

    Raises:
        UnsupportedModelError, ModelError: see :func:`open_head`.
    """
    head = open_head(folder, config, source, target)
    return ready(head, config, source, target, dtype)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with its layers' keys at the top as in a model's.

    A block of drafted tokens is no context.
    """
    layers = config.get("transformer_layer_config")
    layers = layers if isinstance(layers, Mapping) else {}
    return {k: v for k, v in {**config, **layers}.items() if k != "block_size"}


def cast_head(head: DraftHead, dtype: mx.Dtype | None, *, lazy: bool = False) -> None:
    """Let a head compute in ``dtype``; ``None``: in the target's 16-bit type."""
    if dtype is not None:
        cast(head, dtype, lazy=lazy)
        return
    theirs = head.ends.embed(mx.zeros((1, 1), mx.int32)).dtype
    # MLX promotes a mix of these two types to float32.
    if theirs in (mx.bfloat16, mx.float16):
        head.set_dtype(theirs)


def _fitted(
    config: HeadConfig, source: str, target: Described, ends: TargetEnds
) -> HeadConfig:
    """Complete a configuration from the target, or refuse a head that does not fit."""
    layers, name = ends.num_layers, target.name
    token = mx.zeros((1, 1), mx.int32)
    embedded = ends.embed(token)
    width = embedded.shape[-1]
    vocab_size = ends.logits(embedded).shape[-1]

    def refuse(made_for: str, has: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"draft {source} was made for a target {made_for}, and {name} has {has}: "
            "name the target that it was made for"
        )

    if not config.vocab_size:
        config = replace(config, vocab_size=vocab_size, draft_vocab_size=vocab_size)
    if config.num_target_layers not in (None, layers):
        raise refuse(f"of {config.num_target_layers} layers", f"{layers}")
    config = config.completed(layers)
    if -1 in config.target_layers:
        raise UnsupportedModelError(
            f"draft {source} reads the target's embedding (layer -1), which is not "
            "supported: take another draft"
        )
    wrong = [i for i in config.target_layers if not 0 <= i < layers]
    if wrong:
        raise refuse(f"with a layer {wrong[0]}", f"{layers} layers")
    for wanted in (config.target_size, config.lent_width):
        if wanted != width:
            raise refuse(f"of width {wanted}", f"{width}")
    if config.vocab_size != vocab_size:
        raise refuse(f"of {config.vocab_size} logits", f"{vocab_size}")
    mask = config.mask_token
    if mask is not None and not 0 <= mask < vocab_size:
        raise refuse(f"whose token {mask} masks", f"{vocab_size} tokens")
    if isinstance(config, BlockConfig):
        if config.sizes.rope_traditional is None:
            sizes = replace(config.sizes, rope_traditional=turns_pairs(target.model))
            config = replace(config, sizes=sizes)
        if not config.owns_head and _caps_logits(ends):
            config = replace(config, logit_cap=0.0)
    if config.draft_vocab_size < vocab_size and not config.owns_head:
        raise ModelError(
            f"{source} proposes {config.draft_vocab_size} of {vocab_size} tokens, and "
            "has no lm_head: download it again"
        )
    return config


def turns_pairs(model: nn.Module) -> bool:
    """Whether a model's rotary embeddings rotate neighbours, not halves of a head."""
    return any(
        getattr(each, "traditional", None) is True for _, each in modules_of(model)
    )


def _caps_logits(ends: TargetEnds) -> bool:
    """Whether a target's own code caps its logits, as Gemma's does."""
    return bool(getattr(ends.owner, "final_logit_softcapping", None))


def _take_offsets(head: DraftHead, offsets: mx.array | None, source: str) -> None:
    config = head.args
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    whole = offsets is not None and mx.issubdtype(offsets.dtype, mx.integer)
    if offsets is None or not whole or offsets.shape != (size,):
        raise ModelError(
            f"{source} proposes {size} of {vocab_size} tokens, and its d2t does not "
            "say which: download it again"
        )
    # In Python, sums of the largest offsets do not wrap around.
    listed: Any = offsets.tolist()
    tokens = [token + offset for token, offset in enumerate(listed)]
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ModelError(
            f"{source}: its d2t names tokens beyond the {vocab_size} of the target: "
            "download it again"
        )
    head.take_offsets(offsets, vocab_size)
