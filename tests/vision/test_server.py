"""Images over HTTP, as the clients of OpenAI and Anthropic send them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import PIL.Image
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder
from tests.server import test_page
from tests.server.harness import Running, running

from .folders import random_image, write_vision_folder

IMAGE = random_image(60, 40)
_file = io.BytesIO()
PIL.Image.fromarray(IMAGE.pixels).save(_file, "PNG")
DATA = base64.b64encode(_file.getvalue()).decode()
URL = f"data:image/png;base64,{DATA}"
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A server, and what Python's API answers about the image."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    write_vision_folder(folder, "qwen2_5_vl")
    decoder = SpecDecoder.from_pretrained(
        str(folder), draft="none", dtype="float32", config=EngineConfig(batch_size=2)
    )
    parts = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "what"}]
    (result,) = decoder.generate(
        [[{"role": "user", "content": parts}]], SamplingParams(max_tokens=MAX_TOKENS)
    )
    with running(decoder) as server:
        yield server, result.text


def test_chat_completions(server: tuple[Running, str]) -> None:
    """The image is lost, or stands behind the text."""
    running, expected = server
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    parts: Any = [
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "text", "text": "what"},
    ]
    made = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": parts}],
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    assert made.choices[0].message.content == expected


def test_responses(server: tuple[Running, str]) -> None:
    """The image is lost, or stands behind the text."""
    running, expected = server
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    parts: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "what"},
    ]
    made = client.responses.create(
        model=client.models.list().data[0].id,
        input=[{"role": "user", "content": parts}],
        max_output_tokens=MAX_TOKENS,
        temperature=0,
    )
    assert made.output_text == expected


def test_messages(server: tuple[Running, str]) -> None:
    """The image is lost, or stands behind the text; or a tool's image is refused."""
    running, expected = server
    client = anthropic.Anthropic(base_url=running.url, api_key="none")
    model = client.models.list().data[0].id
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": DATA},
    }
    turns: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "what"}]}
    ]
    settings: Any = {"model": model, "max_tokens": MAX_TOKENS}
    made = client.messages.create(messages=turns, **settings)
    assert "".join(b.text for b in made.content if b.type == "text") == expected
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with_image = client.messages.create(messages=turns, **settings)
    result["content"] = ""
    without = client.messages.create(messages=turns, **settings)
    assert with_image.usage.input_tokens > without.usage.input_tokens


def test_a_prompt_that_is_too_long_names_the_tokens_of_its_images(
    server: tuple[Running, str],
) -> None:
    """A client that shortens its text shortens what is short already."""
    parts: Any = [{"type": "image_url", "image_url": {"url": URL}}] * 2
    turns: Any = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "x" * 4096}]}
    ]
    message = r"prompt is too long: \d+ tokens > 4096 maximum; \d+ are of images"
    with (
        openai.OpenAI(base_url=f"{server[0].url}/v1", api_key="none") as client,
        pytest.raises(openai.BadRequestError, match=message),
    ):
        client.chat.completions.create(
            model=client.models.list().data[0].id, messages=turns, max_tokens=4
        )


#: A tab of headless Chromium.
browser = test_page.browser


def test_the_page(server: tuple[Running, str], browser: test_page.Browser) -> None:
    """A dropped image is lost, or goes with every message after it."""
    running, expected = server
    browser.call("Page.enable")
    browser.call("Page.navigate", url=running.url)
    browser.until("document.readyState === 'complete' && !!document.title")
    browser.run(f"$('most').value = {MAX_TOKENS}")
    browser.run(
        f"const bytes = Uint8Array.from(atob('{DATA}'), (c) => c.charCodeAt(0));"
        "take([new File([bytes], 'a.png', {type: 'image/png'})])"
    )
    browser.until("$('pictures').children.length === 1")
    browser.run("$('text').value = 'what'; $('ask').requestSubmit()")
    browser.until("messages.length === 2 && !current")
    assert browser.run("messages[1].content") == expected
    assert browser.run("$('pictures').children.length") == 0
    assert browser.run("document.querySelectorAll('article.user img').length") == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "an image is not"),
        ({"type": "image", "image": "/etc/passwd"}, "an image is not"),
        (
            {"type": "image_url", "image_url": {"url": URL[:80]}},
            r"\[0\].content\[0\]",
        ),
        ({"type": "input_audio", "input_audio": {}}, "sounds are not"),
    ],
)
def test_refused(
    server: tuple[Running, str], part: dict[str, Any], message: str
) -> None:
    """The server opens its own files, calls other machines, or answers with 500."""
    turns: Any = [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]
    with (
        openai.OpenAI(base_url=f"{server[0].url}/v1", api_key="none") as client,
        pytest.raises(openai.BadRequestError, match=message),
    ):
        client.chat.completions.create(
            model=client.models.list().data[0].id, messages=turns, max_tokens=4
        )
