"""Models without weights: only shapes and types, read from headers.

MLX computes nothing until it is asked to. So the model that mlx-lm itself builds from a
folder's headers, or from a configuration, has every shape and type of the loaded model
and takes no memory. Reports on a model before it is loaded are made from this model,
never from a second description of its architecture.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import (
    hf_repo_to_path,
    load_model,
    load_tokenizer,
    snapshot_download,
)

from ..backend import defaults
from ..errors import ModelError, ModelNotFoundError, SpecdecError
from ..model_names import ModelDraft, locate_target
from ..parallel import Ranks
from .adapters import adapt
from .conversions import Conversions, weights_of
from .draft_folder import has_layers_only, lend, open_layers, read_card
from .draft_heads.loading import cast_head, flat, open_head, read_head_config
from .draft_heads.mtp import open_mtp
from .folder import (
    check_folder,
    check_sizes,
    explained,
    has_weights,
    plain_folder,
    read_config,
    tokenizer_config,
)
from .gguf.config import build_config
from .gguf.header import read_header
from .gguf.tokenizer import build_tokenizer
from .gguf.weights import WeightFormat, build_model
from .layer_skip import SkippingModel
from .loaded import LoadedModel, context_length, setting
from .loading import (
    QUANTIZATION_KEYS,
    check_no_adapter,
    check_origin,
    is_gguf,
)
from .precision import cast, parse_dtype, predicate, quantized_copy, widen_packed
from .sharding import shard
from .vocabulary import VocabularyMap, map_vocabulary


@dataclass(frozen=True)
class ModelOutline:
    """A model that cannot compute.

    Args:
        model: an mlx-lm model whose weights are not evaluated.
        config: its configuration, as in ``config.json``.
        name: the name that the user gave.
        loading_bytes: the most bytes that loading it will hold, including its weights.
        tokens: the path of its tokenizer: a folder, a GGUF file, or a configuration
            without a tokenizer.
    """

    model: nn.Module
    config: dict[str, Any]
    name: str
    loading_bytes: int
    tokens: Path

    @property
    def folder(self) -> Path | None:
        """The model's folder, if it has one."""
        return self.tokens if self.tokens.is_dir() else None


def outline(
    source: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    ranks: Ranks | None = None,
) -> ModelOutline:
    """The outline of what :func:`specdec.models.load` would load.

    Args:
        source: an MLX model folder, a ``.gguf`` file, a hub id that was downloaded
            before, a ``config.json`` (a folder may hold that alone), or the default
            target's name.
        dtype, trust_remote_code, adapter_path, revision, ranks: as for
            :func:`specdec.models.load`.

    Raises:
        ConfigError: as for :func:`specdec.models.load`.
        ModelNameError: no model can have that name.
        ModelNotFoundError: no model on this machine has that name.
        UnsupportedModelError: the model, or a part of it, is not supported.
        ModelError: a file is cut short or corrupt.
    """
    wanted, name = parse_dtype(dtype), os.fspath(source)
    located = locate_target(name)
    path = Path(os.path.expanduser(located))
    conversions = Conversions()
    check_origin(name, located, adapter_path, revision, ranks)
    with explained(name):
        if is_gguf(located):
            file = read_header(path)
            form = WeightFormat(dtype=wanted)
            config = build_config(file)
            conversions.reading(file, config, form)
            model, config = build_model(file, config, form, lazy=True)
            if ranks is not None:
                shard(model, ranks.group, name)
        else:
            path = _folder(located, path, revision)
            model, config = _from_folder(path, trust_remote_code)
            if adapter_path is not None:
                adapt(model, adapter_path)
            if ranks is not None:
                shard(model, ranks.group, name)
            if wanted is not None:
                before = weights_of(model)
                cast(model, wanted, lazy=True)
                conversions.casting(before, weights_of(model), wanted)
    mx.eval(mx.random.state)  # see specdec.models.loading
    _fit(model, conversions)
    return ModelOutline(model, config, name, conversions.peak(model), path)


