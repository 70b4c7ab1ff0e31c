"""The Python API: :class:`SpecDecoder` loads models and generates for many prompts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias, Unpack, overload

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import backend
from .config import EngineConfig
from .engine.async_server import Server
from .engine.auto_draft import choose, note_known
from .engine.build import (
    check_alike,
    check_before_loading,
    check_shared,
    load_drafter,
    models_of,
    preflight_of,
)
from .engine.conversation import Conversation, converse, user
from .engine.engine import Engine
from .engine.led import LeadingSession, announce, follow
from .engine.profiler import draft_length, measure_forwards
from .engine.rehearsal import Rehearsal
from .engine.round import RoundObserver
from .engine.session import Bounds, Session
from .errors import ConfigError, MemoryLimitError, PromptError
from .grammar import GrammarCompiler
from .model_names import draft_for, target_name
from .models import LoadedModel, adopt, context_length, load
from .models.prompt_cache import read_prompt_cache, write_prompt_cache
from .models.tokenizer import set_chat_template
from .models.vision import no_images
from .outputs import GenerationResult, RunStats, StreamEvent
from .parallel import Follower, Leader, Ranks
from .prefix_cache.store import PrefixStore, open_store
from .prompts import EncodedPrompt, Encoding, Prompt, PromptLimit, encode, encode_all
from .sampling_params import SamplingParams, per_prompt
from .spec_decode import (
    DrafterFactory,
    NamedDrafter,
    describe,
    factory_of,
)
from .spec_decode.draft_length import Forwards
from .spec_decode.drafter import most_proposed
from .spec_decode.prompt_scores import unscored
from .utils.printable import quoted

# What mlx_lm.load returns: model, tokenizer, and the configuration if asked for.
LoadedPair: TypeAlias = tuple[nn.Module, Any] | tuple[nn.Module, Any, dict[str, Any]]

log = logging.getLogger("specdec.decoder")


class SpecDecoder:
    """Decodes many prompts at once, with a draft or without one.

    The output is the target's own: the same tokens that the target would produce alone,
    whatever the draft, the batch and the draft length (see docs/exactness.md).

    :meth:`from_pretrained` loads a model by name; ``SpecDecoder(*mlx_lm.load(...))``
    takes one that is loaded already.

    Args:
        target: the model whose output is wanted: a
            :class:`~specdec.models.LoadedModel`, or a model, its tokenizer and
            (optional) its configuration, as ``mlx_lm.load`` returns them.
        draft: a model that proposes tokens: a :class:`~specdec.models.LoadedModel`, or
            the tuple that ``mlx_lm.load`` returns.
        drafter: in place of ``draft``, a function that makes a drafter, or the name of
            a draft as for :meth:`from_pretrained` (see docs/drafters.md).
        config: batch size, draft length, prefill chunk, prefix cache.
        name: a name for reports, for a target that ``mlx_lm.load`` returned; ``None``
            takes the model's type.

    Attributes:
        target: the model whose output is wanted.
        bounds: the limits of every request.
        prefix_store: the stored prefixes of prompts, if the config asks for them.
        prompt_limit: the longest prompt.

    Raises:
        VocabularyMismatchError: target and draft share too few tokens.
        UnsupportedModelError: a model needs a cache that is not supported, or the
            drafter reads hidden states that the target does not have.
        MemoryLimitError: the models do not fit in memory.
        ConfigError: both ``draft`` and ``drafter`` are given, or an argument has the
            wrong type.
    """

    @overload
    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | LoadedPair | None = None,
        *,
        drafter: DrafterFactory | str | None = None,
        config: EngineConfig | None = None,
    ): ...

    @overload
    def __init__(
        self,
        target: nn.Module,
        tokenizer: Any,
        model_config: dict[str, Any] = ...,
        /,
        *,
        draft: LoadedModel | LoadedPair | None = None,
        drafter: DrafterFactory | str | None = None,
        config: EngineConfig | None = None,
        name: str | None = None,
    ): ...

    def __init__(
        self,
        target: LoadedModel | nn.Module,
        *more: Any,
        draft: LoadedModel | LoadedPair | None = None,
        drafter: DrafterFactory | str | None = None,
        config: EngineConfig | None = None,
        name: str | None = None,
    ):
        if isinstance(target, nn.Module):
            target = _adopted("target", (target, *more), name)
        elif len(more) == 1 and draft is None:
            (draft,) = more
        elif more:
            raise ConfigError("too many models: give a target and a draft")
        if not isinstance(target, LoadedModel):
            raise ConfigError(
                f"target is of type {type(target).__name__}: give a LoadedModel, "
                "SpecDecoder(*mlx_lm.load(...)), or the name of a model to "
                "SpecDecoder.from_pretrained"
            )
        if isinstance(draft, tuple):
            draft = _adopted("draft", draft)
        self.config = _checked_config(config)
        self.target = target
        self.tokenizer: Any = target.tokenizer
        self.target_name = target.name
        factory = factory_of(drafter, draft, target)
        self.draft_name: str | None = None
        model: LoadedModel | None = None
        if factory is not None:
            self.draft_name, model = describe(factory)
        self._backend = backend.defaults()
        self.prefix_store: PrefixStore | None = open_store(self.config)
        ngram = factory.ngram if isinstance(factory, NamedDrafter) else None
        drafts = factory is not None
        self._preflight = preflight_of(
            target,
            model,
            self.config,
            drafts=drafts,
            ngram=ngram,
            ranks=target.ranks,
        )
        self._target, self._drafter = models_of(
            target,
            factory,
            self.config,
            backend=self._backend,
            store=self.prefix_store,
        )
        share = None if self._drafter is None else self._drafter.vocabulary_share
        self.stats = RunStats(vocabulary_share=share)
        if target.ranks is not None:
            check_alike(target.ranks, target, model, self.config, self.draft_name)
        ranks = target.ranks
        tell = partial(announce, ranks) if isinstance(ranks, Leader) else None
        self.bounds = Bounds(
            self._target.vocab_size,
            context_length(target.config),
            self._preflight,
            GrammarCompiler(
                self.tokenizer,
                self._target.vocab_size,
                bounded=not isinstance(ranks, Follower),
                announce=tell,
            ),
            partial(unscored, self._target),
        )
        self.prompt_limit = PromptLimit(
            self.tokenizer,
            self.bounds.context_length,
            self._target.images or no_images(target),
        )
        self._rehearsal = Rehearsal(self._backend, alone=target.ranks is None)
        # All calls share it: what one call learns about the draft serves the next.
        self._length = draft_length(
            self.config,
            self._target,
            self._drafter,
            self._backend,
            ranks=target.ranks,
        )

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that any round proposes, by the config and the draft."""
        return most_proposed(self._drafter, self.config.max_draft_tokens)

    @property
    def max_proposals(self) -> int | None:
        """The most tokens that the draft can propose in a round; ``None``: any number.

        The draft sets this limit; :attr:`max_draft_tokens` never exceeds it.
        """
        return None if self._drafter is None else self._drafter.max_proposals

    @property
    def draft_length_reason(self) -> str | None:
        """What ``auto`` chose in most rounds so far, and why, in one line.

        ``None`` for a fixed number of draft tokens, and before the first round.
        """
        return None if self._length is None else self._length.reason

    def measure_forwards(self, num_rows: int) -> Forwards:
        """Time a plain step, a draft step and verify forwards of ``num_rows`` rows.

        Raises:
            ConfigError: there is no draft.
        """
        if self._drafter is None:
            raise ConfigError("there is no draft to measure: give one")
        self._check_whole("measuring forwards")
        k = self.max_draft_tokens
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
        adapter_path: str | os.PathLike[str] | None = None,
        draft_adapter_path: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        chat_template: str | None = None,
        ranks: Ranks | None = None,
    ) -> SpecDecoder:
        """Load models by name.

        Args:
            target: an MLX model folder, a hub id or a ``.gguf`` file; ``None`` takes
                the installed default model, ``SmolLM2-135M-Instruct``.
            draft: a model as for ``target``, or one of: ``self:4bit`` (also 2, 3, 8):
                the target's own weights, quantized in memory; ``layers:0-7,22-29``:
                just these layers of the target; ``mtp``: the target's own MTP head;
                ``ngram``: prompt lookup; ``ngram+MODEL``: a model where no n-gram
                matches; ``auto``: the target's own head, or a published draft that was
                downloaded; ``smollm2-135m-head``: the head of the default target,
                which comes with specdec; ``none``. ``None`` takes that draft for the
                default target, and no draft for others.
            dtype: ``float32``, ``bfloat16`` or ``float16``; ``None`` keeps the
                weights as stored.
            config: batch size, draft length, prefill chunk.
            trust_remote_code: run Python code from a model's folder if the model
                needs it. Otherwise such a model is refused.
            adapter_path, draft_adapter_path: folders of adapters that ``mlx_lm.lora``
                wrote, for the target and for the draft.
            revision: branch, tag or commit, for a target from the hub.
            chat_template: a Jinja template in place of the target's own.
            ranks: what :meth:`specdec.Ranks.join` returned. Each rank then holds a
                shard of the target, and the whole draft. Rank 0 decodes, and the
                others call :meth:`follow` (see docs/scaling.md).

        Raises:
            ModelNameError: no model can have that name.
            ModelNotFoundError: there is no such model.
            VocabularyMismatchError: target and draft share too few tokens.
            UnsupportedModelError: a model, or a part of it, is not supported.
            ConfigError: a name has the wrong type, ``draft`` or ``dtype`` is not
                valid, or a model cannot have an adapter or a revision.
            MemoryLimitError: the models do not fit in memory; none is loaded.
            RankError: the ranks load different models, or one has ended.
        """
        config = _checked_config(config)
        wanted = None if target is None else _name("target", target)
        spec = draft_for(wanted, None if draft is None else _name("draft", draft))
        if spec is not None and spec.implied and not config.max_draft_tokens:
            spec = None
        if draft_adapter_path is not None:
            if spec is None:
                raise ConfigError(
                    "draft_adapter_path needs a draft: name one, or leave it out"
                )
            spec = spec.with_adapter(draft_adapter_path)
        name = target_name(wanted)
        trust = trust_remote_code
        check_shared(config, ranks)
        origin: dict[str, Any] = {
            "adapter_path": adapter_path,
            "revision": revision,
            "ranks": ranks,
        }
        if spec is not None and spec.automatic:
            choice = choose(
                name, config, dtype=dtype, trust_remote_code=trust, **origin
            )
            log.info("%s", choice)
            spec = choice.spec
        check_before_loading(
            name, spec, dtype, config, trust_remote_code=trust, **origin
        )
        loaded = load(name, dtype=dtype, trust_remote_code=trust, **origin)
        if chat_template is not None:
            set_chat_template(loaded.tokenizer, chat_template)
        if draft is None and spec is None:
            note_known(name, loaded.config)
        drafter = load_drafter(spec, loaded, dtype=dtype, trust_remote_code=trust)
        return cls(loaded, drafter=drafter, config=config)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = False,
        system_prompt: str | None = None,
        ignore_chat_template: bool = False,
        chat_template_config: Mapping[str, Any] | None = None,
        prefill_response: str | None = None,
        **settings: Any,
    ) -> list[GenerationResult]:
        """Generate for all prompts; results in the order of the prompts.

        Args:
            prompts: one prompt or several: strings, lists of chat messages, or lists
                (arrays) of token ids. A string is a user turn if the model has a chat
                template. A message alone is a conversation of one.
            params: one for all prompts, or one for each. If one serves all, prompt
                ``i`` draws with seed ``params.seed + i``; without a seed the first one
                is random. Results report the seeds.
            progress: show a progress bar of tqdm, also in a notebook.
            system_prompt: a system message for string prompts.
            ignore_chat_template: encode strings as they are.
            chat_template_config: variables for the chat template, such as
                ``{"enable_thinking": False}``.
            prefill_response: the beginning of each answer. The model continues it;
                results have what comes after it.
            settings: fields of :class:`SamplingParams`, such as ``max_tokens=64``;
                they replace those of ``params``.

        Raises:
            PromptError: a prompt is empty, cannot be encoded, or is longer than the
                target's context.
            ConfigError: there are more or fewer ``params`` than prompts, they name a
                token that is not the target's, their grammar cannot be used, or there
                is no such setting.
        """
        prompt_list = _several(prompts)
        events = self.stream(
            prompt_list,
            params,
            system_prompt=system_prompt,
            ignore_chat_template=ignore_chat_template,
            chat_template_config=chat_template_config,
            prefill_response=prefill_response,
            **settings,
        )
        if progress:
            events = _shown(events, len(prompt_list), self)
        results = [event.result for event in events if event.result is not None]
        return sorted(results, key=lambda result: result.index)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        system_prompt: str | None = None,
        ignore_chat_template: bool = False,
        chat_template_config: Mapping[str, Any] | None = None,
        prefill_response: str | None = None,
        keep_going: bool = False,
        turns: Iterable[Sequence[str]] | None = None,
        **settings: Any,
    ) -> Iterator[StreamEvent]:
        """As :meth:`generate`, yielding what every round adds to each request.

        Prompts and settings are checked at the call, before the first event.

        Args:
            keep_going: do not raise for a prompt that cannot be served. Its result has
                the error, and the others run.
            turns: for each prompt, what the user says after each answer. The prompt
                must be a string or chat messages. A turn is decoded as soon as the
                answer before it has ended, while other conversations run. With a
                prefix cache, the tokens of earlier turns are not computed again.
        """
        encoding: Encoding = {
            "system_prompt": system_prompt,
            "ignore_chat_template": ignore_chat_template,
            "chat_template_config": chat_template_config,
            "prefill_response": prefill_response,
        }
        prompt_list = _several(prompts)
        later = _later_turns(turns, prompt_list)
        asked = [
            user(p) if t and isinstance(p, str) else p
            for p, t in zip(prompt_list, later, strict=True)
        ]
        session = self.session()
        refused: list[GenerationResult] = []
        if keep_going:
            each = per_prompt(params, len(prompt_list), settings)
            served = _add_those_that_can(session, asked, each, encoding, refused)
        else:
            encoded = encode_all(
                self.tokenizer, asked, limit=self.prompt_limit, **encoding
            )
            each = per_prompt(params, len(prompt_list), settings)
            session.add_all(encoded, each)
            served = list(range(len(prompt_list)))
        self.stats = session.stats
        talks = {
            request: Conversation(i, asked[i], list(later[i]), each[i])
            for request, i in enumerate(served)
        }
        return _events(session, talks, encoding, refused)

    def import_prompt_cache(
        self,
        file: str | os.PathLike[str],
        prompt: Prompt,
        **encoding: Unpack[Encoding],
    ) -> int:
        """Take a prompt-cache file of mlx-lm into the prefix store, for the target.

        Args:
            file: written by mlx-lm for this very model.
            prompt: the prompt that the file was made from, possibly continued.
            encoding: ``system_prompt`` and the like, as for :meth:`generate`.

        Returns:
            How many tokens the file holds.

        Raises:
            CacheError: the file cannot be read or does not fit the model, or there is
                no store.
        """
        self._check_whole("a prompt-cache file")
        token_ids = self._encode(prompt, **encoding).token_ids
        return read_prompt_cache(self._target, file, token_ids)

    def export_prompt_cache(
        self,
        prompt: Prompt,
        file: str | os.PathLike[str],
        **encoding: Unpack[Encoding],
    ) -> int:
        """Write the longest stored prefix of ``prompt`` as mlx-lm's prompt-cache file.

        Returns:
            How many tokens the file holds.

        Raises:
            CacheError: nothing is stored, the file cannot be written, or mlx-lm has no
                cache of that kind (rings with ``kv_bits``).
        """
        self._check_whole("a prompt-cache file")
        token_ids = self._encode(prompt, **encoding).token_ids
        return write_prompt_cache(self._target, token_ids, file)

    def _encode(self, prompt: Prompt, **encoding: Unpack[Encoding]) -> EncodedPrompt:
        return encode(self.tokenizer, prompt, limit=self.prompt_limit, **encoding)

    def session(self, *, observer: RoundObserver | None = None) -> Session:
        """A new session, to which requests can be added while others run.

        Args:
            observer: called in every round, for measurements.

        Raises:
            ConfigError: this is a rank other than 0.
        """
        ranks = self.target.ranks
        if isinstance(ranks, Follower):
            raise ConfigError(
                f"rank {ranks.rank} repeats what rank 0 does: call follow() on it"
            )
        parts = self._parts(observer)
        if isinstance(ranks, Leader):
            return LeadingSession(ranks, *parts)
        return Session(*parts)

    def follow(self) -> bool:
        """On a rank other than 0, do what rank 0's sessions do, until rank 0 ends.

        Returns:
            Whether this is a rank other than 0. Rank 0, and a process without ranks,
            return ``False`` at once.

        Raises:
            RankError: rank 0 ended unexpectedly.
        """
        ranks = self.target.ranks
        if not isinstance(ranks, Follower):
            return False
        with wired_memory():
            follow(ranks, lambda: Session(*self._parts()), self.bounds)
        return True

    def _check_whole(self, what: str) -> None:
        """Refuse what needs the whole target, on a rank that has a shard.

        Raises:
            ConfigError: this process has a shard.
        """
        if self.target.ranks is not None:
            raise ConfigError(
                f"{what} does not go with tensor parallelism: a rank has a shard; use "
                "one device"
            )

    def _parts(self, observer: RoundObserver | None = None) -> tuple[Any, ...]:
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
            self._rehearsal,
            self.target.ranks,
        )
        return engine, self.tokenizer, self.bounds, self.prompt_limit

    def serve(self) -> Server:
        """A server for asyncio programs, which decodes in a thread of its own.

        ``async with`` starts and ends the thread; see
        :class:`~specdec.engine.async_server.Server`.
        """
        return Server(self._session_at_work, self._encode, self.bounds.grammars)

    @contextmanager
    def _session_at_work(self) -> Iterator[Session]:
        with wired_memory():
            yield self.session()


