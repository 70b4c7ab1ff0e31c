"""OpenAI's own client, and LangChain's, against a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec import SamplingParams, SpecDecoder
from tests.server.harness import Running, running, tiny_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpecDecoder:
    return tiny_decoder(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(decoder: SpecDecoder) -> Iterator[Running]:
    with running(decoder) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="x", max_retries=0
    ) as made:
        yield made


MESSAGES: Any = [{"role": "user", "content": "Name a river."}]


def test_chat_is_what_generate_gives(
    decoder: SpecDecoder, client: openai.OpenAI
) -> None:
    """A lost piece, a wrong prompt or other sampling would show; so would usage."""
    for more in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        params: Any = {**more, "max_tokens": 20}
        (expected,) = decoder.generate([MESSAGES], SamplingParams(**params))
        made = client.chat.completions.create(
            model="tiny", messages=MESSAGES, **params
        )
        (choice,) = made.choices
        assert choice.message.content == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert made.usage is not None
        assert made.usage.prompt_tokens == expected.prompt_tokens
        assert made.usage.completion_tokens == expected.generated_tokens
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                **params,
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected.text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == expected.finish_reason
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == expected.generated_tokens
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens
