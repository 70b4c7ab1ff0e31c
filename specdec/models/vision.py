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
import warnings
from collections import OrderedDict
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
from .folder import read_arrays, weight_files
from .image_rows import Sections, Sees
from .layers import arrays_of
from .loaded import Described, LoadedModel


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
_FAMILIES = {
    "mistral3": _Family("mistral3", "Mistral3Processor"),
    "pixtral": _Family("pixtral", "PixtralProcessor"),
    "lfm2_vl": _Family("lfm2_vl", "Lfm2VlProcessor"),
    "lfm2-vl": _Family("lfm2_vl", "Lfm2VlProcessor"),
    "gemma3": _Family("gemma3", "Gemma3Processor", marker="boi_token", sees="all"),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(
        _GEMMA4, module="gemma4_unified", processor="Gemma4UnifiedProcessor"
    ),
    "qwen2_5_vl": _Family("qwen2_5_vl", "Qwen2_5_VLProcessor", sections="chunked"),
    "qwen3_vl": replace(_QWEN3_5, module="qwen3_vl"),
    "qwen3_vl_moe": replace(_QWEN3_5, module="qwen3_vl_moe"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, module="qwen3_5_moe"),
}
#: Bytes of embeddings that are kept for the next prompt with the same image.
_KEPT_BYTES = 64 * 2**20
#: Keys of a checkpoint that belong to the tower and the projector.
_TOWER_KEY = re.compile("vision|visual|projector")
#: Keys of a checkpoint that belong to the text part.
_TEXT_KEYS = ("language_model.", "model.language_model.", "lm_head.")


@dataclass(frozen=True)
class _Inputs:
    """What a processor makes of one image.

    Args:
        text: what stands for the image in a prompt.
        tokens: the text's tokens.
        arrays: the arguments of the tower.
    """

    text: str
    tokens: tuple[int, ...]
    arrays: Mapping[str, Any]


class ImageEncoder:
    """Turns images into tokens of a prompt and embeddings of these tokens.

    It may be used from several threads. The processor is loaded with the first image,
    and the tower when the first embeddings are needed.

    Args:
        folder: the target's folder.
        config: its configuration.
        name: its name, for messages.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str):
        self._folder, self.config, self._name = folder, config, name
        self._family = _FAMILIES[str(config["model_type"])]
        self._lock = threading.RLock()
        self._processor: Any = None
        self._tower: nn.Module | None = None
        self._inputs: OrderedDict[str, _Inputs] = OrderedDict()
        self._embeddings: OrderedDict[str, mx.array] = OrderedDict()

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image."""
        with self._lock:
            return str(getattr(self._loaded_processor(), self._family.marker))

    @property
    def token(self) -> int:
        """The token that stands for one embedding of an image."""
        for key in ("image_token_index", "image_token_id"):
            token = self.config.get(key)
            if isinstance(token, int):
                return token
        with self._lock:
            return int(self._loaded_processor().image_token_id)

    def text_of(self, image: Image) -> str:
        """What stands for the marker of an image in a prompt.

        Raises:
            PromptError: the processor does not take the image.
        """
        with self._lock:
            return self._inputs_of(image).text

    def count_of(self, image: Image) -> int:
        """How many tokens of an image are replaced by embeddings.

        Raises:
            PromptError: the processor does not take the image.
        """
        with self._lock:
            return self._inputs_of(image).tokens.count(self.token)

    def grid_of(self, image: Image) -> tuple[int, int] | None:
        """Rows and columns of an image's embeddings, if its positions depend on them.

        Raises:
            PromptError: the processor does not take the image.
        """
        if self.sections is None:
            return None
        with self._lock:
            inputs = self._inputs_of(image)
            _, height, width = np.array(inputs.arrays["image_grid_thw"])[0].tolist()
            merged = self._loaded_processor().image_processor.merge_size
            return height // merged, width // merged

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

    def embeddings_of(self, image: Image) -> mx.array:
        """The embeddings of an image, shape (L, N, D), one for each marker token.

        The first (N, D) are inputs of the first layer; others, where the tower has
        them, are added to the outputs of the first layers.

        Raises:
            ModelError: the folder has no weights of a tower, or others than its
                configuration says.
            PromptError: the tower does not take the image.
        """
        with self._lock:
            stored = self._embeddings.get(image.digest)
            if stored is not None:
                self._embeddings.move_to_end(image.digest)
                return stored
            inputs = self._inputs_of(image)
            tower: Any = self._loaded_tower()
            tokens = mx.array([inputs.tokens])
            try:
                mask = mx.ones_like(tokens)
                embedded = tower.get_input_embeddings(
                    tokens, mask=mask, **inputs.arrays
                )
                first: mx.array = embedded.inputs_embeds[0]
                places = np.flatnonzero(np.array(inputs.tokens) == self.token)
                deep = embedded.deepstack_visual_embeds
                deep = () if deep is None else deep
                rows = mx.stack([first[mx.array(places)], *deep])
                if not self._family.scaled:
                    rows = rows / rows.shape[-1] ** 0.5
                mx.eval(rows)
            except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
                raise self._not_taken(image, error) from error
            self._embeddings[image.digest] = rows
            del self._inputs[image.digest]
            while len(self._embeddings) > 1 and self._bytes() > _KEPT_BYTES:
                self._embeddings.popitem(last=False)
            return rows

    def _not_taken(self, image: Image, error: Exception) -> PromptError:
        return PromptError(
            f"{self._name} does not take this image of {image.width} x "
            f"{image.height} pixels ({shorten(error)}): send it in another size"
        )

    def _bytes(self) -> int:
        return sum(rows.nbytes for rows in self._embeddings.values())

    @cached_property
    def signature(self) -> str:
        """Names the tower's weights, for keys of prefixes; other files change it."""
        status = [(file.name, file.stat()) for file in weight_files(self._folder)]
        shown = [(name, each.st_size, each.st_mtime_ns) for name, each in status]
        settings = sorted(self._folder.glob("*processor_config.json"))
        text = repr(shown) + "".join(file.read_text("utf-8") for file in settings)
        return hashlib.sha256(text.encode()).hexdigest()

    def _inputs_of(self, image: Image) -> _Inputs:
        stored = self._inputs.get(image.digest)
        if stored is not None:
            return stored
        processor = self._loaded_processor()
        tokenizer = processor.tokenizer
        processor.tokenizer = recorder = _Recorder(tokenizer)
        try:
            inputs = processor(
                images=[_pil(image)], text=[self.marker], add_special_tokens=False
            )
        except Exception as error:  # a processor may raise anything
            raise self._not_taken(image, error) from error
        finally:
            processor.tokenizer = tokenizer
        arrays = {key: _array(value) for key, value in inputs.items()}
        tokens = tuple(int(t) for t in np.array(arrays.pop("input_ids")).reshape(-1))
        arrays.pop("attention_mask", None)
        inputs = _Inputs(recorder.text, tokens, arrays)
        self._inputs[image.digest] = inputs
        while len(self._inputs) > 64:  # prompts that were refused or are restored
            self._inputs.popitem(last=False)
        return inputs

    def _loaded_processor(self) -> Any:
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
                self._tower = _load_tower(self._folder, self.config, self._family)
            except ModelError:
                raise
            except Exception as error:  # weights may have any shapes
                raise ModelError(
                    f"{self._name}: its image tower cannot be loaded "
                    f"({shorten(error)}): leave images out, or download it again"
                ) from error
        return self._tower