def _name(what: str, name: object) -> str:
    """The name of a model, as a string."""
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


def _adopted(
    what: str, loaded: tuple[Any, ...], name: str | None = None
) -> LoadedModel:
    """A model from what ``mlx_lm.load`` returned."""
    if len(loaded) not in (2, 3):
        raise ConfigError(
            f"{what} has no tokenizer: give what mlx_lm.load returns, model and "
            "tokenizer"
        )
    return adopt(*loaded, name=name)


def _several(prompts: Any) -> list[Any]:
    """The prompts as a list, also if only one was given, or one message."""
    if isinstance(prompts, Mapping):
        return [[prompts]]
    if isinstance(prompts, str):
        return [prompts]
    # Bytes are no token ids, and sets have no order.
    refused = isinstance(prompts, bytes | bytearray | memoryview | set | frozenset)
    if hasattr(prompts, "tolist") and not refused:  # token ids, or rows of them
        prompts = prompts.tolist()
    if refused or not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts is of type {type(prompts).__name__}: give a string, a list of "
            "chat messages, a list of token ids, or a list of these"
        )
    several = list(prompts)
    # A list of messages, or of token ids, is one prompt.
    parts = all(isinstance(p, Mapping | Integral) for p in several)
    return [several] if several and parts else several


def _shown(
    events: Iterator[StreamEvent], total: int, decoder: SpecDecoder
) -> Iterator[StreamEvent]:
    """Yield the events, and show a bar of the prompts that have finished."""
    from tqdm.auto import tqdm  # a widget in a notebook

    with tqdm(total=total, unit="prompt") as bar:
        for event in events:
            stats = decoder.stats
            note = f"{stats.generated_tokens} tokens"
            if stats.decode_tokens:
                note += f", {stats.tokens_per_second:.1f} tokens/s"
            bar.set_postfix_str(note, refresh=False)
            if event.result is not None:
                bar.update()
            yield event


