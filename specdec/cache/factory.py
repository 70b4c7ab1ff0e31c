"""Makes the batch caches of a model's layers, in place of mlx-lm's."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import CacheError, UnsupportedModelError
from ..utils.printable import first_line
from .batch import BatchCache
from .columns import counts_columns
from .core import Memo, Settings
from .kinds import BatchChunkedKVCache, BatchKVCache, BatchRotatingKVCache
from .members import BatchCacheList, members
from .positions import at_least, whole
from .recurrent import BatchRecurrentCache
from .storage import GroupSizeError, QuantizedCodec

LayerCache = BatchCache | BatchCacheList

# How many first tokens mlx-lm keeps when max_kv_size bounds a cache.
MAX_KV_SIZE_KEEP = 4


@dataclass(frozen=True)
class CacheOptions:
    """How to make the caches of a model.

    Args:
        max_write: the most tokens written in one call (a prefill chunk or k + 1), and
            the most that a ring can take back.
        read_bucket: the number of columns that attention reads is rounded up to a
            multiple of this, so that shapes repeat: on a GPU a new shape takes long. 1
            reads exactly what is held.
        max_length: the most tokens that a row will ever hold, prefill's padding
            included, if known. Memory never grows past it, and longer rows are refused.
        kv_bits: 4 or 8 stores keys and values quantized; ``None`` does not.
        kv_group_size: 32, 64 or 128 elements share a scale. It must divide the model's
            head size.
        quantized_kv_start: caches stay dense until the longest row holds this
            many tokens; see :func:`maybe_quantize`.
        max_kv_size: full-attention layers keep the first 4 tokens and the newest
            ``max_kv_size - 4``.
        additive_mask: make masks of 0 and minus infinity in the type of the scores
            (faster on a GPU) in place of boolean ones. Not for models that
            :func:`reads_boolean_masks` finds.
        mask_heads, unpacks, exact_alone, in_place, tail, tail_from: see
            :class:`~specdec.cache.core.CacheCore`.
        packs_members: quantize all caches of a layer that has several; if false, only
            the first, since others may belong to an indexer, which reads and sets its
            arrays itself.
        single_stays: see :class:`~specdec.cache.recurrent.BatchRecurrentCache`.

    Raises:
        CacheError: a value is out of range, or not a whole number.
    """

    max_write: int
    read_bucket: int = 1
    max_length: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    max_kv_size: int | None = None
    additive_mask: bool = False
    mask_heads: int = 1
    unpacks: bool | None = None
    exact_alone: bool = True
    in_place: bool = False
    tail: int = 0
    tail_from: int = 0
    packs_members: bool = True
    single_stays: bool = False

    def __post_init__(self) -> None:
        at_least("max_write", self.max_write, 1)
        at_least("read_bucket", self.read_bucket, 1)
        if self.max_length is not None:
            at_least("max_length", self.max_length, 1)
        if self.kv_bits is not None:
            QuantizedCodec(self.kv_bits, self.kv_group_size)
        at_least("quantized_kv_start", self.quantized_kv_start, 0)
        if (
            self.max_kv_size is not None
            and whole("max_kv_size", self.max_kv_size) <= MAX_KV_SIZE_KEEP
        ):
            raise CacheError(
                f"max_kv_size is {self.max_kv_size}: it must be more than the "
                f"first {MAX_KV_SIZE_KEEP} tokens, which are always kept"
            )


SUPPORTED = (
    mlx_lm_cache.KVCache,
    mlx_lm_cache.RotatingKVCache,
    mlx_lm_cache.QuantizedKVCache,
    mlx_lm_cache.ChunkedKVCache,
    mlx_lm_cache.ArraysCache,
    mlx_lm_cache.CacheList,
)


def _unsupported(cache: Any) -> str | None:
    """The first class, of ``cache`` or its members, that is not supported."""
    # Exact types: a subclass may well behave differently.
    if type(cache) not in SUPPORTED:
        return type(cache).__name__
    members = cache.caches if isinstance(cache, mlx_lm_cache.CacheList) else ()
    return next((name for m in members if (name := _unsupported(m))), None)


def _make(
    cache: Any, batch_size: int, options: CacheOptions, settings: Settings
) -> LayerCache:
    """The batch counterpart of mlx-lm's ``cache``, empty."""
    if isinstance(cache, mlx_lm_cache.CacheList):
        others = options if options.packs_members else replace(options, kv_bits=None)
        first, *rest = cache.caches
        batch_caches = [_make(first, batch_size, options, settings)]
        batch_caches += [_make(m, batch_size, others, settings) for m in rest]
        return BatchCacheList(*batch_caches)  # type: ignore[arg-type]  # lists do not nest
    if isinstance(cache, mlx_lm_cache.ArraysCache):
        return BatchRecurrentCache(
            batch_size,
            size=len(cache.cache),
            single_stays=options.single_stays,
            **settings,
        )
    if isinstance(cache, mlx_lm_cache.QuantizedKVCache):
        settings = {**settings, "bits": cache.bits, "group_size": cache.group_size}
    elif options.kv_bits is not None and options.quantized_kv_start == 0:
        bits, group_size = options.kv_bits, options.kv_group_size
        settings = {**settings, "bits": bits, "group_size": group_size}
    most = options.max_write
    if isinstance(cache, mlx_lm_cache.ChunkedKVCache):
        return BatchChunkedKVCache(
            batch_size, chunk_size=cache.chunk_size, max_write=most, **settings
        )
    if isinstance(cache, mlx_lm_cache.RotatingKVCache):
        size, keep = cache.max_size, cache.keep
    elif options.max_kv_size is not None:
        size, keep = options.max_kv_size, MAX_KV_SIZE_KEEP
    else:
        return BatchKVCache(batch_size, **settings)
    return BatchRotatingKVCache(
        batch_size, max_size=size, keep=keep, max_write=most, **settings
    )


