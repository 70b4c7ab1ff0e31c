"""The Python API: load a target and a draft, generate for many prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import backend
from .build import check_before_loading, load_drafter, models_of, preflight_of
from .config import EngineConfig
from .draft_names import draft_for
from .engine.async_server import Server
from .engine.conversation import Conversation, converse, user
from .engine.engine import Engine
from .engine.observer import RoundObserver
from .engine.profiler import draft_length, measure_forwards
from .engine.session import Bounds, Session
from .errors import ConfigError, PromptError
from .grammar import GrammarCompiler
from .model_names import target_name
from .models import LoadedModel, context_length, load
from .models.prompt_cache import read_prompt_cache, write_prompt_cache
from .outputs import GenerationResult, RunStats, StreamEvent
from .prefix_cache.store import PrefixStore, open_store
from .prompts import EncodedPrompt, Prompt, PromptLimit, encode, encode_all
from .sampling_params import SamplingParams, require_params
from .spec_decode import DrafterFactory, NamedDrafter, describe, factory_of
from .spec_decode.draft_length import Forwards


class SpecDecoder:
    """Decodes many prompts at once, with a draft model or without one.

    Output is the target's own: for every draft, batch and draft length the same
    tokens that the target would produce alone (see docs/exactness.md).

    Args:
        target: the model whose output is wanted.
        draft: a model of the same vocabulary that proposes tokens.
        drafter: makes what proposes, in place of ``draft``, or the name of a draft as
            for :meth:`from_pretrained` (see docs/drafters.md).
        config: batch size, draft length, prefill chunk, prefix cache.

    Attributes:
        target: the model whose output is wanted.
        bounds: what a request must fit in.
        prefix_store: what is kept of prompts, where the config asks for it.
        prompt_limit: the largest prompt.

    Raises:
        VocabularyMismatchError: target and draft do not share a vocabulary.
        UnsupportedModelError: a model needs a cache that is not supported, or the
            drafter asks for hidden states that the target does not give.
        MemoryLimitError: the models do not fit in memory.
        ConfigError: both ``draft`` and ``drafter`` are given, or one of them, the
            target or the config is something else.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        drafter: DrafterFactory | str | None = None,
        config: EngineConfig | None = None,
    ):
        if not isinstance(target, LoadedModel):
            raise ConfigError(
                f"target is of type {type(target).__name__}: give a LoadedModel, or "
                "the name of a model to SpecDecoder.from_pretrained"
            )
        self.config = _checked_config(config)
        self.target = target
        self.tokenizer: Any = target.tokenizer
        self.target_name = target.name
        factory = factory_of(drafter, draft, target)
        self.draft_name: str | None = None
        model: LoadedModel | None = None
        if factory is not None:
            self.draft_name, model = describe(factory)
        self.stats = RunStats()
        self._backend = backend.defaults()
        self.prefix_store: PrefixStore | None = open_store(self.config)
        ngram = factory.ngram if isinstance(factory, NamedDrafter) else None
        drafts = factory is not None
        self._preflight = preflight_of(
            target, model, self.config, drafts=drafts, ngram=ngram
        )
        self._target, self._drafter = models_of(
            target,
            factory,
            self.config,
            backend=self._backend,
            store=self.prefix_store,
        )
        self.bounds = Bounds(
            self._target.vocab_size,
            context_length(target.config),
            self._preflight,
            GrammarCompiler(self.tokenizer, self._target.vocab_size),
        )
        self.prompt_limit = PromptLimit(self.tokenizer, self.bounds.context_length)
        # What one call learns of the draft serves the next.
        self._length = draft_length(
            self.config, self._target, self._drafter, self._backend
        )

    def measure_forwards(self, num_rows: int) -> Forwards:
        """Time a plain step, a draft step and verify forwards of ``num_rows`` rows.

        Raises:
            ConfigError: there is no draft.
        """
        if self._drafter is None:
            raise ConfigError("there is no draft to measure: give one")
        k = self.config.max_draft_tokens
        with wired_memory():
            return measure_forwards(
                self._target, self._drafter, num_rows, max_draft_tokens=k
            )

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str] | None = None,
        draft: str | os.PathLike[str] | None = None,
        *,
        dtype: str | None = None,
        config: EngineConfig | None = None,
        trust_remote_code: bool = False,
    ) -> SpecDecoder:
        """Load models by name.

        Args:
            target: MLX model folder, hub id or ``.gguf`` file; ``None`` takes the
                installed default model, ``SmolLM2-135M-Instruct``.
            draft: the same; ``self:4bit`` (2, 3, 8) for the target's own weights
                quantized in memory; ``layers:0-7,22-29`` for just those layers of
                it; ``ngram`` for prompt lookup;
                ``ngram+MODEL`` for a model of these where no n-gram matches;
                ``smollm2-135m-instruct`` for the default target's draft, which comes
                with specdec; or ``none``. ``None`` takes that draft for the default
                target, no draft for others.
            dtype: ``float32``, ``bfloat16`` or ``float16``; ``None`` keeps the
                weights as stored.
            config: batch size, draft length, prefill chunk.
            trust_remote_code: run Python code that lies in a model's folder, where
                the model asks for that; such a model is refused otherwise.

        Raises:
            ModelNameError: there can be no model of that name.
            ModelNotFoundError: there is no such model.
            VocabularyMismatchError, UnsupportedModelError: they do not fit.
            ConfigError: a model is no name, ``draft`` cannot be taken apart, or there
                is no such ``dtype``.
            MemoryLimitError: the models do not fit in memory; none is loaded.
        """
        config = _checked_config(config)
        wanted = None if target is None else _name("target", target)
        spec = draft_for(wanted, None if draft is None else _name("draft", draft))
        if spec is not None and spec.implied and not config.max_draft_tokens:
            spec = None
        name = target_name(wanted)
        trust = trust_remote_code
        check_before_loading(name, spec, dtype, config, trust_remote_code=trust)
        loaded = load(name, dtype=dtype, trust_remote_code=trust)
        drafter = load_drafter(spec, loaded, dtype=dtype, trust_remote_code=trust)
        return cls(loaded, drafter=drafter, config=config)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        system_prompt: str | None = None,
        ignore_chat_template: bool = False,
    ) -> list[GenerationResult]:
        """Generate for all prompts; results in the order of the prompts.

        Args:
            prompts: strings, lists of chat messages, or lists of token ids. A
                string is a user turn where the model has a chat template.
            params: for all prompts, or one for each. When one is given for all,
                prompt ``i`` draws with seed ``params.seed + i``; without a seed the
                first prompt's is random. Results report the seeds.
            system_prompt: put before string prompts by the chat template.
            ignore_chat_template: encode strings as they are.

        Raises:
            PromptError: a prompt is empty, cannot be encoded, or is longer than the
                target's context.
            ConfigError: ``params`` are not as many as the prompts, name a token
                that is none of the target's, or have a grammar that cannot be used.
        """
        events = self.stream(
            prompts,
            params,
            system_prompt=system_prompt,
            ignore_chat_template=ignore_chat_template,
        )
        results = [event.result for event in events if event.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        system_prompt: str | None = None,
        ignore_chat_template: bool = False,
        turns: Iterable[Sequence[str]] | None = None,
    ) -> Iterator[StreamEvent]:
        """As :meth:`generate`, yielding what every round adds to each row.

        Prompts and options are checked at the call, before the first event is
        asked for.

        Args:
            turns: for each prompt, which is a string, what its user says after the
                answer, and after the next ones. A turn is decoded beside other
                conversations' as soon as the answer before it has ended. With a
                prefix cache its prompt begins with what is kept of the one before.
        """
        if turns is not None:
            return self._converse(
                [*prompts], params, system_prompt, [tuple(each) for each in turns]
            )
        encoded = encode_all(
            self.tokenizer,
            prompts,
            system_prompt=system_prompt,
            ignore_chat_template=ignore_chat_template,
            limit=self.prompt_limit,
        )
        session = self.session()
        session.add_all(encoded, _per_prompt(params, len(encoded)))
        self.stats = session.stats
        return _events(session)

    def _converse(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        system_prompt: str | None,
        turns: Sequence[tuple[str, ...]],
    ) -> Iterator[StreamEvent]:
        """Conversations with these prompts and turns, side by side."""
        if len(turns) != len(prompts):
            raise ConfigError(f"{len(turns)} lists of turns for {len(prompts)} prompts")
        for i, prompt in enumerate(prompts):
            if turns[i] and not isinstance(prompt, str):
                raise PromptError(f"prompt {i}: turns follow a string: give one")
        session = self.session()
        each = _per_prompt(params, len(prompts))
        encoded = encode_all(
            self.tokenizer,
            [user(str(p)) if t else p for p, t in zip(prompts, turns, strict=True)],
            system_prompt=system_prompt,
            limit=self.prompt_limit,
        )
        session.add_all(encoded, each)
        self.stats = session.stats
        talks = [
            Conversation(user(str(p)), list(t), p_params)
            for p, t, p_params in zip(prompts, turns, each, strict=True)
        ]
        return converse(session, talks, system_prompt)

    def import_prompt_cache(
        self, file: str | os.PathLike[str], prompt: Prompt, **encoding: Any
    ) -> int:
        """Take a prompt-cache file of mlx-lm into the prefix store, for the target.

        Args:
            file: written by mlx-lm for this very model.
            prompt: what it was made of, and possibly more.
            encoding: ``system_prompt`` and ``ignore_chat_template``, as for
                :meth:`generate`.

        Returns:
            Tokens in the file.

        Raises:
            CacheError: it cannot be read, does not fit, or there is no store.
        """
        token_ids = self._encode(prompt, **encoding).token_ids
        return read_prompt_cache(self._target, file, token_ids)

    def export_prompt_cache(
        self, prompt: Prompt, file: str | os.PathLike[str], **encoding: Any
    ) -> int:
        """Write what the prefix store has of ``prompt`` as mlx-lm's prompt-cache file.

        Returns:
            Tokens in the file, which are the longest stored prefix.

        Raises:
            CacheError: nothing is stored, it cannot be written, or mlx-lm has no
                cache of that kind (rings with ``kv_bits``).
        """
        token_ids = self._encode(prompt, **encoding).token_ids
        return write_prompt_cache(self._target, token_ids, file)

    def _encode(self, prompt: Prompt, **encoding: Any) -> EncodedPrompt:
        return encode(self.tokenizer, prompt, limit=self.prompt_limit, **encoding)

    def session(self, *, observer: RoundObserver | None = None) -> Session:
        """A new session, to which requests can be added while others run.

        Args:
            observer: is called with every round, for measurements.
        """
        engine = Engine(
            self._target,
            self._drafter,
            self.config,
            self._backend,
            frozenset(self.tokenizer.eos_token_ids),
            lambda: self.tokenizer.detokenizer,
            observer,
            self._preflight,
            self._length,
        )
        return Session(engine, self.tokenizer, self.bounds, self.prompt_limit)

    def serve(self) -> Server:
        """A server for asyncio, which decodes in a thread of its own.

        Entering it starts the thread; see :class:`~specdec.engine.async_server.Server`.
        """
        return Server(self._session_at_work, self._encode, self.bounds.grammar)

    @contextmanager
    def _session_at_work(self) -> Iterator[Session]:
        with wired_memory():
            yield self.session()


