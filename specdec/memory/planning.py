"""The memory plan of an engine, from its models and options.

A model's geometry is read off the caches that it makes. Nothing is computed: a forward
is built, and the caches it would fill have their shapes. So every kind of cache that
the engine can adopt is counted as it is stored, for models that are loaded and for
outlines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..backend import BackendDefaults
from ..cache import (
    BatchCache,
    BatchKVCache,
    BatchRecurrentCache,
    CacheOptions,
    check_caches,
    make_batch_caches,
    members,
)
from ..config import EngineConfig
from ..cuda import gated_delta
from ..cuda.attention_patch import attends_by_ours
from ..cuda.decode_attention import SIZES
from ..cuda.modules import leaves_of
from ..models.draft_heads import DraftHead
from ..models.layers import arrays_of
from ..models.loaded import Described, setting
from ..models.metal_kernels import with_tails
from ..models.recurrent import scan_bytes, with_recurrent_rows
from ..models.row_positions import with_row_positions
from ..models.runner import cache_options
from ..models.vision import tower_memory
from .plan import CacheGeometry, MemoryPlan, ModelGeometry

# Copies of what a recurrent layer holds for a token, in a scan that goes token by
# token, and in one that scores tokens in pairs.
SCAN_COPIES = 3, 5
# Heads of 16 bits up to this size need no array of scores on CUDA; per pair of a token
# and a column, masks in several types take so many bytes
# (benchmarks/results/prefill-h100.md).
FUSED_HEAD, MASK_BYTES = 128, 16
# Copies of the target's hidden states that a draft head reads: recorded, joined, and
# normed.
FEATURE_COPIES = 3


def plan_memory(
    target: Described,
    draft: Described | None,
    config: EngineConfig,
    backend: BackendDefaults,
    *,
    drafts: bool | None = None,
    lookup_bytes: int = 0,
) -> MemoryPlan:
    """The plan of a run of these models.

    Args:
        drafts: whether anything proposes; ``None``: a draft model does, if there
            is one.
        lookup_bytes: bytes that looking n-grams up takes.

    Raises:
        UnsupportedModelError: the batch caches cannot serve a model.
    """
    options = cache_options(config, backend)
    if drafts is None:
        drafts = draft is not None
    k = config.max_draft_tokens if drafts else 0
    # N-grams before a head propose more than its block has.
    if draft is not None and isinstance(draft.model, DraftHead) and not lookup_bytes:
        k = min(k, draft.model.max_proposals or k)
    described = [
        geometry_of(
            each.model,
            each.config,
            each.name,
            options,
            each.loading_bytes,
            kernels=backend.kernels,
            drafts_on=backend if each is draft else None,
        )
        for each in (target, draft)
        if each is not None
    ]
    planned = None
    if draft is not None and k:
        # The draft may share weights with its target.
        lent = {id(array) for _, array in arrays_of(target.model)}
        arrays = {id(array): array for _, array in arrays_of(draft.model)}
        draft_bytes = sum(array.nbytes for i, array in arrays.items() if i not in lent)
        planned = replace(described[1], weight_bytes=draft_bytes)
    return MemoryPlan(
        target=described[0],
        draft=planned,
        num_draft_tokens=k,
        pauses=config.num_draft_tokens == "auto",
        prefill_step_size=config.prefill_step_size,
        backend=backend,
        quantized_kv_start=config.quantized_kv_start,
        prefix_bytes=config.prefix_memory,
        lookup_bytes=lookup_bytes if k else 0,
        tower=tower_memory(target, fuses=backend.name != "cpu"),
    )


def geometry_of(
    model: nn.Module,
    config: Mapping[str, Any],
    name: str,
    options: CacheOptions | None = None,
    loading_bytes: int = 0,
    *,
    kernels: bool = False,
    drafts_on: BackendDefaults | None = None,
) -> ModelGeometry:
    """Read the geometry of an mlx-lm model, loaded or not.

    Args:
        model: the model.
        config: its configuration, for the number of heads and of active experts.
        name: for messages.
        options: how its caches are made; their ``max_write`` and ``max_length`` do
            not matter.
        loading_bytes: as in :class:`ModelGeometry`.
        kernels: whether kernels of :mod:`specdec.cuda` compute what they can.
        drafts_on: the backend on which it drafts; ``None``: it does not.

    Raises:
        UnsupportedModelError: the batch caches cannot serve the model.
    """
    options = replace(options or CacheOptions(max_write=2), max_length=None)
    model = with_recurrent_rows(with_row_positions(model))
    options = check_caches(model, name, options)
    if drafts_on is not None:
        options = with_tails(model, name, options, drafts_on)
    at_once = replace(options, quantized_kv_start=0)
    caches, logits = _forward(model, name, at_once)
    dense: list[BatchCache] = []
    if options.kv_bits is not None and options.quantized_kv_start:
        dense, _ = _forward(model, name, replace(at_once, kv_bits=None))
    heads = _number(config, "num_attention_heads", "n_heads", "num_heads", "n_head")
    hidden = _number(config, "hidden_size", "d_model", "n_embd", "dim", "model_dim")
    nope, rope, values = (
        _number(config, key)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent = _number(config, "kv_lora_rank") > 0
    head = _number(config, "head_dim") or hidden // max(heads, 1)
    queries = heads * (nope + rope if latent else head)
    unfolded = heads * (nope + values) if latent else 0
    elem_bytes: int = logits.dtype.size
    # Latent attention adds scores of its own to the mask; a mask takes 4 bytes.
    score_bytes = (2 if latent else 1) * heads * elem_bytes + 4
    ours = kernels and elem_bytes == 2 and not latent
    if ours and head <= FUSED_HEAD:
        score_bytes = min(score_bytes, MASK_BYTES)
    widths = _layer_widths(model, config, kernels)
    flat = tuple(map(_cache_geometry, caches))
    held = max((cache.held_bytes for cache in flat), default=0)
    states_of_token, pair_bytes = scan_bytes(model)
    copies = SCAN_COPIES[pair_bytes > 0]
    if kernels and any(gated_delta.is_layer(type(m)) for m in model.modules()):
        copies = 1
    plain = all(type(c) is BatchKVCache and not c.packing for c in caches)
    return ModelGeometry(
        name=name,
        num_parameters=sum(_count(layer) for _, layer in leaves_of(model)),
        weight_bytes=sum(array.nbytes for _, array in arrays_of(model)),
        caches=flat,
        dense_caches=tuple(map(_cache_geometry, dense)),
        vocab_size=int(logits.shape[-1]),
        elem_bytes=elem_bytes,
        # Measured on MLX's CPU backend, each width varied alone, and rounded up: the
        # outputs of a layer's projections; in float32, since norms compute in it, six
        # copies of its queries and eight residual streams.
        token_bytes=elem_bytes * max(widths.values(), default=0)
        + 24 * queries
        + 32 * hidden
        + states_of_token
        + copies * held,
        score_bytes=score_bytes,
        pair_bytes=pair_bytes,
        column_bytes=elem_bytes * unfolded
        + max((_per_slot(c, c.nbytes) for c in caches if c.packing), default=0),
        unpacked_column_bytes=max(
            (_per_slot(c, c.unpacked_nbytes) for c in caches), default=0
        ),
        unpacked_bytes=elem_bytes * _unpacked(model) if kernels else 0,
        loading_bytes=loading_bytes,
        feature_bytes=FEATURE_COPIES * elem_bytes * _features(model),
        proposes_blocks=isinstance(model, DraftHead) and model.at_once,
        in_place=ours
        and head in SIZES
        and attends_by_ours(model)
        and not any(c.packing for c in caches),
        tail=options.tail * plain,
        tail_from=options.tail_from * plain,
    )


def _features(model: nn.Module) -> int:
    """How many numbers of the target's hidden states a draft head reads per token."""
    if not isinstance(model, DraftHead):
        return 0
    return len(model.args.target_layers) * model.args.target_size


