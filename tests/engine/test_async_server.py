"""The asyncio server: every request as if it were alone, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import (
    ConfigError,
    EngineConfig,
    GenerationResult,
    PromptError,
    SamplingParams,
    ServerError,
    SpecDecoder,
)
from specdec.engine.async_server import Server
from specdec.models import LoadedModel
from specdec.models.runner import ModelRows
from tests.test_decoder import loaded

VOCAB = 97


@pytest.fixture(scope="module")
def decoder(tiny_model: Callable[..., Any]) -> SpecDecoder:
    draft = tiny_model("llama", seed=5, num_hidden_layers=1)
    return SpecDecoder(
        loaded(tiny_model("llama", seed=0)),
        loaded(draft, "draft"),
        config=EngineConfig(batch_size=4, num_draft_tokens=2, prefill_step_size=16),
    )


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Waiting:
    """A decoder whose tokenizer waits until it is released."""

    def __init__(self, model: LoadedModel):
        self.entered, self.released = threading.Event(), threading.Event()
        self.threads, self.texts = set[str](), list[str]()
        this = self

        class Tokenizer(type(model.tokenizer)):  # type: ignore[misc]
            def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
                this.threads.add(threading.current_thread().name)
                this.texts.append(text)
                this.entered.set()
                assert this.released.wait(timeout=60)
                return [7] * len(text)

        model.tokenizer.__class__ = Tokenizer
        self.decoder = SpecDecoder(model)


@pytest.fixture
def waiting(tiny_model: Callable[..., Any]) -> Iterator[Waiting]:
    waiting = Waiting(loaded(tiny_model("llama", seed=0)))
    yield waiting
    waiting.released.set()


def requests(n: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 40)))],
            SamplingParams(
                max_tokens=rng.choice((1, 5, 30)),
                temperature=rng.choice((0.0, 1.0)),
                seed=i,
                stop=rng.choice(((), ("7,",), ("1,2", "9"))),
                num_draft_tokens=rng.choice((None, 0, 1)),
            ),
        )
        for i in range(n)
    ]


def alone(
    decoder: SpecDecoder, prompt: list[int], params: SamplingParams
) -> GenerationResult:
    return decoder.generate([prompt], params)[0]


def assert_same(result: GenerationResult, expected: GenerationResult) -> None:
    """All but what a draft's rounds depend on."""
    result = replace(
        result,
        index=expected.index,
        rounds=expected.rounds,
        drafted=expected.drafted,
        accepted=expected.accepted,
        num_draft_tokens_per_pos=expected.num_draft_tokens_per_pos,
        num_accepted_tokens_per_pos=expected.num_accepted_tokens_per_pos,
    )
    assert result == expected


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def all_server_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "specdec server"}


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have servers of their own."""
    monkeypatch.setattr(sys.modules[__name__], "OTHERS", all_server_threads())


OTHERS: set[threading.Thread] = set()


def server_threads() -> list[str]:
    return [t.name for t in all_server_threads() - OTHERS]


@in_loop
async def test_many_clients_each_get_what_they_get_alone(decoder: SpecDecoder) -> None:
    work = requests(30, seed=0)

    async def client(
        server: Server, i: int, prompt: list[int], params: SamplingParams
    ) -> GenerationResult:
        await asyncio.sleep(random.Random(i).random() * 0.3)
        if i % 2:
            return await server.generate(prompt, params)
        text, tokens, result = "", list[int](), None
        async for event in server.stream(prompt, params):
            assert result is None, "nothing may follow a result"
            text, result = text + event.text, event.result
            tokens += event.token_ids
        assert result is not None
        assert (text, tokens) == (result.text, result.token_ids)
        return result

    async with decoder.serve() as server:
        clients = [client(server, i, *w) for i, w in enumerate(work)]
        results = await asyncio.gather(*clients)
        assert server.pending == 0
        assert server.stats.prompts == len(work)
        generated = sum(r.generated_tokens for r in results)
        assert server.stats.generated_tokens == generated
    for result, (prompt, params) in zip(results, work, strict=True):
        assert_same(result, alone(decoder, prompt, params))
    assert server_threads() == []


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_cancellations_at_any_time_harm_nobody(
    decoder: SpecDecoder, seed: int
) -> None:
    """A third leaves after some events, a third is cancelled after some time."""
    work = requests(30, seed=seed)
    rng = random.Random(seed)

    async def leave(server: Server, n: int, *request: Any) -> list[int]:
        tokens: list[int] = []
        async with aclosing(server.stream(*request)) as events:
            async for event in events:
                tokens += event.token_ids
                n -= 1
                if n <= 0:
                    break
        return tokens

    async with decoder.serve() as server:
        stay = [asyncio.create_task(server.generate(*work[i])) for i in range(0, 30, 3)]
        left = [
            asyncio.create_task(leave(server, rng.randrange(1, 6), *work[i]))
            for i in range(1, 30, 3)
        ]
        cancelled = [
            asyncio.create_task(server.generate(*work[i])) for i in range(2, 30, 3)
        ]
        for task in cancelled:
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        await asyncio.wait([*stay, *left, *cancelled])
        assert server.pending == 0
        # Who left before the prompt was tokenized never had a row.
        worker = server._worker
        assert worker is not None
        await until(lambda: not worker._requests)
        assert len(stay) + len(left) <= server.stats.prompts <= len(work)
        for i, whole in zip(range(0, 30, 3), stay, strict=True):
            assert_same(whole.result(), alone(decoder, *work[i]))
        for i, part in zip(range(1, 30, 3), left, strict=True):
            expected = alone(decoder, *work[i]).token_ids
            assert expected[: len(part.result())] == part.result()
        for task in cancelled:
            assert task.cancelled() or task.result() is not None


@in_loop
async def test_leaving_the_loop_cancels_the_row(decoder: SpecDecoder) -> None:
    """Without aclosing too, as soon as nobody holds the generator."""
    async with decoder.serve() as server:
        async for event in server.stream([1, 2], SamplingParams(max_tokens=4000)):
            if event.token_ids:
                break
        await until(lambda: server.stats.prompts == 1)
        assert server.stats.generated_tokens < 4000
        # A generator that nobody asked anything never was a request.
        server.stream([1, 2])
        result = await server.generate([3], SamplingParams(max_tokens=2))
        assert result.generated_tokens == 2
        assert server.stats.prompts == 2


@in_loop
async def test_closing_while_busy_ends_every_request(decoder: SpecDecoder) -> None:
    """Rows that run, wait, or were just asked for: each gets a cancelled result."""
    async with decoder.serve() as server:
        endless = SamplingParams(max_tokens=4000)
        tasks = [
            asyncio.create_task(server.generate([i, 1], endless)) for i in range(9)
        ]
        await until(lambda: server.stats.generated_tokens > 20)
        tasks.append(asyncio.create_task(server.generate([50], endless)))
        await asyncio.sleep(0)
    assert server.pending == 0
    with pytest.raises(ServerError, match="closed"):
        await server.generate([1])
    await server.aclose()
    results = await asyncio.gather(*tasks)
    assert {r.finish_reason for r in results} == {"cancelled"}
    assert sum(bool(r.token_ids) for r in results) == 4
    for result in results:
        params = SamplingParams(max_tokens=max(1, len(result.token_ids)))
        expected = alone(decoder, [result.index, 1], params).token_ids
        assert expected[: len(result.token_ids)] == result.token_ids
    assert server_threads() == []


@in_loop
async def test_a_request_that_cannot_be_is_the_callers_loss_alone(
    decoder: SpecDecoder,
) -> None:
    async with decoder.serve() as server:
        good = asyncio.create_task(
            server.generate([1, 2, 3], SamplingParams(max_tokens=30))
        )
        with pytest.raises(PromptError, match="empty"):
            await server.generate([])
        with pytest.raises(ConfigError, match="stop_token_ids names token 97"):
            await server.generate([1], SamplingParams(stop_token_ids=(97,)))
        with pytest.raises(PromptError, match="empty"):
            async for _ in server.stream(""):
                pass
        assert (await good).finish_reason == "length"
        assert server.pending == 0


@in_loop
async def test_an_engine_that_fails_fails_all_and_says_so(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error as the cause, and without keeping the caches alive."""

    class Failing:
        """A model that fails at its n-th forward."""

        def __init__(self, model: Any):
            self.model, self.left = model, 10**9

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("the device is gone")
            return self.model(*args, **options)

    failing = Failing(tiny_model("llama", seed=0))
    decoder = SpecDecoder(loaded(failing), config=EngineConfig(batch_size=2))
    caches: weakref.WeakSet[Any] = weakref.WeakSet()
    begin = ModelRows.__init__

    def noted(self: Any, *args: Any, **options: Any) -> None:
        caches.add(self)
        begin(self, *args, **options)

    monkeypatch.setattr(ModelRows, "__init__", noted)
    async with decoder.serve() as server:
        failing.left = 20
        tasks = [
            asyncio.create_task(server.generate([i], SamplingParams(max_tokens=99)))
            for i in range(5)
        ]
        await asyncio.wait(tasks)
        for task in tasks:
            error = task.exception()
            assert isinstance(error, ServerError)
            assert str(error) == (
                "the server is broken: its engine failed with "
                "RuntimeError: the device is gone"
            )
            assert isinstance(error.__cause__, RuntimeError)
        with pytest.raises(ServerError, match="broken"):
            await server.generate([1])
        assert server.pending == 0
        await until(lambda: server_threads() == [])
        gc.collect()
        assert list(caches) == []


