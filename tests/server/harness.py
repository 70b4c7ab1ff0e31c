"""A server on loopback with a tiny model, and a tokenizer with tools and thoughts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from specdec import EngineConfig, Grammar, SamplingParams, SpecDecoder
from specdec.models import LoadedModel
from specdec.models.tokenizer import ExactTokenizerWrapper
from specdec.outputs import EngineLoad, GenerationResult, RunStats, StreamEvent
from specdec.prompts import EncodedPrompt
from specdec.server.app import make_app
from specdec.server.config import ServerConfig
from specdec.server.service import Service
from tests.conftest import _tiny_model
from tests.models.folders import tokenizer_of
from tests.models.gguf_files import VOCAB, byte_level

MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_suffix|>", "<|fim_middle|>",
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>{"name": {{ tool_call.name | tojson }}, '
    '"arguments": {{ tool_call.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if think %}<think>\n{% endif %}{% endif %}"
)


def tokenizer(
    folder: Path,
    template: str = TEMPLATE,
    *,
    marked: bool = True,
    parser: str | None = "json_tools",
) -> Any:
    """Byte-level; with marks for thoughts, tools and gaps.

    Args:
        parser: mlx-lm's parser of tool calls; ``None``: mlx-lm has none.
    """
    vocabulary = byte_level(**{"tokenizer.chat_template": template})
    at = next(
        i for i, token in enumerate(vocabulary.tokens) if token.startswith("[PAD")
    )
    module = import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    ends = (module.tool_call_start, module.tool_call_end) if module else ()
    for i, mark in enumerate(dict.fromkeys((*MARKS, *filter(None, ends)))):
        if mark not in vocabulary.tokens:
            vocabulary.tokens[at + i], vocabulary.types[at + i] = mark, 4
    if not marked:
        return tokenizer_of(folder, byte_level(**{"tokenizer.chat_template": template}))
    wrapper = tokenizer_of(folder, vocabulary)
    return ExactTokenizerWrapper(
        wrapper._tokenizer,
        eos_token_ids=list(wrapper.eos_token_ids),
        tool_call_start=module and module.tool_call_start,
        tool_call_end=module and module.tool_call_end,
        tool_parser=module and module.parse_tool_call,
    )


def tiny_decoder(
    folder: Path,
    *,
    template: str = TEMPLATE,
    marked: bool = True,
    parser: str | None = "json_tools",
    context: int = 4096,
    **config: Any,
) -> SpecDecoder:
    """A random target with a smaller draft."""
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_draft_tokens": 2,
        "prefill_step_size": 64,
        "prefix_cache_memory": 10**8,
        **config,
    }
    words = tokenizer(folder, template, marked=marked, parser=parser)
    model_config = {"max_position_embeddings": context}
    target = _tiny_model("llama", vocab_size=VOCAB)
    draft = _tiny_model("llama", seed=5, num_hidden_layers=1, vocab_size=VOCAB)
    return SpecDecoder(
        LoadedModel(target, words, model_config, "tiny"),
        LoadedModel(draft, words, model_config, "draft"),
        config=EngineConfig(**options),
    )


class Scripted:
    """Stands for a decoder whose answers are given: what a client makes of them counts.

    Args:
        decoder: encodes, and checks.
        answer: of every prompt's text.
        pause: seconds before an answer begins.

    Attributes:
        reason: how answers end that no stop text ends.
        size: characters of each piece of an answer.
    """

    def __init__(
        self, decoder: SpecDecoder, answer: Callable[[str], str], pause: float = 0.0
    ):
        self._decoder = decoder
        self.answer = answer
        self.pause = pause
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Scripted]:
        yield self

    reason: Any = "stop"
    size = 3
    stats = RunStats()
    load = EngineLoad()
    failure = None

    async def aclose(self) -> None:
        pass

    async def tokenize(self, work: Callable[[], Any]) -> Any:
        return work()

    async def compile(self, grammar: Grammar) -> None:
        pass

    async def stream(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        timeout: float,
        checked: bool = False,
    ) -> AsyncGenerator[StreamEvent, None]:
        self.prompts.append(prompt.text)
        self.params.append(params)
        text, matched = self.answer(prompt.text), None
        for stop in params.stop:
            if stop in text:
                text, matched = text[: text.index(stop)], stop
        result = GenerationResult(
            index=0,
            prompt=prompt.text,
            text=text,
            token_ids=list(range(len(text))),
            finish_reason="stop" if matched is not None else self.reason,
            stop_reason=matched,
            prompt_tokens=len(prompt.token_ids),
            prefix_tokens=3,
            rounds=2,
            drafted=5,
            accepted=4,
        )
        await asyncio.sleep(self.pause)
        for i in range(0, len(text), self.size):
            yield StreamEvent(index=0, text=text[i : i + self.size], token_ids=[1])
        yield StreamEvent(index=0, text="", token_ids=[], result=result)


class Running:
    """A server in a thread: ``url`` is its address."""

    def __init__(self, app: Starlette):
        self.app = app
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, ws="none", lifespan="on"
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(serve())

    def start(self) -> None:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service


@contextmanager
def running(decoder: Any, **options: Any) -> Iterator[Running]:
    """A server on a free port of loopback, until the block ends."""
    config = replace(ServerConfig(temperature=0.0, max_tokens=24), **options)
    server = Running(make_app(decoder, config))
    server.start()
    try:
        yield server
    finally:
        server.stop()


USER = {"role": "user", "content": "Hello there"}
#: A sound request of each endpoint.
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER], "max_tokens": 4},
    "completions": {"prompt": "Hello", "max_tokens": 4},
    "responses": {"input": "Hello", "max_output_tokens": 4},
    "messages": {"model": "tiny", "messages": [USER], "max_tokens": 4},
}


def post(
    server: Running, path: str, headers: Any = None, **more: Any
) -> httpx.Response:
    """Send that request, with some fields of its own."""
    url = f"{server.url}/v1/{path}"
    return httpx.post(url, json={**BODIES[path], **more}, headers=headers, timeout=60)


def until(condition: Callable[[], bool], seconds: float = 150) -> None:
    """Wait for what comes without being asked for."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