# mx.where(mask, ...), mask & ..., ~mask and the like.
_BOOLEAN_USE = re.compile(r"where\(\s*mask\b|[&|~]\s*mask\b|\bmask\s*[&|]")


def reads_boolean_masks(model: Any) -> bool:
    """Whether the model's code expects boolean masks.

    mlx-lm's caches return boolean masks. Attention that is not mlx-lm's own function
    (mostly multi-head latent attention) may depend on it, and would silently read an
    additive mask upside down.
    """
    modules = {type(m).__module__ for _, m in model.named_modules()}
    for name in modules:
        if name.partition(".")[0] == "mlx":
            continue
        try:
            source = inspect.getsource(sys.modules[name])
        except (KeyError, OSError, TypeError):
            return True  # unknown
        if _BOOLEAN_USE.search(source):
            return True
    return False


def check_caches(
    model: Any, name: str, options: CacheOptions | None = None
) -> CacheOptions:
    """Refuse a model that the batch caches cannot serve, before any work.

    The classes that the model asks for are checked, and its own code is tried: a
    forward of rows with different lengths is built, but not computed. This finds models
    that read ``cache.offset`` as one number, or derive positions from the columns that
    attention reads, and head sizes that the quantization group does not divide. Code
    that cannot take packed keys (latent attention, attention sinks, layers that use the
    keys of others) gets them unpacked, one layer at a time. Code that does not take
    masks of several heads gets masks of one. Where code does anything with keys but
    attend to them, caches have no tail and are not written in place.

    Returns:
        The options, with ``unpacks``, or without ``packs_members``, ``mask_heads``,
        ``in_place`` or ``tail``, if the model needs that.

    Raises:
        UnsupportedModelError: names the model and what is not supported.
    """
    options = options or CacheOptions(max_write=2)
    small = replace(
        options,
        max_write=2,
        max_length=None,
        read_bucket=1,
        quantized_kv_start=0,
        tail_from=0,
    )
    module = type(model).__module__
    try:
        caches = make_batch_caches(model, 3, small, name)
        if any(isinstance(each, BatchCacheList) for each in caches):
            # An indexer may add to the mask only once rows are long.
            options = replace(options, mask_heads=1)
            caches = make_batch_caches(model, 3, replace(small, mask_heads=1), name)
        _try(model, caches)
        # Code that reads arrays of caches would have them copied in every forward.
        if options.in_place and any(c.lent for c in members(caches)):
            return check_caches(model, name, replace(options, in_place=False))
    except GroupSizeError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model's code raises
        if options.in_place:
            return check_caches(model, name, replace(options, in_place=False))
        if options.tail:
            return check_caches(model, name, replace(options, tail=0))
        if options.mask_heads > 1:
            return check_caches(model, name, replace(options, mask_heads=1))
        if options.kv_bits is not None and not options.unpacks:
            return check_caches(model, name, replace(options, unpacks=True))
        if options.kv_bits is not None and options.packs_members:
            return check_caches(model, name, replace(options, packs_members=False))
        reason = first_line(error)
        if "No Metal back-end" in reason:
            raise UnsupportedModelError(
                f"{name} has layers ({module}) that mlx-lm runs on Metal only: use "
                "another model here"
            ) from error
        if not isinstance(error, CacheError):
            reason = f"{type(error).__name__}: {reason}"
        if options.kv_bits is not None:
            raise UnsupportedModelError(
                f"{name}: its code ({module}) does not work with batch "
                f"caches with kv bits {options.kv_bits}: {reason}"
            ) from error
        raise _unsupported_layers(
            name, f"layers ({module}) that fail in batch caches: {reason}"
        ) from error
    dense = make_batch_caches(model, 3, replace(small, kv_bits=None), name)
    if counts_columns(model, dense):
        raise _unsupported_layers(
            name,
            f"layers ({module}) that take the number of columns that attention reads "
            "for the position of every row",
        )
    return options