@in_loop
async def test_a_server_must_be_open_and_is_entered_once(decoder: SpecDecoder) -> None:
    server = decoder.serve()
    with pytest.raises(ServerError, match="not open yet: use `async with`"):
        await server.generate([1])
    await server.aclose()
    async with server:
        with pytest.raises(ServerError, match="entered once"):
            await server.__aenter__()
    with pytest.raises(ServerError, match="entered once"):
        async with server:
            pass


@in_loop
async def test_it_sleeps_when_idle(decoder: SpecDecoder) -> None:
    """No step is taken while there is nothing to do."""
    steps = []

    @contextmanager
    def counted() -> Any:
        session = decoder.session()
        step = session.step
        session.step = lambda: steps.append(1) or step()  # type: ignore[method-assign,func-returns-value]
        yield session

    async with Server(counted, decoder._encode) as server:
        await server.generate([1, 2], SamplingParams(max_tokens=3))
        before = len(steps)
        await asyncio.sleep(0.1)
        assert len(steps) == before
        await server.generate([1, 2], SamplingParams(max_tokens=3))
        assert len(steps) > before


@in_loop
async def test_the_event_loop_runs_while_the_engine_works(decoder: SpecDecoder) -> None:
    """A processor waits for what only the loop can give: both go on."""
    threads: set[str] = set()
    entered, released = threading.Event(), threading.Event()

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        threads.add(threading.current_thread().name)
        entered.set()
        assert released.wait(timeout=60)
        return logits

    async with decoder.serve() as server:
        params = SamplingParams(max_tokens=10, logits_processors=(process,))
        task = asyncio.create_task(server.generate([1], params))
        await until(entered.is_set)
        released.set()
        assert (await task).finish_reason == "length"
    assert threads == {"specdec server"}


