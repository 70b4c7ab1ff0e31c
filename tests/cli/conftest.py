"""The command line with a decoder that needs no model."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specdec.cli import main
from specdec.config import EngineConfig
from specdec.errors import PromptError
from specdec.outputs import GenerationResult, RunStats, StreamEvent
from specdec.utils.warm_up import warm_up


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C as a terminal's commands have it; it is ignored in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def result_of(index: int, prompt: str, text: str) -> GenerationResult:
    return GenerationResult(
        index=index,
        prompt=prompt,
        text=text,
        token_ids=list(range(len(text.split()))),
        finish_reason="stop",
        prompt_tokens=5,
        rounds=2,
        drafted=6,
        accepted=3,
    )


STATS = RunStats(
    prompts=2,
    prefilled=2,
    prompt_tokens=10,
    generated_tokens=8,
    decode_tokens=6,
    prefill_seconds=0.5,
    decode_seconds=2.0,
    rounds=2,
    row_rounds=4,
    drafted=12,
    accepted=6,
    peak_memory_bytes=1_500_000_000,
)


@dataclass
class FakeDecoder:
    """Answers each prompt in two events; the last prompt finishes first.

    ``calls`` holds what the command line asked for; ``raises`` is raised when
    loading, or, where it is a pair, after so many events. The prompt "unusable"
    is refused, the prompt "failing" ends with an error.
    """

    calls: dict[str, Any] = field(default_factory=dict)
    raises: BaseException | tuple[int, BaseException] | None = None
    stats: RunStats = field(default_factory=lambda: replace(STATS))
    config: EngineConfig = field(default_factory=EngineConfig)
    target_name: str = "the-target"
    target: Any = field(
        default_factory=lambda: SimpleNamespace(ranks=None, in_float32=False)
    )
    draft_name: str | None = None
    draft_length_reason: str | None = None

    @property
    def max_draft_tokens(self) -> int:
        return self.config.max_draft_tokens

    def from_pretrained(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        dtype: str | None = None,
        config: EngineConfig | None = None,
        trust_remote_code: bool = False,
        **loading: Any,
    ) -> FakeDecoder:
        if isinstance(self.raises, BaseException):
            raise self.raises
        self.calls.update(target=target, draft=draft, dtype=dtype, config=config)
        self.calls["trust_remote_code"] = trust_remote_code
        assert loading.pop("ranks", None) is None  # it is the only process
        self.calls.update(loading)
        self.config = config or EngineConfig()
        self.draft_name = draft
        return self

    def stream(
        self, prompts: Sequence[Any], params: Any = None, **options: Any
    ) -> Iterator[StreamEvent]:
        if "unusable" in prompts:
            raise PromptError("it is unusable").of_prompt(0)
        self.calls.update(prompts=list(prompts), params=params, **options)
        return self._stream(prompts)

    def _stream(self, prompts: Sequence[Any]) -> Iterator[StreamEvent]:
        for n, event in enumerate(self._events(prompts)):
            if isinstance(self.raises, tuple) and n == self.raises[0]:
                raise self.raises[1]
            yield event

    def _events(self, prompts: Sequence[Any]) -> Iterator[StreamEvent]:
        for index in range(len(prompts)):
            yield StreamEvent(index=index, text="Bonjour", token_ids=[1])
        for index, prompt in reversed(list(enumerate(prompts))):
            result = result_of(index, str(prompt), f"Bonjour n°{index}")
            if prompt == "failing":
                error = "the logits\nare NaN"
                result = replace(result, finish_reason="error", error=error)
            yield StreamEvent(
                index=index, text=f" n°{index}", token_ids=[2, 3], result=result
            )


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> FakeDecoder:
    fake = FakeDecoder()
    module = ModuleType("specdec.decoder")
    module.SpecDecoder = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specdec.decoder", module)
    monkeypatch.setattr("specdec.backend.check_compiler", lambda: None)
    monkeypatch.setattr("specdec.backend.product_notes", lambda **_: [])
    monkeypatch.setattr("specdec.model_names.default_draft", lambda: None)
    return fake


class Specdec:
    """``specdec("run", "-p", "Hi", stdin="...")``, and the decoder that it has."""

    def __init__(self, decoder: FakeDecoder):
        self.decoder = decoder

    @property
    def calls(self) -> dict[str, Any]:
        """What was asked of the decoder."""
        return self.decoder.calls

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=stdin)

    def refuses(self, *arguments: str) -> str:
        """The one line of wrong usage, written before a model is loaded."""
        self.calls.clear()
        result = self(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("specdec: error: ")
        assert len(line) < 700
        assert self.calls == {}
        return line


@pytest.fixture
def specdec(decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch) -> Specdec:
    # What other tests have rehearsed in this process is not reported.
    monkeypatch.setattr(warm_up, "seconds", 0.0)
    return Specdec(decoder)