def _forward(
    model: nn.Module, name: str, options: CacheOptions
) -> tuple[list[BatchCache], mx.array]:
    """The caches that a forward of one token leaves, and its logits."""
    caches = make_batch_caches(model, 1, options, name)
    logits: mx.array = model(mx.zeros((1, 1), mx.int32), cache=caches)
    return members(caches), logits


def _cache_geometry(cache: BatchCache) -> CacheGeometry:
    if isinstance(cache, BatchRecurrentCache):
        held = cache.held_bytes  # of the token that was written
        states = sum(array.nbytes for array in cache.arrays)
        return CacheGeometry(slot_bytes=0, state_bytes=states, held_bytes=held)
    slot_bytes = _per_slot(cache, cache.nbytes)
    if (ring := cache.ring) is None:
        return CacheGeometry(slot_bytes=slot_bytes)
    return CacheGeometry(slot_bytes=slot_bytes, window=ring.window, keep=ring.keep)


def _per_slot(cache: BatchCache, nbytes: int) -> int:
    return nbytes // cache.capacity if cache.capacity else 0


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of ``names`` that a configuration has as a number; else 0."""
    value = setting(config, *names)
    return value if isinstance(value, int) else 0


def _count(layer: Any) -> int:
    """Parameters of a layer, without the scales and biases of a packed layer."""
    if not hasattr(layer, "bits"):
        return sum(array.size for _, array in arrays_of(layer))
    bias = layer.bias.size if "bias" in layer else 0
    packed: int = layer.weight.size * 32 // layer.bits
    return packed + bias


_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


def _layer_widths(
    model: nn.Module, config: Mapping[str, Any], kernels: bool
) -> dict[str, int]:
    """Outputs of all projections for one token, by layer.

    Only the experts that a token uses count, with the inputs that are gathered for them
    where no kernel reads them in place.
    """
    active = _number(
        config,
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "top_k",
    )
    widths: dict[str, int] = defaultdict(int)
    for number, layer in _matrices(model):
        weight = layer["weight"]
        width = weight.shape[-2]
        if weight.ndim == 3:  # experts
            columns = weight.shape[-1] * 32 // getattr(layer, "bits", 32)
            columns *= not (kernels and hasattr(layer, "bits"))
            width = max(active, 1) * (width + columns)
        widths[number] += width
    return widths


def _unpacked(model: nn.Module) -> int:
    """Numbers of the packed matrices of the largest layer, without its experts."""
    sizes: dict[str, int] = defaultdict(int)
    for number, layer in _matrices(model):
        if hasattr(layer, "bits") and layer["weight"].ndim == 2:
            sizes[number] += layer["weight"].size * 32 // layer.bits
    return max(sizes.values(), default=0)


def _matrices(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Projections and experts, and the numbers of their layers."""
    for path, layer in leaves_of(model):
        place = _LAYER.search(path)
        weight = layer.get("weight")
        if place is not None and weight is not None and weight.ndim > 1:
            yield place[1], layer
