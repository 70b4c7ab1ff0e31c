"""Loads models by name (MLX folders, hub ids, GGUF files) and drafts of a target."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..backend import defaults
from ..cuda import (
    attention_patch,
    choices,
    delta_rule,
    expert_block,
    expert_matmul,
    flattened_matmul,
    gated_delta,
    markov_walk,
    residual_norm,
    rotated_heads,
    skinny_matmul,
)
from ..cuda.fused_linear import choices_of, join_products
from ..cuda.kernel_files import compile_together
from ..cuda.mlx_kernels import compiled_beside
from ..errors import ConfigError
from ..model_names import ModelDraft, locate_target
from ..parallel import Ranks, differing, launched_rank
from ..utils.printable import quoted, shorten
from ..utils.warm_up import warm_up
from . import metal_kernels
from .adapters import adapt
from .draft_folder import (
    check_target,
    fingerprint,
    has_layers_only,
    lend,
    open_layers,
    read_card,
    take_type,
)
from .draft_heads.loading import load_head, read_head_config, ready
from .draft_heads.mtp import open_mtp
from .folder import (
    check_folder,
    explained,
    has_weights,
    plain_folder,
    tokenizer_config,
)
from .gguf import load_gguf
from .gguf.weights import WeightFormat
from .kernel_proofs import cached_proofs
from .layer_skip import SkippingModel
from .layers import arrays_of
from .loaded import LoadedModel
from .precision import cast, parse_dtype, quantized_copy, widen_packed
from .sharding import shard
from .tokenizer import ExactTokenizerWrapper
from .tokenizer_check import check_tokenizer

# Keys of a configuration that say how weights are packed.
QUANTIZATION_KEYS = ("quantization", "quantization_config")


def load(
    source: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        source: an MLX model folder, a ``.gguf`` file, a hub id, or the default
            target's name (:data:`specdec.model_names.DEFAULT_TARGET`).
        dtype: ``float32``, ``bfloat16`` or ``float16`` casts floating weights
            and dequantizes quantized ones; ``None`` leaves them as stored (on
            the CPU packed weights compute in float32, see
            :func:`~specdec.models.precision.widen_packed`).
        trust_remote_code: run Python code from the model's folder if the model asks
            for that; otherwise such a model is refused.
        adapter_path: folder of an adapter that ``mlx_lm.lora`` wrote for this model.
        revision: branch, tag or commit of a model on the hub.
        ranks: load only this rank's shard.

    Raises:
        ConfigError: ``dtype`` is not one of these; ``revision`` is given for a model
            on this machine, or an adapter for a ``.gguf`` file or a shard.
        RankError: the ranks load different models.
        ModelNameError: no model can have that name.
        ModelNotFoundError: no model has that name.
        UnsupportedModelError: the model, or a part of it, is not supported.
        ModelError: files are missing, cut short or corrupt.
    """
    wanted = parse_dtype(dtype)
    name = os.fspath(source)
    located = locate_target(name)
    path = os.path.expanduser(located)
    is_file = is_gguf(located)
    check_origin(name, located, adapter_path, revision, ranks)
    if is_file:
        loaded = LoadedModel(*load_gguf(path, WeightFormat(dtype=wanted)), name)
        if ranks is not None:
            take_shard(loaded.model, loaded.config, ranks, name)
    else:
        loaded = replace(
            _load_folder_or_hub(
                located, wanted, trust_remote_code, adapter_path, revision, ranks
            ),
            name=name,
        )
    fit(loaded.model)
    choose_kernels(loaded.model, ranks)
    return replace(loaded, ranks=ranks)


def is_gguf(located: str) -> bool:
    """Whether a path names a GGUF file, judged by its suffix."""
    folder = os.path.isdir(os.path.expanduser(located))
    return located.lower().endswith(".gguf") and not folder


def check_origin(
    name: str,
    located: str,
    adapter_path: str | os.PathLike[str] | None,
    revision: str | None,
    ranks: Ranks | None,
) -> None:
    """Refuse an adapter or a revision for a model that cannot have one.

    Raises:
        ConfigError: the model cannot have what was given.
    """
    if adapter_path is not None and is_gguf(located):
        raise ConfigError(
            f"adapter_path is {quoted(os.fspath(adapter_path))}, and "
            f"{shorten(name)} is a GGUF file: adapters go with the MLX folder that "
            "they were trained on"
        )
    if revision is not None and os.path.exists(os.path.expanduser(located)):
        raise ConfigError(
            f"revision is {quoted(revision)}, and {shorten(name)} is on this machine: "
            "give a hub id"
        )
    if ranks is not None and adapter_path is not None:
        raise ConfigError(
            "adapter_path does not go with tensor parallelism: mlx-lm cannot shard "
            "adapters; merge it into the weights with mlx_lm.fuse"
        )


