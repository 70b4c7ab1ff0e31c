"""Images in prompts: found in messages, decoded within bounds. No mlx here.

Two images are the same exactly if their RGB pixels and sizes are. A file is decoded for
that, and again for the tower, so that images that wait take the bytes of their files.
The decoder sees four still formats only, and looks at an image's size before it decodes
it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from ..utils.extras import install
from ..utils.files import read_plain
from ..utils.printable import quoted, shorten
from ..utils.recent import Recent

if TYPE_CHECKING:
    import numpy as np


#: What is decoded. Other decoders of Pillow have had more defects than users.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
#: The most bytes of a file, and pixels of an image: a photograph has 12 to 48 million.
MAX_BYTES, MAX_PIXELS = 32 * 2**20, 64_000_000
#: The most images of one prompt, and pixels of all of them: 768 MB.
MAX_IMAGES, MAX_ALL_PIXELS = 100, 4 * MAX_PIXELS
#: Bytes of pixels that are kept decoded, of all images together.
MAX_DECODED = 3 * MAX_PIXELS

_SEND = 'send it as a data URL, "data:image/png;base64,..."'
#: Kinds of content that are no images, by OpenAI's and Anthropic's names.
_OTHER_KINDS = {
    "audio": "sounds", "input_audio": "sounds", "video": "videos",
    "video_url": "videos", "input_video": "videos", "file": "files",
    "input_file": "files", "document": "documents",
}  # fmt: skip


@dataclass(frozen=True)
class Image:
    """An image that can be decoded.

    Args:
        width, height: in pixels.
        data: 3 * width * height bytes, row by row; or a smaller file that holds them.
    """

    width: int
    height: int
    data: bytes = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Names the image by its content: 64 hexadecimal digits of SHA-256."""
        head = f"{self.width}x{self.height}:".encode()
        return hashlib.sha256(head + self._rgb).hexdigest()

    @property
    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The pixels, shape (height, width, 3)."""
        import numpy as np

        flat = np.frombuffer(self._rgb, np.uint8)
        return flat.reshape(self.height, self.width, 3)

    @property
    def _rgb(self) -> bytes:
        """The pixels, decoded if they are not among those that were used last."""
        if len(self.data) == 3 * self.width * self.height:
            return self.data
        rgb = _decoded.get(self.data)
        if rgb is None:
            _, _, rgb = _upright(_opened(self.data))
            _decoded.put(self.data, rgb)
        return rgb


#: Pixels of the files that were used last; images that wait keep files alone.
_decoded = Recent[bytes, bytes](MAX_DECODED, len)


@dataclass(frozen=True)
class PlacedImage:
    """An image among the tokens of a prompt.

    Args:
        places: the tokens that its embeddings replace, in order. Marks of rows may lie
            between them.
        grid: rows and columns of its embeddings, if positions depend on them.
    """

    image: Image
    places: tuple[int, ...] = field(repr=False)
    grid: tuple[int, int] | None = None

    @property
    def start(self) -> int:
        """Its first place."""
        return self.places[0]

    @property
    def stop(self) -> int:
        """The token after its last place."""
        return self.places[-1] + 1


def holds_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image.

    Raises:
        PromptError: it is of another kind of media, which the message names.
    """
    kind = part.get("type")
    if isinstance(kind, str) and kind in _OTHER_KINDS:
        raise PromptError(f"{_OTHER_KINDS[kind]} are not supported: leave them out")
    return kind in ("image", "image_url", "input_image")


def image_in(part: Mapping[str, Any]) -> Image:
    """The image of a part of a message for which :func:`holds_image` is true.

    Raises:
        PromptError: see :func:`source_in`; or the image cannot be decoded within the
            bounds.
    """
    source = source_in(part)
    if isinstance(source, Image):
        return source
    return read_file(source) if isinstance(source, str) else read_image(source)


