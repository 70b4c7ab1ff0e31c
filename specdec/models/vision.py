"""Images as embeddings: towers, projectors and processors, which are mlx-vlm's.

mlx-vlm is imported when an image comes, and only here. Its model classes compute the
embeddings of one image at a time; the text part stays mlx-lm's class, so that a prompt
without images is decoded as if this module did not exist.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ModelError, PromptError, UnsupportedModelError
from ..prompts.images import Image
from ..utils.extras import install
from ..utils.printable import shorten
from ..utils.recent import Recent
from .folder import read_arrays, weight_files
from .image_rows import Sections, Sees
from .layers import Called, arrays_of, calling
from .loaded import Described, LoadedModel
from .pace import PAUSES


@dataclass(frozen=True)
class _Family:
    """Where mlx-vlm has a kind of model.

    Args:
        module: its package below ``mlx_vlm.models``.
        processor: the class in the package's ``processing_*`` module.
        processing: the package of that module, if it is another one.
        marker: the processor's attribute with the text that templates write.
        sees: in which layers the tokens of an image see each other both ways.
        scaled: whether embeddings are those that the text part multiplies.
        sections: how frequencies of rotary embeddings are shared out among three axes;
            ``None``: an image's tokens have positions as text has.
    """

    module: str
    processor: str
    processing: str = ""
    marker: str = "image_token"
    sees: Sees = "none"
    scaled: bool = True
    sections: Sections | None = None


_GEMMA4 = _Family("gemma4", "Gemma4Processor", sees="windows", scaled=False)
_QWEN3_5 = _Family("qwen3_5", "Qwen3VLProcessor", "qwen3_vl", sections="interleaved")
#: By ``model_type``.
FAMILIES = {
    "mistral3": _Family("mistral3", "Mistral3Processor"),
    "pixtral": _Family("pixtral", "PixtralProcessor"),
    "lfm2_vl": _Family("lfm2_vl", "Lfm2VlProcessor"),
    "lfm2-vl": _Family("lfm2_vl", "Lfm2VlProcessor"),
    "gemma3": _Family("gemma3", "Gemma3Processor", marker="boi_token", sees="all"),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(
        _GEMMA4, module="gemma4_unified", processor="Gemma4UnifiedProcessor"
    ),
    "qwen2_vl": _Family("qwen2_vl", "Qwen2VLProcessor", sections="chunked"),
    "qwen2_5_vl": _Family("qwen2_5_vl", "Qwen2_5_VLProcessor", sections="chunked"),
    "qwen3_vl": replace(_QWEN3_5, module="qwen3_vl"),
    "qwen3_vl_moe": replace(_QWEN3_5, module="qwen3_vl_moe"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, module="qwen3_5_moe"),
}
#: Bytes of embeddings that are kept for the next prompt with the same image.
_KEPT_BYTES = 64 * 2**20
#: Images whose text and tokens are kept, and bytes of arguments of the tower: prompts
#: that wait, were refused or are restored.
_PREPARED, _ARGUMENT_BYTES = 1024, 256 * 2**20
#: An image of a size that all processors take, and its most tokens (Gemma 4's).
_BLANK, BLANK_TOKENS = Image(224, 224, bytes(3 * 224 * 224)), 280
#: Keys of a checkpoint that belong to the tower and the projector.
_TOWER_KEY = re.compile("vision|visual|projector")
#: Keys of a checkpoint that belong to the text part.
_TEXT_KEYS = ("language_model.", "model.language_model.", "lm_head.")


@dataclass(frozen=True)
class _Prepared:
    """What a processor makes of one image, without its arrays.

    Args:
        text: what stands for the image in a prompt.
        tokens: the text's tokens.
        grid: rows and columns of its embeddings, if positions depend on them.
    """

    text: str
    tokens: tuple[int, ...]
    grid: tuple[int, int] | None


class ImageEncoder:
    """Turns images into tokens of a prompt and embeddings of these tokens.

    It may be used from several threads; one that embeds an image does not wait for one
    that prepares another. The processor is loaded with the first image, and the tower
    when the first embeddings are needed.

    Args:
        folder: the target's folder.
        config: its configuration.
        name: its name, for messages.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str):
        self._folder, self.config, self._name = folder, config, name
        self._family = FAMILIES[str(config["model_type"])]
        self._processing, self._embedding = threading.RLock(), threading.RLock()
        self._processor: Any = None
        self._tower: nn.Module | None = None
        #: Outputs of the tower's layers in the forward that is built.
        self._outputs: deque[mx.array] = deque()
        self._prepared = Recent[str, _Prepared](_PREPARED, lambda _: 1)
        #: Arguments of the tower, which may have many times the bytes of an image.
        self._arguments = Recent[str, Mapping[str, Any]](
            _ARGUMENT_BYTES, lambda arrays: sum(_bytes_of(a) for a in arrays.values())
        )
        self._embeddings = Recent[str, mx.array](_KEPT_BYTES, _bytes_of)

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image."""
        return str(getattr(self._loaded_processor(), self._family.marker))

    @property
    def token(self) -> int:
        """The token that stands for one embedding of an image."""
        for key in ("image_token_index", "image_token_id"):
            token = self.config.get(key)
            if isinstance(token, int):
                return token
        return int(self._loaded_processor().image_token_id)

    def text_of(self, image: Image) -> str:
        """What stands for the marker of an image in a prompt.

        Raises:
            PromptError: the processor does not take the image.
        """
        return self._prepared_of(image).text

    def count_of(self, image: Image) -> int:
        """How many tokens of an image are replaced by embeddings.

        Raises:
            PromptError: the processor does not take the image.
        """
        return self._prepared_of(image).tokens.count(self.token)

    def grid_of(self, image: Image) -> tuple[int, int] | None:
        """Rows and columns of an image's embeddings, if its positions depend on them.

        Raises:
            PromptError: the processor does not take the image.
        """
        return self._prepared_of(image).grid

    @property
    def sections(self) -> Sections | None:
        """How rotary embeddings know of rows and columns; ``None``: they do not."""
        return self._family.sections

    @cached_property
    def sees(self) -> Sees:
        """In which layers the tokens of an image see each other both ways."""
        # Small models of Gemma 4 have no such layers.
        text = self.config.get("text_config") or {}
        ways = text.get("use_bidirectional_attention")
        if self._family.sees == "windows" and ways != "vision":
            return "none"
        return self._family.sees

    def load(self) -> None:
        """Load what the first image would load, and compile the tower's kernels.

        Raises: as :meth:`embed`.
        """
        self.embeddings_of(_BLANK)

    def embeddings_of(self, image: Image) -> mx.array:
        """The embeddings of an image, shape (L, N, D), one for each marker token.

        The first (N, D) are inputs of the first layer; others, where the tower has
        them, are added to the outputs of the first layers.

        Raises: as :meth:`embed`.
        """
        for _ in self.embed(image):
            pass
        stored = self._embeddings.get(image.digest)
        assert stored is not None  # the newest is never dropped
        return stored

    def embed(self, image: Image) -> Iterator[None]:
        """Compute what :meth:`embeddings_of` returns, yielding between layers.

        The tower's forward is built at once, and computed layer by layer: other rows
        wait for a tenth of a second, or for one layer if that takes longer.

        Raises:
            ModelError: the folder has no weights of a tower, or others than its
                configuration says.
            PromptError: the tower does not take the image.
        """
        if self._embeddings.get(image.digest) is not None:
            return
        rows, layers = self._built(image)
        start = time.perf_counter()
        while layers:
            mx.eval(layers.popleft())
            if time.perf_counter() - start > PAUSES[1]:
                yield
                start = time.perf_counter()
        mx.eval(rows)
        self._embeddings.put(image.digest, rows)
        self._arguments.pop(image.digest)

    def _built(self, image: Image) -> tuple[mx.array, deque[mx.array]]:
        """An image's embeddings and outputs of the tower's layers, not computed."""
        prepared = self._prepared_of(image)
        arguments = self._arguments.get(image.digest) or self._process(image)[1]
        with self._embedding:
            tower: Any = self._loaded_tower()
            layers: deque[mx.array] = deque()
            self._outputs = layers
            tokens = mx.array([prepared.tokens])
            try:
                embedded = tower.get_input_embeddings(
                    tokens, mask=mx.ones_like(tokens), **arguments
                )
                first: mx.array = embedded.inputs_embeds[0]
                places = np.flatnonzero(np.array(prepared.tokens) == self.token)
                deep = embedded.deepstack_visual_embeds
                deep = () if deep is None else deep
                rows = mx.stack([first[mx.array(places)], *deep])
            except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
                raise self._not_taken(image, error) from error
            finally:
                self._outputs = deque()
        if not self._family.scaled:
            rows = rows / rows.shape[-1] ** 0.5
        return rows, layers

    def _not_taken(self, image: Image, error: Exception) -> PromptError:
        return PromptError(
            f"{self._name} does not take this image of {image.width} x "
            f"{image.height} pixels ({shorten(error)}): send it in another size"
        )

    @cached_property
    def signature(self) -> str:
        """Names the tower's weights, for keys of prefixes; other files change it."""
        status = [(file.name, file.stat()) for file in weight_files(self._folder)]
        shown = [(name, each.st_size, each.st_mtime_ns) for name, each in status]
        settings = sorted(self._folder.glob("*processor_config.json"))
        text = repr(shown) + "".join(file.read_text("utf-8") for file in settings)
        return hashlib.sha256(text.encode()).hexdigest()

    def _prepared_of(self, image: Image) -> _Prepared:
        return self._prepared.get(image.digest) or self._process(image)[0]

    def _process(self, image: Image) -> tuple[_Prepared, Mapping[str, Any]]:
        """What the processor makes of an image, and the arguments of the tower."""
        with self._processing:
            processor = self._loaded_processor()
            tokenizer = processor.tokenizer
            processor.tokenizer = recorder = _Recorder(tokenizer)
            try:
                inputs = processor(
                    images=[_pil(image)], text=[self.marker], add_special_tokens=False
                )
                arrays = {key: _array(value) for key, value in inputs.items()}
            except Exception as error:  # a processor may raise anything
                raise self._not_taken(image, error) from error
            finally:
                processor.tokenizer = tokenizer
            grid = None
            if self.sections is not None:
                _, *sides = np.array(arrays["image_grid_thw"])[0].tolist()
                merged = processor.image_processor.merge_size
                grid = sides[0] // merged, sides[1] // merged
        ids = np.array(arrays.pop("input_ids")).reshape(-1)
        arrays.pop("attention_mask", None)
        prepared = _Prepared(recorder.text, tuple(int(t) for t in ids), grid)
        self._prepared.put(image.digest, prepared)
        self._arguments.put(image.digest, arrays)
        return prepared, arrays

    def _loaded_processor(self) -> Any:
        with self._processing:
            if self._processor is None:
                module = _mlx_vlm(self._family, "processing_")
                kind = getattr(module, self._family.processor)
                try:
                    # mlx-vlm asks the hub for files that are missing, and a relative
                    # folder could be a name there.
                    with _as_before():
                        self._processor = kind.from_pretrained(
                            str(self._folder.absolute()), trust_remote_code=False
                        )
                except Exception as error:  # files may hold anything
                    raise ModelError(
                        f"{self._name}: its image processor cannot be loaded "
                        f"({shorten(error)}): leave images out, or download it again"
                    ) from error
            return self._processor

    def _loaded_tower(self) -> nn.Module:
        if self._tower is None:
            try:
                tower = _load_tower(self._folder, self.config, self._family)
                self._tower = _watched(tower, self._note)
            except ModelError:
                raise
            except Exception as error:  # weights may have any shapes
                raise ModelError(
                    f"{self._name}: its image tower cannot be loaded "
                    f"({shorten(error)}): leave images out, or download it again"
                ) from error
        return self._tower

    def _note(self, usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a layer of the tower, whose output is noted."""
        output = usual(*args, **kwargs)
        if isinstance(output, mx.array):
            self._outputs.append(output)
        return output


def image_encoder(target: LoadedModel) -> ImageEncoder | None:
    """The encoder of a target's images; ``None``: it takes none."""
    config, known = target.config, target.config.get("model_type") in FAMILIES
    if target.folder is None or not known or target.ranks is not None:
        return None
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    return ImageEncoder(target.folder, config, target.name)


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of a target's tower.

    Args:
        held_bytes: its weights, and the embeddings that are kept.
        patches: patches of one embedding, or of each image of a fixed size.
        fixed: whether all images have one size.
        patch_bytes: what a patch takes while one layer is computed.
        pair_bytes: what two patches take, where attention makes a matrix of them.
    """

    held_bytes: int
    patches: int
    fixed: bool
    patch_bytes: int
    pair_bytes: int

    def peak(self, tokens: int) -> int:
        """The most bytes, besides the held ones, for an image of so many tokens."""
        n = self.patches if self.fixed else tokens * self.patches
        return n * (self.patch_bytes + n * self.pair_bytes) if tokens else 0


def tower_memory(target: Described, *, fuses: bool) -> TowerMemory | None:
    """What the tower of a target takes; ``None``: it has none.

    Args:
        fuses: whether attention makes no matrix of all pairs of tokens.
    """
    config, folder = target.config, target.folder
    vision = config.get("vision_config")
    if config.get("model_type") not in FAMILIES or not isinstance(vision, Mapping):
        return None
    if folder is None:
        return None
    weights = [
        array
        for file in folder.glob("*.safetensors")
        for key, array in _lazy(file).items()
        if _TOWER_KEY.search(key)
    ]
    itemsizes = [a.itemsize for a in weights if mx.issubdtype(a.dtype, mx.floating)]
    if not itemsizes:
        return None

    merged = "spatial_merge_size", "downsample_factor", "pooling_kernel_size"
    settings = {key: config[key] for key in merged if key in config} | dict(vision)

    def size(*names: str, default: int = 1) -> int:
        values = map(settings.get, names)
        return next((n for n in values if isinstance(n, int) and n > 0), default)

    patch = size("model_patch_size", "patch_size", default=16)
    # Hidden states and the MLP's, pixels in float32 and cast, and one row of a table
    # of positions, as one-hot codes of two axes.
    hidden = size("embed_dim", "hidden_size", "mm_embed_dim", default=1280)
    columns = 8 * hidden + 8 * size("intermediate_size", default=4 * hidden)
    columns += 6 * patch**2 * size("temporal_patch_size", default=2)
    columns += 2 * size("position_embedding_size", "mm_posemb_size")
    heads = size("num_heads", "num_attention_heads", default=16)
    fixed = FAMILIES[config["model_type"]].sees == "all"
    side = size("image_size") // patch
    masked = config["model_type"] in ("mistral3", "pixtral")
    return TowerMemory(
        held_bytes=sum(a.nbytes for a in weights) + _KEPT_BYTES,
        patches=(side if fixed else size(*merged)) ** 2,
        fixed=fixed,
        # GPUs free arrays late: an H200 took 1.2 to 3 times as much (Qwen3.5-4B).
        patch_bytes=columns * max(itemsizes) * (4 if fuses else 1),
        pair_bytes=max(itemsizes) * ((0 if fuses else 2 * heads) + masked),
    )


def _lazy(file: Path) -> dict[str, mx.array]:
    """A file's arrays, of which only the header is read."""
    arrays: Any = mx.load(str(file))
    return dict(arrays)


def no_images(target: LoadedModel, what: str = "images") -> str:
    """Why a target takes no images, as one line that says to leave ``what`` out."""
    kind = target.config.get("model_type")
    reason = "reads text only"
    if target.ranks is not None:
        reason = "takes no images with tensor parallelism"
    elif target.config.get("vision_config"):
        reason = f"is of type {kind}, whose images are not supported"
    return f"{target.name} {reason}: leave {what} out"


def _load_tower(folder: Path, config: Mapping[str, Any], family: _Family) -> nn.Module:
    """mlx-vlm's model with the weights of all but its text part."""
    module = _mlx_vlm(family)
    utils = import_module("mlx_vlm.utils")
    settings = {"text_config": {}, **config, "audio_config": None}
    model_config = module.ModelConfig.from_dict(settings)
    parts = ["text", "vision", "perceiver", "projector"]
    model_config = utils.update_module_configs(model_config, module, settings, parts)
    model: nn.Module = module.Model(model_config)
    dimension = model_config.text_config.hidden_size
    stored = read_arrays(weight_files(folder), str(folder))
    weights = {k: v for k, v in stored.items() if not k.startswith(_TEXT_KEYS)}
    if not weights:
        raise UnsupportedModelError(
            f"{folder} has no weights of an image tower: take a conversion that has"
        )
    if hasattr(model, "sanitize"):
        weights = module.Model.sanitize(model, weights)
    if hasattr(module, "VisionModel"):
        vision = module.VisionModel(model_config.vision_config)
        if hasattr(vision, "sanitize"):
            weights = vision.sanitize(weights)
    model.language_model = text = _NoText(dimension)
    weights = {k: v for k, v in weights.items() if not k.startswith(_TEXT_KEYS)}
    packed = config.get("quantization")
    if packed:
        nn.quantize(
            model,
            group_size=packed["group_size"],
            bits=packed["bits"],
            mode=packed.get("mode", "affine"),
            class_predicate=lambda path, _: (
                f"{path}.scales" in weights and (packed.get(path) or True)
            ),
        )
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    kinds = {array.dtype for _, array in arrays_of(model)}
    halves = [kind for kind in (mx.bfloat16, mx.float16) if kind in kinds]
    text.kind = halves[0] if halves else mx.float32
    mx.eval(model.parameters())
    return model


def _watched(module: Any, called: Called) -> Any:
    """The module, with another call for all layers that are in lists within it."""
    for name, part in module.children().items():
        for i, each in enumerate(part if isinstance(part, list) else ()):
            if isinstance(each, nn.Module):
                module[name][i] = calling(each, called)
        if isinstance(part, nn.Module):
            _watched(part, called)
    return module


class _NoText(nn.Module):
    """Stands for the text part of mlx-vlm's model: it embeds every token as zero."""

    def __init__(self, dimension: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.dimension = dimension
        # Gemma 4's model asks for these.
        self.embed_scale, self.hidden_size_per_layer_input = 1.0, 0
        #: The type of the embeddings.
        self.kind = mx.float32

    @property
    def model(self) -> _NoText:
        return self

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self.dimension), self.kind)

    def get_rope_index(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None


def _mlx_vlm(family: _Family, prefix: str = "") -> Any:
    """The package of a family in mlx-vlm, or its module with the given prefix."""
    name = f"mlx_vlm.models.{family.module}"
    if prefix:
        package = family.processing or family.module
        name = f"mlx_vlm.models.{package}.{prefix}{package}"
    try:
        with _as_before():
            return import_module(name)
    except ImportError as error:
        raise PromptError(
            f"images need more packages ({shorten(error)}): {install('vision')}"
        ) from error


class _Recorder:
    """A processor's tokenizer that records the text that it is given."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, **options: Any) -> Any:
        (self.text,) = text
        return self._tokenizer(text, **options)


#: Held while mlx-vlm changes what all threads share.
_importing = threading.RLock()


@contextmanager
def _as_before() -> Iterator[None]:
    """Undo what an import of mlx-vlm changes in transformers and the environment.

    It lets ``AutoProcessor`` run a model's own code, and sets how much is logged. One
    thread at a time: another would take the changes for what was there before.
    """
    with _importing:
        yield from _restoring()


def _restoring() -> Iterator[None]:
    environment = dict(os.environ)
    # It advises to install PyTorch.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from transformers import AutoProcessor
    from transformers.utils import logging

    usual, verbosity = vars(AutoProcessor)["from_pretrained"], logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about audio parts, which are left out
            yield
    finally:
        AutoProcessor.from_pretrained = usual
        logging.set_verbosity(verbosity)
        for key in ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
            os.environ.pop(key, None)
            if key in environment:
                os.environ[key] = environment[key]


def _bytes_of(value: Any) -> int:
    return int(getattr(value, "nbytes", 0))


def _pil(image: Image) -> Any:
    import PIL.Image

    return PIL.Image.fromarray(image.pixels)


def _array(value: Any) -> Any:
    if isinstance(value, mx.array) or value is None:
        return value
    if isinstance(value, Sequence) and not value:
        return None
    return mx.array(np.asarray(value))