def take_shard(
    model: nn.Module, config: Mapping[str, Any], ranks: Ranks, name: str
) -> None:
    """Reduce a model to this rank's shard in place, if all ranks have the same model.

    Raises:
        UnsupportedModelError: see :func:`~specdec.models.sharding.shard`.
        RankError: the ranks have different models.
    """
    facts = {"model": fingerprint(model), "configuration": repr(sorted(config.items()))}
    shard(model, ranks.group, name)
    ranks.check(facts, differing, wait=True)
    for _, array in arrays_of(model):
        mx.eval(array)  # one at a time: each whole array is read first


def adopt(
    model: nn.Module,
    tokenizer: Any,
    config: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> LoadedModel:
    """Wrap a model that ``mlx_lm.load`` returned, or a similar one.

    :func:`fit` fits its products to the backend in place: on a CPU, packed weights then
    compute in float32.

    Args:
        model: an mlx-lm model.
        tokenizer: mlx-lm's wrapper, or a tokenizer of transformers.
        config: as ``mlx_lm.load(..., return_config=True)`` returns it; ``None`` takes
            the arguments that the model was made from.
        name: for messages and reports; ``None`` takes the model's type.

    Raises:
        ConfigError: ``model`` is no model, or ``tokenizer`` no tokenizer.
    """
    if not isinstance(model, nn.Module) or not hasattr(tokenizer, "encode"):
        raise ConfigError(
            f"a model and its tokenizer are needed, not {type(model).__name__} and "
            f"{type(tokenizer).__name__}: give what mlx_lm.load returns"
        )
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if config is None:
        made_of: Any = getattr(model, "args", None)
        known = is_dataclass(made_of) and not isinstance(made_of, type)
        config = asdict(made_of) if known else {}
    if name is None:
        name = str(config.get("model_type") or type(model).__module__.split(".")[-1])
    mx.eval(model.parameters())
    fit(model)
    exact = ExactTokenizerWrapper.like(tokenizer)
    return LoadedModel(model, exact, dict(config), name)


def fit(model: Any) -> None:
    """Let a model compute its products in the fastest way on this backend.

    The model changes in place; its weights and their names stay the same. The loaders
    here call this. Models that were made in another way can be passed too.
    """
    backend = defaults()
    if backend.name == "cpu":
        widen_packed(model)
    if backend.name == "metal":
        metal_kernels.take_kernels(model)
    if backend.kernels:
        parts: Any = (
            flattened_matmul,
            skinny_matmul,
            attention_patch,
            delta_rule,
            expert_block,
            expert_matmul,
            gated_delta,
            markov_walk,
            residual_norm,
            rotated_heads,
        )
        with cached_proofs(), compiled_beside(_type_of(model)) as waits:
            proofs = [proof for part in parts for proof in part.proofs_of(model)]
            warm_up.run([partial(compile_together, proofs), *proofs, *waits])
            flattened_matmul.flatten_products(model)
            skinny_matmul.take_few_rows(model)
            attention_patch.take_few_queries(model)
            rotated_heads.take_heads(model)
            residual_norm.take_sums(model)
            delta_rule.take_delta_rules(model)
            expert_block.take_few_launches(model)
            expert_matmul.take_many_tokens(model)
            join_products(model)
            if launched_rank() is None:
                warm_up.run(choices_of(model))


def _type_of(model: nn.Module) -> mx.Dtype | None:
    """The type of most of the model's arrays of floating-point numbers."""
    types = Counter(array.dtype for _, array in arrays_of(model))
    floating = (t for t, _ in types.most_common() if mx.issubdtype(t, mx.floating))
    return next(floating, None)


def choose_kernels(model: nn.Module, ranks: Ranks | None) -> None:
    """Let all ranks take the kernels that are fastest on rank 0.

    So they compute the parts that are not sharded to the same bits.

    Args:
        model: is fitted (:func:`fit`); its matrices have the same shapes on all ranks.
        ranks: ``None``: there are no others, and :func:`fit` has chosen.
    """
    if ranks is None or not defaults().kernels:
        return

    def chosen() -> Mapping[str, bool]:
        with cached_proofs():
            warm_up.run(choices_of(model))
        return choices.all_chosen()

    choices.take(ranks.decide("kernels", chosen))


def load_draft(
    source: str | os.PathLike[str] | ModelDraft,
    target: LoadedModel,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a draft model: any model, or one made from the target's own weights.

    ``self:2bit``, ``self:3bit``, ``self:4bit`` and ``self:8bit`` quantize the
    target in memory, layer by layer. ``layers:0-7,22-29`` runs only those layers of
    the target and shares its weights. ``mtp`` is the MTP head in the target's
    checkpoint. A draft head is bound to the target. The target does not change.
    :func:`map_vocabulary` compares the vocabularies of draft and target.

    Raises:
        ConfigError: there is no such ``self:`` draft, or there are no such layers.
        UnsupportedModelError: layers of this target cannot be skipped.
        ModelError: see :func:`load`.
    """
    loaded = _load_draft(
        ModelDraft.of(source), target, dtype=dtype, trust_remote_code=trust_remote_code
    )
    choose_kernels(loaded.model, target.ranks)
    return loaded


def _load_draft(
    draft: ModelDraft,
    target: LoadedModel,
    *,
    dtype: str | None,
    trust_remote_code: bool,
) -> LoadedModel:
    if draft.layers is not None:
        skipping = SkippingModel(target.model, draft.layers, target.name)
        tokenizer, ranks = target.tokenizer, target.ranks
        return LoadedModel(skipping, tokenizer, target.config, draft.name, ranks)
    if draft.mtp:
        folder = target.folder or folder_of(locate_target(target.name))
        head = open_mtp(folder, target)
        loaded = ready(head, target.config, draft.name, target, parse_dtype(dtype))
        fit(loaded.model)
        return loaded
    if draft.bits is None:
        return _load_made(draft, target, dtype, trust_remote_code)
    model, quantization = quantized_copy(target.model, draft.bits)
    fit(model)
    config = {k: v for k, v in target.config.items() if k not in QUANTIZATION_KEYS}
    config["quantization"] = quantization
    return LoadedModel(model, target.tokenizer, config, draft.name, target.ranks)


def _load_made(
    draft: ModelDraft, target: LoadedModel, dtype: str | None, trust_remote_code: bool
) -> LoadedModel:
    """Load a draft that has its own files, and maybe a card."""
    source = draft.source
    card = read_card(source)
    located = locate_target(source)
    folder = None if is_gguf(located) else folder_of(located)
    head = None if folder is None else read_head_config(folder)
    if folder is not None and head is not None:
        check_no_adapter(draft)
        loaded = load_head(folder, head, draft.name, target, parse_dtype(dtype))
        fit(loaded.model)
    elif has_layers_only(card):
        check_no_adapter(draft)
        model, config = open_layers(source, trust_remote_code=trust_remote_code)
        mx.eval(model.parameters())
        wanted = parse_dtype(dtype)
        if wanted is not None:
            cast(model, wanted)
        else:
            take_type(model, target)
        fit(model)
        lend(model, source, target)
        loaded = LoadedModel(model, target.tokenizer, config, draft.name)
    else:
        loaded = load(
            source,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            adapter_path=draft.adapter_path,
        )
        loaded = replace(loaded, name=draft.name)
    if card is not None:
        check_target(card, draft.name, target)
    return loaded


def check_no_adapter(draft: ModelDraft) -> None:
    """Refuse an adapter for a draft that is not a model of its own.

    Raises:
        ConfigError: the draft has an adapter.
    """
    if draft.adapter_path is not None:
        raise ConfigError(
            f"draft {shorten(draft.name)} takes no adapter: it is not a model of its "
            "own; leave the adapter out"
        )


def _load_folder_or_hub(
    source: str,
    dtype: mx.Dtype | None,
    trust_remote_code: bool,
    adapter_path: str | os.PathLike[str] | None,
    revision: str | None,
    ranks: Ranks | None,
) -> LoadedModel:
    folder = folder_of(source, revision)
    with explained(source):
        check_folder(folder)
        with plain_folder(folder) as plain:
            loaded: Any = mlx_lm.load(  # its type does not say that it returns three
                str(plain),
                tokenizer_config=tokenizer_config(trust_remote_code),
                lazy=True,
                return_config=True,
                trust_remote_code=trust_remote_code,
            )
        model, tokenizer, config = loaded
        if adapter_path is not None:
            adapt(model, adapter_path)
        if ranks is not None:
            take_shard(model, config, ranks, source)
        if dtype is not None:
            cast(model, dtype)
            config = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
        # Layers begin with random weights that are never computed. A state that is not
        # computed either holds all draws before it.
        mx.eval(model.parameters(), mx.random.state)
    check_tokenizer(tokenizer, source)
    tokenizer = ExactTokenizerWrapper.like(tokenizer)
    return LoadedModel(model, tokenizer, config, source, folder=folder)


def fetch_files(source: str, revision: str | None = None) -> None:
    """Download a model that is not on this machine.

    Raises:
        ModelError: there is none of that name, or it has no weights.
    """
    located = locate_target(source)
    if is_gguf(located):
        return
    folder = folder_of(located, revision)
    with explained(source):
        check_folder(folder)
        if not has_weights(folder):
            raise FileNotFoundError(f"No safetensors found in {folder}")


def folder_of(source: str, revision: str | None = None) -> Path:
    """The folder of a model, which is downloaded if it is not on this machine.

    Raises:
        ModelError: the folder is not there and cannot be fetched.
    """
    path = os.path.expanduser(source)
    if os.path.exists(path):
        return Path(path)
    # Some draft heads come with mask_embedding.pt and are wrong without it. If it is
    # downloaded too, they are refused. MTP heads lie beside the weights.
    others = ("mask_embedding.*", "mtp*.safetensors", "mtp/*.safetensors")
    patterns = [*mlx_lm_utils.DEFAULT_ALLOW_PATTERNS, *others]
    with explained(source):
        return Path(
            mlx_lm_utils.snapshot_download(
                source, revision=revision, allow_patterns=patterns
            )
        )