def context_of(
    source: str | os.PathLike[str], revision: str | None = None
) -> int | None:
    """A model's context in tokens, from its configuration alone.

    ``None``: the model is not on this machine, cannot be read, or does not say.
    """
    located = locate_target(os.fspath(source))
    path = Path(os.path.expanduser(located))
    try:
        if is_gguf(located):
            return context_length(build_config(read_header(path)))
        path = _folder(located, path, revision)
        return context_length(
            read_config(path if path.is_file() else path / "config.json")
        )
    except (SpecdecError, OSError):
        return None


def outline_draft(
    source: str | os.PathLike[str] | ModelDraft,
    target: ModelOutline,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> ModelOutline:
    """The outline of what :func:`specdec.models.load_draft` would load.

    Raises:
        ConfigError: there is no such ``self:`` draft, or there are no such layers.
        ModelError: see :func:`outline`.
    """
    draft = ModelDraft.of(source)
    if draft.layers is not None:
        skipping = SkippingModel(target.model, draft.layers, target.name)
        return ModelOutline(skipping, target.config, draft.name, 0, target.tokens)
    if (outlined := _outline_head(draft, target, parse_dtype(dtype))) is not None:
        return outlined
    if draft.bits is None and has_layers_only(read_card(draft.source)):
        check_no_adapter(draft)
        return _outline_layers(draft, target, parse_dtype(dtype), trust_remote_code)
    if draft.bits is None:
        outlined = outline(
            draft.source,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            adapter_path=draft.adapter_path,
        )
        return replace(outlined, name=draft.name)
    model, _ = quantized_copy(target.model, draft.bits, lazy=True)
    conversions = Conversions()
    conversions.quantizing(weights_of(target.model), weights_of(model))
    _fit(model, conversions)
    size = conversions.peak(model)
    return ModelOutline(model, target.config, draft.name, size, target.tokens)


def _outline_head(
    draft: ModelDraft, target: ModelOutline, dtype: mx.Dtype | None
) -> ModelOutline | None:
    """The outline of a draft head; ``None`` if the draft is not a head."""
    if draft.bits is not None:
        return None
    source = str(target.tokens) if draft.mtp else locate_target(draft.source)
    path = Path(os.path.expanduser(source))
    if is_gguf(source) and not draft.mtp:
        return None
    if not path.exists():
        path = _folder(source, path)
    config = target.config if draft.mtp else read_head_config(path)
    if config is None:
        return None
    check_no_adapter(draft)
    if draft.mtp:
        head = open_mtp(path, target)
    else:
        head = open_head(path, config, draft.name, target)
    conversions, before = Conversions(), weights_of(head)
    cast_head(head, dtype, lazy=True)
    if dtype is not None:
        conversions.casting(before, weights_of(head), dtype)
    _fit(head, conversions)
    size = conversions.peak(head)
    return ModelOutline(head, flat(config), draft.name, size, target.tokens)


def _outline_layers(
    draft: ModelDraft,
    target: ModelOutline,
    dtype: mx.Dtype | None,
    trust_remote_code: bool,
) -> ModelOutline:
    """The outline of a draft that takes its embedding from the target."""
    conversions = Conversions()
    model, config = open_layers(draft.source, trust_remote_code=trust_remote_code)
    if dtype is not None:
        before = weights_of(model)
        cast(model, dtype, lazy=True)
        conversions.casting(before, weights_of(model), dtype)
    _fit(model, conversions)
    loading_bytes = conversions.peak(model)
    lend(model, draft.name, target)
    return ModelOutline(model, config, draft.name, loading_bytes, target.tokens)


def _fit(model: nn.Module, conversions: Conversions) -> None:
    """The parts of :func:`specdec.models.loading.fit` that change memory."""
    backend = defaults()
    if backend.name == "cpu":
        before = weights_of(model)
        widen_packed(model, lazy=True)
        conversions.widening(before, weights_of(model))
    if backend.kernels:
        conversions.joining(model)


def _folder(name: str, path: Path, revision: str | None = None) -> Path:
    """The folder, or the ``config.json``, that a name stands for."""
    if path.is_file() and path.suffix == ".json":
        return path
    if path.exists():
        check_folder(path)
        return path
    try:
        snapshot = _local_snapshot(name, revision)
        path = Path(snapshot)
    except Exception as error:  # the hub's client raises many kinds
        raise ModelNotFoundError(
            f"{name} is not a folder here, and was not downloaded from the hub: fetch "
            f"it with hf download {name}, or give its config.json"
        ) from error
    check_folder(path)
    return path


def _local_snapshot(name: str, revision: str | None) -> str:
    if revision is None:
        return str(hf_repo_to_path(name))
    return str(snapshot_download(name, revision=revision, local_files_only=True))


def _from_folder(
    path: Path, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    if path.is_dir() and has_weights(path):
        with plain_folder(path) as plain:
            model, config = load_model(
                plain, lazy=True, trust_remote_code=trust_remote_code
            )
        return model, config
    return _from_config(path if path.is_file() else path / "config.json")


def _from_config(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A model of random weights in the type and packing that the file names.

    mlx-lm packs the layers that are packed in a folder's weights. Here there are no
    weights, so the layers that its own conversion would pack are packed.
    """
    try:
        config = read_config(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file: check the path") from error
    check_sizes(config, path)
    plain = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(plain), "utf-8")
        try:
            model, _ = load_model(Path(folder), lazy=True, strict=False)
        except (LookupError, TypeError) as error:
            # The code of some models expects weights that it can rename.
            raise ModelError(
                f"{path} does not say enough by itself for {config['model_type']}: "
                "give the folder with its weights"
            ) from error
    stored = setting(config, "torch_dtype", "dtype") or "bfloat16"
    dtype = parse_dtype(str(stored).removeprefix("torch."))
    assert dtype is not None  # it is None only for the name None
    model.set_dtype(dtype)
    packing = config.get("quantization")
    if packing is None and config.get("quantization_config") is not None:
        raise ModelError(
            f"{path} names a quantization_config without MLX's own quantization: "
            "give the folder with its weights"
        )
    if packing is not None:
        _pack(model, packing)
    return model, config


def _pack(model: nn.Module, packing: dict[str, Any]) -> None:
    may_pack = predicate(model, "quant_predicate")
    default = {k: packing[k] for k in ("group_size", "bits", "mode") if k in packing}

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if path in packing:
            chosen: bool | dict[str, Any] = packing[path]
            return chosen
        if not hasattr(layer, "to_quantized") or may_pack(path, layer) is False:
            return False
        fits: bool = layer.weight.shape[-1] % default["group_size"] == 0
        return fits

    nn.quantize(model, **default, class_predicate=choose)


def check_tokenizers(
    target: ModelOutline, draft: ModelOutline, *, trust_remote_code: bool = False
) -> VocabularyMap | None:
    """Map the target's vocabulary to the draft's.

    If one is a configuration without weights, there is nothing to compare. Loading a
    vocabulary takes some seconds, so a draft with the target's tokenizer loads none.

    Returns:
        ``None`` if the vocabularies are the same, or one of them is not known.

    Raises:
        VocabularyMismatchError: see
            :func:`~specdec.models.vocabulary.map_vocabulary`.
        UnsupportedModelError: the kind of tokenizer is not supported.
        ModelError: a tokenizer cannot be loaded.
    """
    if draft.tokens == target.tokens:
        return None
    of_target = _with_tokenizer(target, trust_remote_code)
    of_draft = _with_tokenizer(draft, trust_remote_code)
    if of_target is None or of_draft is None:
        return None
    return map_vocabulary(of_target, of_draft)


def _with_tokenizer(
    outline: ModelOutline, trust_remote_code: bool
) -> LoadedModel | None:
    """The outline with its tokenizer; ``None`` for a configuration alone."""
    path = outline.tokens
    tokenizer: TokenizerWrapper | None = None
    with explained(outline.name):
        if path.is_dir() and has_weights(path):
            tokenizer = load_tokenizer(path, tokenizer_config(trust_remote_code))
        elif path.suffix.lower() == ".gguf":
            tokenizer = build_tokenizer(read_header(path))
    if tokenizer is None:
        return None
    return LoadedModel(outline.model, tokenizer, outline.config, outline.name)