def _try(model: Any, caches: list[Any]) -> None:
    """Build forwards of rows with different lengths, of several tokens and of one."""
    model(mx.zeros((3, 2), mx.int32), cache=caches)
    for cache in caches:
        cache.trim_per_sequence([0, 1, 2])
    for width in (2, 1):
        model(mx.zeros((3, width), mx.int32), cache=caches)


def _check_classes(caches: list[Any], name: str) -> None:
    for layer, cache in enumerate(caches):
        if unsupported := _unsupported(cache):
            raise _unsupported_layers(
                name, f"{unsupported} layers, from layer {layer} on"
            )


def _unsupported_layers(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} has {what}, which specdec does not support; mlx_lm.generate runs it"
    )


def make_batch_caches(
    model: Any,
    batch_size: int,
    options: CacheOptions,
    name: str = "model",
    memo: Memo | None = None,
) -> list[Any]:
    """An empty batch cache for each cache that ``model`` asks for, sharing ``memo``.

    Returns:
        A list of :data:`LayerCache`.

    Raises:
        UnsupportedModelError: the model asks for a class that is not supported.
    """
    caches = mlx_lm_cache.make_prompt_cache(model)
    _check_classes(caches, name)
    settings: Settings = {
        "max_length": options.max_length,
        "read_bucket": options.read_bucket,
        "additive_mask": options.additive_mask,
        "mask_heads": options.mask_heads,
        "unpacks": options.unpacks,
        "exact_alone": options.exact_alone,
        "in_place": options.in_place,
        "tail": options.tail,
        "tail_from": options.tail_from,
        "memo": Memo() if memo is None else memo,
    }
    return [_make(cache, batch_size, options, settings) for cache in caches]


def maybe_quantize(
    caches: list[Any], options: CacheOptions, longest: int | None = None
) -> bool:
    """Quantize dense caches, in place in the list, once they are long enough.

    Call it between forwards, like mlx-lm's ``maybe_quantize_kv_cache``. All layers
    change in one call, when the longest row of the batch holds
    ``options.quantized_kv_start`` tokens.

    Args:
        longest: tokens of the longest row. ``None`` asks the caches, which waits for
            the device.

    Returns:
        Whether anything changed.
    """
    if options.kv_bits is None or not any(_is_dense(c, options) for c in caches):
        return False
    if longest is None:
        longest = max(int(c.offset.max()) if c.batch_size else 0 for c in caches)
    if longest < options.quantized_kv_start:
        return False
    for i, cache in enumerate(caches):
        caches[i] = _quantized(cache, options)
    return True


def extend_caches(caches: list[Any], others: list[Any]) -> None:
    """Append the rows of ``others`` to ``caches``, in place in the list.

    If the rows of one side are quantized already (they were longer) and the others
    are not, all become quantized.
    """
    for i, (cache, other) in enumerate(zip(caches, others, strict=True)):
        caches[i] = _like(cache, other)
        caches[i].extend(other)


def place_caches(caches: list[Any], rows: Sequence[int], others: list[Any]) -> None:
    """Put the first rows of ``others`` into ``rows`` of ``caches``, in place.

    Quantized and dense rows are joined as in :func:`extend_caches`.
    """
    for i, (cache, other) in enumerate(zip(caches, others, strict=True)):
        caches[i] = _like(cache, other)
        caches[i].place(rows, _like(other, caches[i]))


def _like(cache: Any, other: Any) -> Any:
    """``cache``, quantized if ``other`` is."""
    if isinstance(cache, BatchCacheList):
        return BatchCacheList(*map(_like, cache.caches, other.caches))
    if cache.is_dense and other.packing:
        return cache.to_quantized(**other.packing)
    return cache


def _to_pack(cache: BatchCacheList, options: CacheOptions) -> int:
    """How many of the first caches of the list are to be quantized."""
    return len(cache.caches) if options.packs_members else 1


def _is_dense(cache: LayerCache, options: CacheOptions) -> bool:
    """Whether ``cache``, or a member of it, is to be quantized."""
    if isinstance(cache, BatchCacheList):
        packed = cache.caches[: _to_pack(cache, options)]
        return any(_is_dense(c, options) for c in packed)
    return cache.is_dense


def _quantized(cache: Any, options: CacheOptions) -> Any:
    if isinstance(cache, BatchCacheList):
        n = _to_pack(cache, options)
        packed = [_quantized(c, options) for c in cache.caches[:n]]
        return BatchCacheList(*packed, *cache.caches[n:])
    if not _is_dense(cache, options):
        return cache
    return cache.to_quantized(group_size=options.kv_group_size, bits=options.kv_bits)
