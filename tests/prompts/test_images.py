"""Images from messages: forms that clients send, bounds, and what is refused."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from specdec.errors import PromptError
from specdec.prompts import PromptLimit, images
from specdec.prompts.encode import check_messages
from specdec.prompts.images import (
    holds_image,
    image_in,
    read_file,
    read_image,
    source_in,
)
from specdec.server.conversation import content_of
from specdec.server.schema import Notes
from specdec.utils.recent import Recent

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(PIXELS).save(file, kind, **options)
    return file.getvalue()


PNG = encoded()
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "data": DATA}},
        {"type": "image", "image": URL},
        {"type": "image", "image": PIXELS},
        {"type": "image", "image": PNG},
        {"type": "image", "image": PIL.Image.fromarray(PIXELS)},
    ],
)  # fmt: skip
def test_one_image_in_every_form(part: dict[str, Any]) -> None:
    """A client's form gives other pixels, or another name in the prefix cache."""
    assert holds_image(part)
    image = image_in(part)
    assert np.array_equal(image.pixels, PIXELS)
    assert image.digest == read_image(PIXELS).digest


def test_the_name_of_an_image_has_its_size() -> None:
    """4 x 6 and 6 x 4 pixels with the same bytes share keys and values."""
    flat = np.zeros((4, 6, 3), np.uint8)
    assert read_image(flat).digest != read_image(flat.reshape(6, 4, 3)).digest


def test_an_image_is_turned_as_its_camera_says() -> None:
    """A photograph lies on its side."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    image = read_image(encoded("JPEG", exif=exif))
    assert (image.width, image.height) == (20, 30)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, "not fetched"),
        ({"type": "image", "source": {"type": "url", "url": "http://a"}}, "not fetch"),
        ({"type": "image", "image": "ftp://a/b.png"}, "not fetched"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "an image is not"),
        ({"type": "image_url", "image_url": None}, "an image is not None"),
        ({"type": "image", "image": "nothing.png"}, "nothing.png: no such file"),
        ({"type": "image", "image": "~nobody-here/a.png"}, "home directory"),
        ({"type": "image", "image": "/dev/zero"}, "/dev/zero: "),
        ({"type": "image_url", "image_url": "data:image/png,abc"}, "base64"),
        ({"type": "image_url", "image_url": "data:image/png;base64,%%"}, "damaged"),
        ({"type": "image", "source": {"type": "base64", "data": 5}}, "damaged"),
        ({"type": "image", "image": b"GIF89a"}, "convert it"),
        ({"type": "image", "image": PNG[:100]}, "damaged"),
        ({"type": "image", "image": encoded("BMP")}, "convert it"),
        ({"type": "image", "image": np.zeros((2, 2))}, "uint8 and shape"),
        ({"type": "image", "image": np.zeros((0, 2, 3), np.uint8)}, "no pixels"),
        ({"type": "input_audio", "input_audio": {}}, "sounds are not supported"),
        ({"type": "video_url", "video_url": {}}, "videos are not supported"),
    ],
)  # fmt: skip
def test_refused(part: dict[str, Any], message: str) -> None:
    """Something is fetched, opened or decoded that nobody should trust."""
    with pytest.raises(PromptError, match=message):
        _ = holds_image(part) and image_in(part)


def test_http_opens_no_file(tmp_path: Path) -> None:
    """A client reads the server's files."""
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    assert image_in({"type": "image", "image": str(file)}).width == 30
    assert read_file(file).digest == read_image(PIXELS).digest
    for value in (str(file), PNG, PIXELS):
        with pytest.raises(PromptError, match="an image is not"):
            source_in({"type": "image", "image": value}, local=False)


def test_a_bomb_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few bytes takes gigabytes."""
    file = io.BytesIO()
    PIL.Image.new("1", (9000, 9000)).save(file, "PNG")
    monkeypatch.setattr(PIL.Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(PromptError, match="9000 x 9000 pixels"):
        read_image(file.getvalue())
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(PromptError, match="more than 100 bytes"):
        read_image(PNG)


def test_an_image_that_waits_takes_the_bytes_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue of requests holds 192 MB for each file of a few kilobytes."""
    decoded = Recent[bytes, bytes](3 * 300 * 300, len)
    monkeypatch.setattr(images, "_decoded", decoded)
    flat = [np.full((300, 300, 3), level, np.uint8) for level in range(4)]
    read = []
    for pixels in flat:
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG")
        read.append(read_image(file.getvalue()))
        assert read[-1].data == file.getvalue()
        assert len(decoded._values) == 1
    for image, pixels in zip(read, flat, strict=True):
        assert np.array_equal(image.pixels, pixels)
        assert image.digest == read_image(pixels).digest


def test_an_animation_is_refused() -> None:
    """One picture of several is taken, and nobody knows which."""
    file = io.BytesIO()
    frames = [PIL.Image.fromarray(PIXELS + i) for i in range(2)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(PromptError, match="animated"):
        read_image(file.getvalue())


def test_a_request_is_parsed_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop decodes images, and answers nobody meanwhile."""
    monkeypatch.setattr(images, "read_image", lambda _: pytest.fail("decoded"))
    part = {"type": "image_url", "image_url": {"url": URL}}
    content = content_of([part], "content", Notes())
    assert content == [{"type": "image", "image": PNG}]
    with pytest.raises(PromptError, match="not supported"):
        check_messages([{"role": "user", "content": content}], PromptLimit(), [])


def test_all_images_of_a_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred images within their bounds take 19 GB."""
    limit: Any = PromptLimit(images=object())  # type: ignore[arg-type]
    part = {"type": "image", "image": PIXELS}
    module = sys.modules[check_messages.__module__]
    monkeypatch.setattr(module, "MAX_ALL_PIXELS", 2 * 600)
    for count in (2, 3):
        messages = [{"role": "user", "content": [part] * count}]
        if count == 2:
            check_messages(messages, limit, [])
            continue
        with pytest.raises(PromptError, match="more than 1200 pixels"):
            check_messages(messages, limit, [])
    damaged = [part, {"type": "image", "image": PNG[:100]}]
    with pytest.raises(PromptError, match="image 2: it is damaged"):
        check_messages([{"role": "user", "content": damaged}], limit, [])