@in_loop
async def test_arrays_that_a_model_made_lazily(tiny_model: Callable[..., Any]) -> None:
    """Frequencies of these position embeddings are no parameters to mlx-lm.

    An array that is not evaluated belongs to the thread that made it.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    decoder = SpecDecoder(loaded(tiny_model("llama", rope_scaling=scaling)))
    params = SamplingParams(max_tokens=8)
    async with decoder.serve() as server:
        result = await server.generate([1, 2, 3], params)
    assert_same(result, alone(decoder, [1, 2, 3], params))


@in_loop
async def test_memory_returns(decoder: SpecDecoder) -> None:
    async def run() -> int:
        async with decoder.serve() as server:
            params = SamplingParams(max_tokens=40)
            tasks = [
                asyncio.create_task(server.generate([i], params)) for i in range(8)
            ]
            await asyncio.wait(tasks[:2])
            for task in tasks[4:]:
                task.cancel()
            await asyncio.wait(tasks)
        del tasks, task
        gc.collect()
        return mx.get_active_memory()

    # MLX's queue may hold a scalar until its next task; a row's caches are more.
    assert abs(await run() - await run()) < 64


def test_the_example_of_the_docstring(tiny_model: Callable[..., Any]) -> None:
    """It is executed as it stands, with a tokenizer that knows its letters."""
    model = loaded(tiny_model("llama", seed=0))
    model.tokenizer.vocabulary.update({chr(i): i - 32 for i in range(32, 127)})
    doc = inspect.getdoc(Server) or ""
    example = doc.partition("::\n\n")[2].partition("\n\nTo be used")[0]
    code = f"async def example():\n{example}\n    return results"
    names: dict[str, Any] = {
        "asyncio": asyncio,
        "SamplingParams": SamplingParams,
        "decoder": SpecDecoder(model),
    }
    exec(code, names)
    results = asyncio.run(names["example"]())
    assert [r.finish_reason for r in results] == ["length", "length"]


def test_the_example_of_the_page(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program of docs/serving.md, as it stands."""
    model = loaded(tiny_model("llama", seed=0))
    model.tokenizer.vocabulary.update({chr(i): i - 32 for i in range(32, 127)})
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda: SpecDecoder(model))
    page = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
    program = page.read_text("utf-8").split("```python\n")[1].split("```")[0]
    exec(program, {})
    result, streamed = capsys.readouterr().out.splitlines()
    assert result.endswith(", length")
    assert streamed.count(",") == 16