def image_encoder(target: LoadedModel) -> ImageEncoder | None:
    """The encoder of a target's images; ``None``: it takes none."""
    config, known = target.config, target.config.get("model_type") in _FAMILIES
    if target.folder is None or not known or target.ranks is not None:
        return None
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    return ImageEncoder(target.folder, config, target.name)


def image_bytes(target: Described) -> int:
    """Bytes of a target's tower and of the embeddings that are kept; 0: it has none.

    Activations of the tower are not counted.
    """
    folder = getattr(target, "folder", None)
    if folder is None or target.config.get("model_type") not in _FAMILIES:
        return 0
    if not isinstance(target.config.get("vision_config"), Mapping):
        return 0
    total = 0
    for file in folder.glob("*.safetensors"):
        stored: Any = mx.load(str(file))  # lazy: only the header is read
        total += sum(a.nbytes for key, a in stored.items() if _TOWER_KEY.search(key))
    return total + _KEPT_BYTES if total else 0


def no_images(target: LoadedModel) -> str:
    """Why a target takes no images, as one line."""
    kind = target.config.get("model_type")
    reason = "reads text only"
    if target.ranks is not None:
        reason = "takes no images with tensor parallelism"
    elif target.config.get("vision_config"):
        reason = f"is of type {kind}, whose images are not supported"
    return f"{target.name} {reason}: leave images out"


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
            warnings.simplefilter("ignore")  # about parts that hear
            yield
    finally:
        AutoProcessor.from_pretrained = usual
        logging.set_verbosity(verbosity)
        for key in ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
            os.environ.pop(key, None)
            if key in environment:
                os.environ[key] = environment[key]


def _pil(image: Image) -> Any:
    import PIL.Image

    return PIL.Image.fromarray(image.pixels)


def _array(value: Any) -> Any:
    if isinstance(value, mx.array) or value is None:
        return value
    if isinstance(value, Sequence) and not value:
        return None
    return mx.array(np.asarray(value))
