"""Reads mlx-lm's prompt-cache files into the prefix store, and writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..cache import (
    BatchCacheList,
    BatchRecurrentCache,
    make_batch_caches,
    members,
)
from ..errors import CacheError
from ..prefix_cache.session import ModelPrefixes
from ..utils.files import open_plain
from ..utils.printable import shorten
from .layer_skip import FewerCaches
from .runner import ModelRunner


def read_prompt_cache(
    runner: ModelRunner, file: str | os.PathLike[str], tokens: Sequence[int]
) -> int:
    """Store the prefix that a file of mlx-lm holds.

    Such a file does not name its tokens, and may not name its model, so the caller must
    know both. The number of tokens and the kind, heads, head sizes and types of each
    layer's cache are compared.

    Args:
        file: as ``mlx_lm.models.cache.save_prompt_cache`` writes it.
        tokens: the prompt that the file was made from; it may have further tokens.

    Returns:
        Tokens in the file, now in the store.

    Raises:
        CacheError: the file is not there, cannot be read, or does not fit the
            model's caches.
    """
    prefixes = _prefixes(runner)
    name = shorten(os.fspath(file))
    if not os.path.exists(file):
        raise CacheError(f"{name}: no such file")
    try:
        open_plain(file).close()
        singles: list[Any] = mlx_lm_cache.load_prompt_cache(os.fspath(file))
        if isinstance(runner.model, FewerCaches):
            singles = runner.model.of_all(singles)
        mx.eval([c.state for c in singles])
    except Exception as error:  # a file's contents can be wrong in any way
        raise CacheError(
            f"{name} cannot be read as a prompt cache of mlx-lm "
            f"({type(error).__name__}): write it with mlx_lm.cache_prompt"
        ) from error
    caches = _like_the_model(runner, singles, name)
    # mlx-lm does not write how many tokens recurrent states have read.
    known = [c for c in members(caches) if not isinstance(c, BatchRecurrentCache)]
    if caches and not known:
        raise CacheError(f"{name} holds states alone, and not of how many tokens")
    lengths: Any = known[0].offset.tolist() if known else [0]
    (length,) = lengths
    if not 0 < length <= len(tokens):
        raise CacheError(
            f"{name} holds {length} tokens and the prompt has {len(tokens)}: "
            "give the prompt that it was made from"
        )
    # As if one chunk had written it all: rings serve only the prefix at their end.
    session = prefixes.begin([tokens[:length]], max_write=0)
    session.record(caches, [0], [length], length)
    return int(length)


def write_prompt_cache(
    runner: ModelRunner, tokens: Sequence[int], file: str | os.PathLike[str]
) -> int:
    """Write the longest stored prefix of ``tokens`` as a file for mlx-lm.

    Returns:
        Tokens in the file.

    Raises:
        CacheError: no prefix of this prompt is stored, or the prompt is too short to be
            looked up; a layer's cache is of a kind that mlx-lm does not have; the file
            cannot be written.
    """
    prefixes = _prefixes(runner)
    # The last token is left for mlx-lm to go on with.
    session = prefixes.begin([tokens[:-1]], max_write=runner.options.max_write)
    for _ in session.find():
        pass
    (length,) = session.reused
    least = prefixes.store.min_length
    if length == 0 and len(tokens) <= least:  # the last one is not stored
        raise CacheError(
            f"the prompt has {len(tokens)} tokens, and prefixes of fewer than {least} "
            "are not looked up: export a longer one"
        )
    if length == 0:
        raise CacheError("nothing is stored of this prompt: generate with it first")
    caches = session.refill(
        make_batch_caches(runner.model, 1, runner.options, runner.name)
    )
    singles = [c.extract(0) for c in caches]
    if isinstance(runner.model, FewerCaches):
        singles = runner.model.among_all(singles)
    # mlx_lm.generate --prompt-cache-file asks for these keys.
    about = {"model": runner.name, "tokenizer_config": "{}"}
    try:
        mlx_lm_cache.save_prompt_cache(os.fspath(file), singles, about)
    except (OSError, RuntimeError, ValueError) as error:
        raise CacheError(
            f"{shorten(os.fspath(file))} cannot be written ({error}): name a file "
            "that ends in .safetensors, in an existing folder"
        ) from error
    return length


def _prefixes(runner: ModelRunner) -> ModelPrefixes:
    if runner.prefixes is None:
        raise CacheError(
            "there is no prefix store: set prefix_cache or prefix_cache_memory"
        )
    if runner.prefixes.is_shared:
        raise CacheError(
            "prefixes are kept with what a draft head knows of them, which files of "
            "mlx-lm do not have: leave the draft out"
        )
    return runner.prefixes


def _like_the_model(runner: ModelRunner, singles: list[Any], name: str) -> list[Any]:
    """Batch caches of one row, compared with the model's."""
    wanted = make_batch_caches(runner.model, 1, runner.options, runner.name)
    # Builds a graph to read its shapes; nothing is computed.
    runner.model(mx.array([[0]]), cache=wanted)
    if len(singles) != len(wanted):
        raise CacheError(
            f"{name} holds {len(singles)} caches, the model has {len(wanted)}: "
            "it is of another model"
        )
    caches = []
    for layer, (single, like) in enumerate(zip(singles, wanted, strict=True)):
        try:
            adopted = _adopted(single, like)
        except (CacheError, AttributeError, TypeError, ValueError) as error:
            raise CacheError(f"{name}, layer {layer}: {error}") from error
        for new, old in zip(members([adopted]), members([like]), strict=True):
            if new.kind != old.kind or _form(new) != _form(old):
                raise CacheError(
                    f"{name}, layer {layer}: {_described(new)}, where the model has "
                    f"{_described(old)}"
                )
        caches.append(adopted)
    return caches


def _adopted(single: Any, like: Any) -> Any:
    if isinstance(like, BatchCacheList):
        pairs = zip(single.caches, like.caches, strict=True)
        return BatchCacheList(*(_adopted(s, c) for s, c in pairs))
    return type(like).merge([single])


def _form(cache: Any) -> list[tuple[Any, ...]]:
    """Heads, head sizes and types of a cache's arrays; shapes and types of states."""
    if isinstance(cache, BatchRecurrentCache):
        return [(a.shape[1:], a.dtype) for a in cache.arrays]
    state = [cache.keys, cache.values]
    arrays = [
        a for part in state for a in (part if isinstance(part, tuple) else [part])
    ]
    return [(a.shape[1], a.shape[3], a.dtype) for a in arrays]


def _described(cache: Any) -> str:
    kind = {k: v for k, v in cache.kind.items() if k != "class"}
    options = "".join(f" {k}={v}" for k, v in kind.items())
    each = [(" x ".join(map(str, sizes)), dtype) for *sizes, dtype in _form(cache)]
    forms = ", ".join(f"{sizes} {dtype}" for sizes, dtype in each)
    return f"{cache.kind['class']}{options} ({forms})"