# -- requests that would harm others ---------------------------------------


@pytest.mark.parametrize(
    "error", [SystemExit(), KeyboardInterrupt(), GeneratorExit(), RuntimeError()]
)
@in_loop
async def test_what_a_processor_raises_does_not_break_the_server(
    decoder: SpecDecoder, error: BaseException
) -> None:
    """SystemExit ended the thread; KeyboardInterrupt is no Ctrl-C there."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        raise error

    async with decoder.serve() as server:
        good = SamplingParams(max_tokens=30)
        beside = asyncio.create_task(server.generate([1, 2], good))
        bad = SamplingParams(logits_processors=(process,))
        failed = await server.generate([3], bad)
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert failed.error.endswith(f"at token 0: {type(error).__name__}")
        assert_same(await beside, alone(decoder, [1, 2], good))
        assert_same(await server.generate([4], good), alone(decoder, [4], good))


@in_loop
async def test_a_lazy_error_of_a_processor_is_its_rows_own_loss(
    decoder: SpecDecoder,
) -> None:
    """What it returns may fail only when it is computed, after the sampler's call."""
    theirs = mx.arange(VOCAB) * 2.0  # not evaluated: it belongs to this thread

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + theirs

    async with decoder.serve() as server:
        params = SamplingParams(
            logits_processors=(process,), sampler=lambda logprobs: mx.array(3)
        )
        failed = await server.generate([3], params)
        assert failed.finish_reason == "error"
        good = SamplingParams(max_tokens=5)
        assert_same(await server.generate([4], good), alone(decoder, [4], good))


@in_loop
async def test_rows_go_on_while_a_prompt_is_tokenized(waiting: Waiting) -> None:
    """The tokenizer waits for tokens of the row beside it: in its thread, for ever."""
    async with waiting.decoder.serve() as server:
        row = server.stream([1, 2], SamplingParams(max_tokens=3000))
        while not (await anext(row)).token_ids:
            pass
        params = SamplingParams(max_tokens=3)
        long = asyncio.create_task(server.generate("long", params))
        left = asyncio.create_task(server.generate("left", params))
        await until(waiting.entered.is_set)
        for _ in range(20):
            await anext(row)
        left.cancel()
        waiting.released.set()
        result = replace(await long, prompt="")
        assert_same(result, replace(alone(waiting.decoder, [7] * 4, params), prompt=""))
        await row.aclose()
    (thread,) = waiting.threads
    assert "specdec tokenizer" in thread


@in_loop
async def test_closing_waits_for_the_prompt_that_was_begun_alone(
    waiting: Waiting,
) -> None:
    """Closing waited for every prompt in the queue, and rows went on meanwhile."""
    server = await waiting.decoder.serve().__aenter__()
    endless = SamplingParams(max_tokens=10**6)
    row = asyncio.create_task(server.generate([1, 2], endless))
    await until(lambda: server.stats.generated_tokens > 3)
    queued = [
        asyncio.create_task(server.generate(f"prompt {i}", endless)) for i in range(8)
    ]
    await until(waiting.entered.is_set)
    closing = asyncio.create_task(server.aclose())
    # While the tokenizer holds on to its prompt.
    result = await asyncio.wait_for(row, timeout=30)
    assert result.finish_reason == "cancelled"
    assert result.token_ids
    assert not closing.done()
    waiting.released.set()
    results = await asyncio.gather(*queued)
    await closing
    assert {r.finish_reason for r in results} == {"cancelled"}
    assert len({r.index for r in [result, *results]}) == 9
    assert not any(r.token_ids for r in results)
    assert waiting.texts == ["prompt 0"]
    assert [r.prompt for r in results] == ["prompt 0", *[""] * 7]