def _events(
    session: Session,
    talks: dict[int, Conversation],
    encoding: Encoding,
    refused: list[GenerationResult],
) -> Iterator[StreamEvent]:
    """Yield the events of all prompts, refused ones first."""
    for result in refused:
        yield StreamEvent(index=result.index, text="", token_ids=[], result=result)
    with wired_memory():
        yield from converse(session, talks, encoding)


def _later_turns(
    turns: Iterable[Sequence[str]] | None, prompts: Sequence[Prompt]
) -> list[tuple[str, ...]]:
    """The turns that follow each prompt, checked."""
    if turns is None:
        return [()] * len(prompts)
    lists = []
    for each in turns:
        # A string would be taken for one turn per character.
        if not isinstance(each, list | tuple) or not all(
            isinstance(turn, str) for turn in each
        ):
            raise ConfigError(
                f"turns has {quoted(each)}: give a list of texts for each prompt"
            )
        lists.append(tuple(each))
    if len(lists) != len(prompts):
        raise ConfigError(f"{len(lists)} lists of turns for {len(prompts)} prompts")
    for i, (prompt, later) in enumerate(zip(prompts, lists, strict=True)):
        if later and not isinstance(prompt, str) and not _are_messages(prompt):
            text = "turns follow a string or chat messages"
            raise PromptError(text).of_prompt(i)
    return lists