def _name(what: str, name: object) -> str:
    """The name of a model, as a text."""
    if not isinstance(name, str | os.PathLike):
        raise ConfigError(
            f"{what} is of type {type(name).__name__}: name a folder, a .gguf file or "
            "a hub id (SpecDecoder itself takes models that are loaded)"
        )
    return os.fspath(name)


def _checked_config(config: object) -> EngineConfig:
    """The config, or the default one for ``None``."""
    if not isinstance(config, EngineConfig | None):
        raise ConfigError(
            f"config is of type {type(config).__name__}: give EngineConfig(...)"
        )
    return config or EngineConfig()


def _events(session: Session) -> Iterator[StreamEvent]:
    """What a session emits, to its end."""
    with wired_memory():
        while session.busy:
            yield from session.step()


def _per_prompt(
    params: SamplingParams | Iterable[SamplingParams] | None, n: int
) -> list[SamplingParams]:
    """One set of options per prompt; shared ones differ in their seed."""
    if params is None or isinstance(params, SamplingParams):
        shared = (params or SamplingParams()).seeded()
        if shared.seed is None:
            return [shared] * n
        return [replace(shared, seed=shared.seed + i) for i in range(n)]
    one = isinstance(params, dict) or not isinstance(params, Iterable)
    each: list[Any] = [params] if one else list(params)
    for p in each:
        require_params(p, ", one, or one for each prompt")
    if len(each) != n:
        raise ConfigError(
            f"{len(each)} SamplingParams for {n} prompts: give one, or one for each"
        )
    return each


@contextmanager
def wired_memory() -> Iterator[None]:
    """Keep models resident where the device has a recommended working set (Metal)."""
    before = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if before is not None:
            mx.synchronize()
            mx.set_wired_limit(before)