def source_in(part: Mapping[str, Any], *, local: bool = True) -> Any:
    """What :func:`image_in` decodes: an image, bytes, a file's name, an object.

    Takes ``{"type": "image", "image": ...}`` with an :class:`Image`, a file's name,
    bytes, a PIL image or an array of shape (H, W, 3); OpenAI's ``image_url`` and
    ``input_image``, and Anthropic's ``image``, with base64 data.

    Args:
        local: whether names of files, objects of Python and bytes are taken. What
            comes over HTTP may hold none of them.

    Raises:
        PromptError: the part names something that is not taken, such as an address.
    """
    kind = part.get("type")
    if part.get("file_id") is not None:
        raise PromptError(f"an image's file_id is not supported: {_SEND}")
    source = part.get("image_url", part.get("source", part.get("image")))
    if isinstance(source, Image):
        return source
    if isinstance(source, Mapping):  # OpenAI's {"url": ...}, Anthropic's base64
        if source.get("type") == "base64":
            return _from_base64(source.get("data"))
        source = source.get("url", source)
    if isinstance(source, str):
        if source.startswith("data:"):
            return _from_url(source)
        if "://" in source[:12]:
            raise PromptError(f"images are not fetched: {_SEND}")
        if local and kind == "image":
            return source
    elif local and source is not None and not isinstance(source, Mapping):
        return source
    raise PromptError(f"an image is not {quoted(source)}: {_SEND}")


def read_file(name: str | Path) -> Image:
    """The image in a file.

    Raises:
        PromptError: it cannot be read or decoded; the message names it.
    """
    try:
        data = read_plain(Path(name).expanduser(), MAX_BYTES)
    except (OSError, ValueError, RuntimeError) as error:  # "~nobody" has no folder
        reason, remedy = getattr(error, "strerror", None) or error, "name an image"
        if isinstance(error, FileNotFoundError):
            reason, remedy = "no such file", "check the path"
        raise PromptError(f"{shorten(name)}: {shorten(reason)}: {remedy}") from error
    try:
        return read_image(data)
    except PromptError as error:
        raise PromptError(f"{shorten(name)}: {error}") from error


def read_image(source: Any) -> Image:
    """The image in bytes of a file, in a PIL image, or in an array (H, W, 3) of uint8.

    It is turned as its EXIF data says. Transparency is dropped. The image keeps a file
    as it is, unless its pixels are fewer bytes.

    Raises:
        PromptError: it is too large, of another format, animated, or damaged.
    """
    pil, data = _pillow(), None
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        if len(data) > MAX_BYTES:
            raise PromptError(f"it has more than {MAX_BYTES} bytes: make it smaller")
        source = _opened(data)
    elif not isinstance(source, pil.Image.Image):
        import numpy as np

        pixels = np.asarray(source)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise PromptError(
                "an array of pixels is of type uint8 and shape (height, width, 3), not "
                f"{pixels.dtype} and {pixels.shape}"
            )
        height, width, _ = pixels.shape
        _check_size(width, height)
        return Image(width, height, np.ascontiguousarray(pixels).tobytes())
    width, height, rgb = _upright(source)
    if data is None or len(data) >= len(rgb):
        return Image(width, height, rgb)
    _decoded.put(data, rgb)
    image = Image(width, height, data)
    _ = image.digest  # while its pixels are at hand
    return image


def _opened(data: bytes) -> Any:
    """Pillow's image of a file. Only the header is read."""
    try:
        return _pillow().Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # a decoder may raise anything
        raise PromptError(
            f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image that can "
            f"be read ({type(error).__name__}): convert it"
        ) from error


def _upright(source: Any) -> tuple[int, int, bytes]:
    """Width, height and pixels of Pillow's image, turned as its EXIF data says."""
    _check_size(*source.size)
    if getattr(source, "is_animated", False):
        raise PromptError("it is animated: send one of its pictures")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its size, which is checked
            upright = _pillow().ImageOps.exif_transpose(source).convert("RGB")
    except Exception as error:
        raise PromptError(
            f"it is damaged ({type(error).__name__}: {shorten(error)})"
        ) from error
    return (*upright.size, upright.tobytes())


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise PromptError("it has no pixels")
    if width * height > MAX_PIXELS:
        raise PromptError(
            f"it has {width} x {height} pixels, and more than {MAX_PIXELS} are not "
            "decoded: make it smaller"
        )


def _from_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PromptError(f"a data URL of an image has base64 data: {_SEND}")
    return _from_base64(data)


def _from_base64(data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PromptError(f"its base64 data is damaged: {_SEND}") from error


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise PromptError(f"images need more packages: {install('vision')}") from error
    return PIL