def _are_messages(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _add_those_that_can(
    session: Session,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    encoding: Encoding,
    refused: list[GenerationResult],
) -> list[int]:
    """Add the prompts that can be served; append the others' results to ``refused``."""
    served = []
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        try:
            session.add(prompt, each, **encoding)
        except (PromptError, ConfigError, MemoryLimitError) as error:
            text = prompt if isinstance(prompt, str) else ""
            refused.append(GenerationResult.refused(index, text, str(error)))
        else:
            served.append(index)
    return served


class _Wired:
    """Whose work needs resident memory now, and the limit before the first of it."""

    lock = threading.Lock()
    users = 0
    before: int | None = None


@contextmanager
def wired_memory() -> Iterator[None]:
    """Keep models resident where the device has a recommended working set (Metal).

    Contexts may overlap, in one thread or in several: the limit returns to what it was
    when the last of them ends.
    """
    with _Wired.lock:
        if not _Wired.users:
            _Wired.before = maybe_set_recommended_wired_limit()
        _Wired.users += 1
    try:
        yield
    finally:
        with _Wired.lock:
            _Wired.users -= 1
            if not _Wired.users and _Wired.before is not None:
                try:
                    mx.synchronize()
                finally:  # an error of the device is raised here again
                    mx.set_wired_limit(_Wired.before)