@in_loop
async def test_a_prompt_that_cannot_fit_is_not_tokenized(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, as messages and as token ids: 1.8 MB took seconds."""
    model = loaded(tiny_model("llama", seed=0))
    model.config["max_position_embeddings"] = 10
    model.tokenizer.chat_template = "{{ messages }}"
    model.tokenizer.has_chat_template = True
    asked: list[str] = []
    decoder = SpecDecoder(model)
    kind = type(model.tokenizer)
    for name in ("encode", "decode", "apply_chat_template"):
        monkeypatch.setattr(
            kind, name, lambda *_, **__: asked.append(""), raising=False
        )
    # A token of the vocabulary has 2 bytes: 10 of them have 20.
    size = "it has 21 bytes and at most 20 fit in the target's context of 10 to"
    async with decoder.serve() as server:
        for prompt, ignored, message in (
            ("a" * 21, False, size),
            ("a" * 21, True, size),
            ([{"role": "user", "content": "a" * 21}], False, size),
            ([{"role": "user", "content": "a"}] * 11, False, "it has 11 messages and"),
            ([1] * 11, False, "it has 11 tokens and the target's"),
        ):
            with pytest.raises(PromptError, match=message):
                await server.generate(prompt, ignore_chat_template=ignored)
    assert asked == []


@in_loop
async def test_what_ended_in_a_step_that_fails_is_reported(
    decoder: SpecDecoder,
) -> None:
    """One row is over when the engine fails: its reader gets the result."""

    @contextmanager
    def failing() -> Any:
        session = decoder.session()
        count, left = session._engine._count, [1]

        def counted(outputs: Any) -> None:
            if left and any(output.ended for output in outputs):
                left.clear()
                raise RuntimeError("the device is gone")
            count(outputs)

        session._engine._count = counted  # type: ignore[method-assign]
        yield session

    async with Server(failing, decoder._encode) as server:
        long = asyncio.create_task(
            server.generate([1], SamplingParams(max_tokens=4000))
        )
        params = SamplingParams(max_tokens=5)
        result = await server.generate([2], params)
        assert_same(result, alone(decoder, [2], params))
        with pytest.raises(ServerError, match="the device is gone"):
            await long


# -- the end of the process ------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "open", "tokenizing"])
def test_a_program_that_served_ends_well(how: str) -> None:
    """It aborted with code 134, most times; each cycle left a thread of MLX's.

    Python waited without a bound for a prompt that was being tokenized.
    """
    program = [sys.executable, "-m", "tests.serving_exits", how, "12"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        program, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    # The loop may say that it was left with a task.
    assert (done.returncode, "terminate" in done.stderr) == (0, False)
    threads = list(map(int, done.stdout.split()))
    assert len(threads) == 12
    # One that has just ended may still be listed.
    assert threads[-1] - threads[0] <= 3


@pytest.mark.parametrize("how", ["closed", "failed"])
@in_loop
async def test_who_waits_for_the_tokenizer_learns_of_the_end(
    decoder: SpecDecoder, how: str
) -> None:
    """Else it waits for ever, or gets tokens for a server that is gone."""
    entered, released, called = threading.Event(), threading.Event(), list[int]()

    def slow() -> None:
        entered.set()
        released.wait()

    server = decoder.serve()
    await server.__aenter__()
    first = asyncio.create_task(server.tokenize(slow))
    await asyncio.to_thread(entered.wait)
    second = asyncio.create_task(server.tokenize(lambda: called.append(1)))
    await asyncio.sleep(0)
    if how == "failed":
        server.fail(RuntimeError("stuck"))
        with pytest.raises(ServerError, match="stuck"):
            await asyncio.wait_for(second, 60)
        released.set()
    closing = asyncio.create_task(server.aclose())
    await asyncio.sleep(0)
    released.set()
    await asyncio.wait_for(closing, 60)
    with pytest.raises(ServerError):
        await asyncio.wait_for(second, 60)
    await asyncio.gather(first, return_exceptions=True)
    with pytest.raises(ServerError):
        await server.tokenize(slow)
    assert not called
