"""Runs models: forwards, chunked prefill, caches. All decoding forwards run here."""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from ..backend import BackendDefaults
from ..cache import (
    BatchRecurrentCache,
    CacheOptions,
    Memo,
    check_caches,
    extend_caches,
    make_batch_caches,
    maybe_quantize,
    members,
    place_caches,
    reads_boolean_masks,
)
from ..cache.capacity import chunk_width, padded_length, round_up
from ..config import EngineConfig
from ..cuda.attention_patch import takes_single
from ..cuda.flattened_matmul import slow_pairs
from ..prefix_cache.session import ModelPrefixes, PrefixSession
from ..prefix_cache.store import PrefixStore
from ..prompts.images import PlacedImage
from .compiled import CompiledForwards
from .image_rows import RowImages, RowInputs, with_row_inputs
from .layer_skip import without_idle
from .layers import HiddenStates, query_heads, record_layers
from .metal_kernels import with_tails
from .pace import Pace
from .recurrent import share_weights, twins_within, with_recurrent_rows
from .row_positions import with_row_positions
from .vision import ImageEncoder


def cache_options(config: EngineConfig, backend: BackendDefaults) -> CacheOptions:
    """The options of any model's caches under ``config``."""
    return CacheOptions(
        max_write=config.prefill_step_size,
        read_bucket=backend.read_bucket,
        unpacks=backend.unpacks,
        kv_bits=config.kv_bits,
        kv_group_size=config.kv_group_size,
        quantized_kv_start=config.quantized_kv_start,
        max_kv_size=config.max_kv_size,
    )


class ModelRunner:
    """A model, and how the caches of its rows are made.

    Args:
        model: an mlx-lm model.
        name: a name for messages.
        config: prefill chunks, and how keys and values are stored.
        backend: how to shape forwards.
        prefix_store: stores prefixes of prompts; ``None``: none are stored.
        images: embeds images of prompts; ``None``: there are none.

    Raises:
        UnsupportedModelError: the batch caches cannot serve the model.
    """

    #: How wide chunks are while other rows decode; None: none do.
    pace: Pace | None = None

    def __init__(
        self,
        model: nn.Module,
        name: str,
        config: EngineConfig,
        backend: BackendDefaults,
        prefix_store: PrefixStore | None = None,
        images: ImageEncoder | None = None,
    ):
        #: What layers read of images; None: they read hidden states only.
        self.row_inputs: RowInputs | None = None
        if images is not None and images.sections is not None:
            model, self.row_inputs = with_row_inputs(
                model, images.config, images.sections, name
            )
        model = with_recurrent_rows(with_row_positions(model))
        self.name = name
        self.prefill_step_size = config.prefill_step_size
        self._stores_answers = config.prefix_answers
        single = backend.pad_single_token and takes_single(model)
        if single or slow_pairs(model):
            backend = replace(backend, pad_single_token=False)
        self.options = replace(
            cache_options(config, backend),
            additive_mask=not (backend.boolean_masks or reads_boolean_masks(model)),
            mask_heads=query_heads(model) if backend.boolean_masks else 1,
            exact_alone=not single and getattr(model, "attends_alone", True),
            in_place=backend.kernels,
        )
        self.options = check_caches(model, name, self.options)
        # An array that is not computed yet belongs to the thread that made it, and
        # servers decode in another thread.
        mx.eval(model)
        self.model, logits = without_idle(model, self.options, name)
        self._twins = twins_within(self.model)
        #: The rows that other rows were last placed into; more will follow.
        self.joined: weakref.ref[ModelRows] | None = None
        self.vocab_size = int(logits.shape[-1])
        #: Records the outputs of layers, see :meth:`recording`.
        self.recorder: HiddenStates | None = None
        self.backend = backend
        self.compiled: CompiledForwards | None = None
        if backend.compile_after is not None:
            self.compiled = CompiledForwards(self.model, after=backend.compile_after)
        #: Embeds the images of prompts; None: the model reads text only.
        self.images = images
        self.prefixes: ModelPrefixes | None = None
        #: A model whose caches are stored with this model's, see :meth:`recording`.
        self.beside: ModelRunner | None = None
        if prefix_store is not None:
            self.prefixes = ModelPrefixes(
                prefix_store, self.model, name, self._written_caches
            )

    def _written_caches(self) -> list[Any]:
        """The caches of a row after one token, not computed."""
        caches = make_batch_caches(self.model, 1, self.options, self.name)
        self.model(mx.array([[0]]), cache=caches)
        return caches

    def recording(
        self,
        layers: Sequence[int],
        beside: ModelRunner | None = None,
        *,
        whole: bool = True,
    ) -> ModelRunner:
        """A runner that also gives the outputs of some layers.

        A prefix that is reused has no hidden states. So prefixes are stored together
        with the caches of the draft head that has read these states. Without such
        caches, no prefixes are stored.

        Args:
            layers: counted from 0, or from the last with -1, -2, ... With none, this
                runner is returned.
            beside: the draft head, whose caches have an entry for each token.
            whole: whether outputs for whole prompts are needed; otherwise those for
                each prompt's last token are enough, and prefixes are reused.

        Raises:
            UnsupportedModelError: the model has no such layer, or layers of its
                architecture cannot be recorded.
        """
        if not layers:
            return self
        runner = self.without_prefixes() if whole else copy.copy(self)
        runner.model, runner.recorder = record_layers(self.model, layers, self.name)
        runner._twins = twins_within(runner.model)
        caches = make_batch_caches(self.model, 1, self.options, self.name)
        runner.model(mx.array([[0]]), cache=caches)  # built, not computed
        runner.recorder.check(self.name)
        runner.beside = beside
        if beside is not None and self.prefixes is not None:
            runner.prefixes = ModelPrefixes(
                self.prefixes.store,
                self.model,
                self.name,
                lambda: [*self._written_caches(), *beside._written_caches()],
                beside.model,
            )
        if runner.compiled is not None:
            runner.compiled = runner.compiled.of(runner.model, runner.recorder)
        return runner

    def with_tails(self) -> ModelRunner:
        """A runner of a draft, whose caches have tails where those are faster."""
        runner = copy.copy(self)
        if runner.compiled is None:  # graphs would begin with what is in tails
            model, name, options = self.model, self.name, self.options
            runner.options = with_tails(model, name, options, self.backend)
        return runner

    def without_prefixes(self) -> ModelRunner:
        """A runner that neither stores nor reuses prefixes."""
        runner = copy.copy(self)
        runner.prefixes = None
        return runner

    def paced(self, pace: Pace) -> ModelRunner:
        """A runner whose prefill chunks follow a pace, in caches for the widest."""
        runner = copy.copy(self)
        runner.pace = pace
        return runner

    def in_steps(self, size: int) -> ModelRunner:
        """A runner whose prefill chunks have at most ``size`` tokens of a row."""
        runner = copy.copy(self)
        runner.prefill_step_size = size
        return runner

    def rows(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_round: int,
        max_length: int,
        last: Sequence[int] | None = None,
        reuses: bool = True,
        single_stays: bool = False,
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> ModelRows:
        """Rows for ``prompts``; nothing is computed yet.

        Args:
            max_round: the most tokens that a decode round writes.
            max_length: the most tokens that a row can ever hold, without prefill's
                padding.
            last: the token after each prompt, if known.
            reuses: whether prefixes are stored and reused.
            single_stays: whether a token that was written alone is taken back only
                from rows that have ended.
            images: those in each prompt; empty: there are none.
        """
        share_weights(self._twins)
        if self.compiled is not None:
            self.compiled.look_at_weights()
        longest = max(map(len, prompts), default=0)
        row_images = RowImages(self.images, self.row_inputs, prompts, images)
        whole = round_up(row_images.longest, self.options.read_bucket)
        options = replace(
            self.options,
            max_write=max(
                self.prefill_step_size,
                whole,
                max_round + self.backend.pad_single_token,
            ),
            single_stays=single_stays,
        )
        padded = self._padded(longest, whole, len(prompts))
        most = self._bound(max(max_length, padded))
        rows = ModelRows(
            self, row_images.blank(prompts), options, max_round, most, row_images
        )
        if reuses and self.prefixes is not None:
            known_as = self._known_as(row_images.named(prompts, self.vocab_size), last)
            rows.session = self.prefixes.begin(
                known_as, max_write=options.max_write, branches=row_images.ends
            )
        return rows

    def _known_as(
        self, prompts: Sequence[Sequence[int]], last: Sequence[int] | None
    ) -> Sequence[Sequence[int]]:
        """Keys of prefixes: tokens, or pairs of tokens if a head's entry reads two."""
        beside = self.beside
        if beside is None or not getattr(beside.model, "reads_following", False):
            return prompts
        ends = last or [0] * len(prompts)
        return [
            [a * self.vocab_size + b for a, b in pairwise([*prompt, end])]
            for prompt, end in zip(prompts, ends, strict=True)
        ]

    def chunk(self, remaining: int, num_rows: int = 1) -> int:
        """The width of the next prefill chunk, with ``remaining`` tokens of a row."""
        bucket = self.options.read_bucket
        return chunk_width(remaining, self.step(num_rows), bucket)

    def step(self, num_rows: int = 1) -> int:
        """The most tokens of each of ``num_rows`` rows in the next prefill chunk."""
        size = self.prefill_step_size
        if self.pace is not None:
            size = min(size, self.pace.step)
        return self.backend.prefill_step(size, num_rows)

    def _bound(self, length: int) -> int:
        """The most slots of caches for rows of up to ``length`` tokens.

        It is a multiple of the read bucket, so that many requests have the same bound,
        and their forwards the same shapes.
        """
        return round_up(length, self.options.read_bucket)

    def _padded(self, length: int, longest_image: int = 0, num_rows: int = 1) -> int:
        """Slots that prefill writes for a row of ``length`` tokens."""
        step = self.backend.prefill_step(self.prefill_step_size, num_rows)
        # A chunk can begin after any prefix, and end before an image.
        if self.prefixes is not None or longest_image:
            return length + max(step, longest_image)
        return padded_length(length, step, self.options.read_bucket)


class Scores(Protocol):
    """What reads hidden states of prompts: :mod:`specdec.spec_decode.prompt_scores`."""

    @property
    def rows(self) -> Collection[int]: ...

    def watching(self, model: nn.Module) -> nn.Module: ...

    def take(self, done: Sequence[int], valid: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class EndedRow:
    """A row that has ended, whose tokens may be stored.

    Args:
        slot: where it is.
        begin: tokens of its prompt that were prefilled: all but the last.
        tokens: its committed tokens after these, those of rounds that were not read
            left out. Caches hold all but the last.
        excess: how many tokens at their end are better left out, because no later
            prompt has them; fewer than the last round committed.
        rounds: the number of draft tokens of each round that has the row and was not
            read.
    """

    slot: int
    begin: int
    tokens: Sequence[int]
    excess: int
    rounds: Sequence[int]


class ModelRows:
    """The caches of some rows of a model, and forwards through them."""

    #: Whether anyone reads the hidden states, if layers are recorded.
    records: bool = True

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        options: CacheOptions,
        max_round: int,
        max_length: int,
        images: RowImages,
    ):
        self.runner = runner
        self._images = images
        #: The most slots of a row, prefill's padding included.
        self.max_length = max_length
        options = replace(options, max_length=max_length)
        self._prompts = prompts
        self._memo = Memo()
        self._caches = make_batch_caches(
            runner.model, len(prompts), options, runner.name, self._memo
        )
        known = [] if runner.compiled is None else runner.compiled.dtypes
        for cache, dtype in zip(members(self._caches), known, strict=False):
            cache.dtype = dtype
        beside = None if runner.joined is None else runner.joined()
        if beside is not None:
            for cache, other in zip(self._caches, beside._caches, strict=True):
                cache.begin_like(other)
        self._max_round, self._single_stays = max_round, options.single_stays
        #: Hidden states of the last forward, shape (B, S, D), if they are read.
        self.hidden: mx.array | None = None
        #: Tokens of every row that the last prefill chunk wrote, and that all chunks
        #: so far have written.
        self.written: Sequence[int] = [0] * len(prompts)
        self.done: Sequence[int] = [0] * len(prompts)
        #: Tokens of every row that were found in the prefix store.
        self.reused = [0] * len(prompts)
        #: Finds and stores prefixes.
        self.session: PrefixSession | None = None
        #: The rows of :attr:`ModelRunner.beside`, stored in the same prefixes.
        self.beside: ModelRows | None = None
        # Stores the tokens of each row at its end; None: nothing is stored.
        self._finish: list[Callable[..., None] | None] = [None] * len(prompts)

    def separate(
        self, salts: Sequence[str | None], clients: Sequence[str | None]
    ) -> None:
        """Share prefixes only among rows of one salt, and answers of one client.

        Call this before prefill.

        Args:
            clients: whose answers each row may reuse; ``None``: those of its salt.
        """
        if self.session is not None:
            self.session.separate(salts, clients)

    @property
    def offset(self) -> mx.array:
        """Tokens kept by every row, shape (B,)."""
        offset: mx.array = self._caches[0].offset
        return offset

    @property
    def single_stays(self) -> bool:
        """Whether a token that was written alone is taken back only from ended rows."""
        recurrent = map(_is_recurrent, members(self._caches))
        return self._single_stays and any(recurrent)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.offset.shape[0])

    @property
    def new_shapes(self) -> int:
        """Forwards of the model so far whose shapes were new to ``runner.compiled``."""
        return 0 if self.runner.compiled is None else self.runner.compiled.new_shapes

    @property
    def nbytes(self) -> int:
        """Bytes that the caches have allocated."""
        return sum(c.nbytes for c in self._caches)

    def prefill(self, scores: Scores | None = None) -> Iterator[bool]:
        """Hand the prompts to the device, chunk by chunk. They may be empty.

        Rows are padded on the right to the chunk's width. A row whose prompt is
        complete writes padding, which is taken back at once. Logits are not computed.

        Args:
            scores: is shown every chunk of the rows that it scores, which reuse no
                prefix.

        Yields:
            After each chunk, whether another one follows.
        """
        if self.runner.beside is not None and self.beside is None:
            self.session = None
        for _ in self._restore(() if scores is None else scores.rows):
            yield True
        model = self.runner.model
        if scores is not None:
            model = scores.watching(model)
        lengths = [len(p) for p in self._prompts]
        done = list(self.reused)
        in_flight: deque[Any] = deque()
        while done != lengths:
            rest = [n - d for n, d in zip(lengths, done, strict=True)]
            width = self.runner.chunk(max(rest), len(rest))
            # After narrower chunks, padding could pass the end of the caches.
            width = min(width, self.max_length - done[rest.index(max(rest))])
            valid = [min(n, width) for n in self._before_stops(rest, done)]
            valid = self._images.whole(done, valid)
            if max(valid) > width:
                width = round_up(max(valid), self.runner.options.read_bucket)
            chunk = [
                [*prompt[first : first + n], *([0] * (width - n))]
                for prompt, first, n in zip(self._prompts, done, valid, strict=True)
            ]
            for _ in self._images.encode(done, valid):
                self.hidden = None  # those of the chunk before were shown
                yield True  # rows that decode do not wait for the whole image
            start, new_shapes = time.perf_counter(), self.new_shapes
            tokens = mx.array(chunk)
            inputs = self._images.inputs(model, tokens, done, valid)
            memo = self._memo
            memo.until, memo.in_windows = self._images.until(done, valid, width)
            usual = scores is None and not inputs and memo.until is None
            # Masks of unknown dtype are boolean. Where attention reads no such masks,
            # it selects by them: one more kernel to compile.
            usual &= self.runner.backend.boolean_masks or all(
                cache.dtype is not None for cache in members(self._caches)
            )
            if not (usual and self._compiled((tokens,), valid=valid)):
                self._padded_forward(tokens, valid, model=model, **inputs)
            memo.until = None
            if scores is not None:
                scores.take(done, valid)
            before, done = done, [d + n for d, n in zip(done, valid, strict=True)]
            maybe_quantize(self._caches, self.runner.options, max(done))
            self._evaluate_by_layers(in_flight, len(rest) * width)
            if self.runner.pace is not None:
                seconds = time.perf_counter() - start
                if self.new_shapes > new_shapes:
                    seconds -= self.runner.backend.new_shape_seconds
                self.runner.pace.take(len(rest), width, seconds)
            self.written, self.done = valid, done
            if self.beside is None:
                self._record(before, done, width)
            yield done != lengths
            if self.beside is not None:  # the head has read the chunk by now
                self._record(before, done, width)
        # What is held could not be written in place.
        in_flight.clear()
        self.note_lengths(max(lengths), min(lengths))
        # Rings and masks are as wide as a chunk; free what only prefill needed.
        self.resize(self._max_round)
        self._memo.clear()
        if self.runner.compiled is not None and any(done):
            dtypes = [cache.dtype for cache in members(self._caches)]
            self.runner.compiled.dtypes = dtypes
        if self.session is not None and self.runner._stores_answers:
            finish = self.session.finish
            self._finish = [partial(finish, i) for i in range(len(lengths))]

    def store(self, ended: Sequence[EndedRow]) -> None:
        """Store what rows that have ended hold, for later prompts that go on from it.

        Copies are handed to the device, which nothing waits for. Rejected tokens are
        not stored. Where no rings or states are left of a row's end, nothing is. The
        rows cannot go on afterwards.
        """
        ended = [row for row in ended if self._finish[row.slot] and row.tokens[1:]]
        if ended:
            self._settle(self._every_cache())
        caches = members(self._every_cache())
        states = [c for c in caches if _is_recurrent(c)]
        if not all(cache.remembers for cache in states):  # rows have moved since
            ended = [row for row in ended if not row.excess]
        # All at once, since computing the states of one row settles those of all.
        excess = {row.slot: row.excess for row in ended}
        if any(excess.values()):
            for cache in states:
                cache.trim_per_sequence(
                    [excess.get(i, 0) for i in range(self.num_rows)]
                )
        for row in ended:
            self._store(row, states)

    def _store(self, row: EndedRow, states: Sequence[BatchRecurrentCache]) -> None:
        finish, prefixes = self._finish[row.slot], self.runner.prefixes
        assert finish is not None
        assert prefixes is not None
        if prefixes.form.has_ends and len(row.rounds) > 1:
            return  # a ring can take back one round
        end = len(row.tokens) - 1 - row.excess
        before = bool(row.rounds)
        if states and before and not all(c.remembers for c in states):
            # A round of one token, whose states stay, has read the last one.
            if self.beside is not None or any(row.rounds):
                return
            before, end = False, end + 1
        last = row.tokens[end : end + 1] or [0]
        (answer,) = self.runner._known_as([row.tokens[:end]], last)
        finish(self._every_cache(), row.slot, answer, row.begin, before=before)

    def resize(self, max_write: int) -> None:
        """Prepare for writes of up to ``max_write`` tokens (rings change size)."""
        # A ring must be able to take back padding and all of a round's tokens.
        max_write += self.runner.backend.pad_single_token
        for cache in self._caches:
            cache.resize(max_write)

    def evaluate(self) -> None:
        """Start computing what was written, without waiting for it."""
        mx.async_eval([c.written for c in self._caches])

    def _settle(self, caches: Sequence[Any]) -> None:
        """Hand writes in place over at once; each cache would do so by itself."""
        if self.runner.options.in_place:
            flat = [c for c in members(caches) if not _is_recurrent(c)]
            mx.async_eval([c.written for c in flat])

    def _evaluate_by_layers(self, in_flight: deque[Any], num_tokens: int) -> None:
        """Start computing a prefill chunk; wait until all but a few layers are done.

        MLX runs up to a thousand operations ahead of the device, and holds all that
        these compute: unpacked weights and hidden states of many layers.

        Args:
            in_flight: states of layers that the device may still be computing.
            num_tokens: tokens of the chunk, padding included.
        """
        if not self.runner.backend.prefills_by_layers:
            self.evaluate()
            return
        ahead = self.runner.backend.layers_ahead(num_tokens)
        for cache in self._caches:
            written = cache.written
            mx.async_eval(written)
            in_flight.append(written)
            while len(in_flight) > ahead:
                mx.eval(in_flight.popleft())

    def _restore(self, without: Collection[int]) -> Iterator[None]:
        """Begin with a prefix from the store; yield while it is read."""
        if self.session is None:
            return
        yield from self.session.find(without)
        caches, num_own = self.session.refill(self._every_cache()), len(self._caches)
        self._caches, others = caches[:num_own], caches[num_own:]
        self.reused = self.session.reused
        if self.beside is not None:
            self.beside._caches, self.beside.done = others, self.reused

    def _every_cache(self) -> list[Any]:
        """The caches of this model, then the caches that are stored with them."""
        others = [] if self.beside is None else self.beside._caches
        return [*self._caches, *others]

    def _record(self, before: Sequence[int], after: Sequence[int], width: int) -> None:
        """Store the prefixes that a chunk has completed."""
        if self.beside is not None and list(self.beside.done) != list(after):
            self.session = None
        if self.session is not None:
            self.session.record(self._every_cache(), before, after, width)

    def _before_stops(self, rest: list[int], done: Sequence[int]) -> list[int]:
        """How many of the ``rest`` tokens come before a point where chunks end."""
        if self.session is None:
            return rest
        stops = self.session.stops
        each = zip(rest, done, stops, strict=True)
        return [min(n, stop - d) if d < stop else n for n, d, stop in each]

    def forward(self, tokens: mx.array) -> mx.array:
        """Write ``tokens`` of shape (B, S) after every row; return logits (B, S, V)."""
        rows, width = tokens.shape
        padding = int(self.runner.backend.pad_single_token and width == 1)
        shift = self._images.shift
        if self.runner.compiled is not None:
            inputs = tokens, *shift
            done = self.runner.compiled(inputs, self._caches, padding=padding)
            if done is not None:
                written: mx.array = done[0]
                self.hidden = done[1] if self.records else None
                return written
        if not padding:
            return self._forward(tokens, *shift)
        tokens = mx.broadcast_to(tokens, (rows, 1 + padding))
        logits = self._padded_forward(tokens, [1] * rows, *shift)
        if self.hidden is not None:
            self.hidden = self.hidden[:, :width]
        return logits[:, :width]

    def _forward(
        self,
        tokens: mx.array,
        *more: Any,
        model: Any = None,
        **inputs: mx.array,
    ) -> mx.array:
        model = self.runner.model if model is None else model
        logits: mx.array = model(tokens, *more, cache=self._caches, **inputs)
        if self.runner.recorder is not None:
            hidden = self.runner.recorder.take()
            self.hidden = hidden if self.records else None
        return logits

    def _padded_forward(
        self, tokens: mx.array, valid: Sequence[int], *more: Any, **inputs: Any
    ) -> mx.array:
        """Write the first ``valid[i]`` tokens of row ``i``; the rest is padding."""
        with self._padded(valid):
            return self._forward(tokens, *more, **inputs)

    @contextmanager
    def _padded(self, valid: Sequence[int]) -> Iterator[None]:
        """Within the context, row ``i`` keeps the first ``valid[i]`` tokens written."""
        for cache in self._caches:
            cache.prepare(lengths=valid)
        yield
        for cache in self._caches:
            cache.finalize()

    def call(
        self,
        name: str,
        *arrays: mx.array,
        lengths: Sequence[int] | None = None,
        options: tuple[Hashable, ...] = (),
        keeps: bool = True,
    ) -> Any:
        """Call a method of the model with ``arrays``, the caches and ``options``.

        Args:
            lengths: how many of the written tokens each row keeps; ``None``: all.
            keeps: whether rows keep any; otherwise all are taken back.
        """
        method, valid = getattr(self.runner.model, name), list(lengths or ())
        how = {"options": options, "keeps": keeps, "valid": valid}
        done = self._compiled(arrays, name=name, **how)
        if done is not None:
            result = done[0]
        elif lengths is None:
            result = method(*arrays, self._caches, *options)
            if not keeps:
                width = arrays[0].shape[1]
                self.trim_per_sequence([width] * self.num_rows, width)
        else:
            with self._padded(lengths):
                result = method(*arrays, self._caches, *options)
        if lengths is not None:
            self.done = [d + n for d, n in zip(self.done, lengths, strict=True)]
            maybe_quantize(self._caches, self.runner.options, max(self.done, default=0))
        return result

    def _compiled(
        self, arrays: Sequence[mx.array], **how: Any
    ) -> tuple[Any, mx.array | None] | None:
        """The result of a compiled forward; ``None``: it must run as usual."""
        if self.runner.compiled is None:
            return None
        done = self.runner.compiled(arrays, self._caches, **how)
        if done is not None and self.runner.recorder is not None:
            self.hidden = done[1] if self.records else None
        return done

    def kept(self, place: int) -> tuple[Any, tuple[Any, Any, mx.array]]:
        """The cache at a place, and what its rows' last tokens attend to.

        See :meth:`specdec.cache.core.CacheCore.kept`.
        """
        cache = self._caches[place]
        return cache, cache.kept()

    def checkpoint(self) -> None:
        """Let the next trim take back whatever is written from now on."""
        for cache in self._caches:
            cache.checkpoint()

    def skip(self, num_tokens: int) -> None:
        """Let rows that were written to have ``num_tokens`` more, of zeros."""
        maybe_quantize(self._caches, self.runner.options, num_tokens)
        for cache in self._caches:
            cache.skip(num_tokens)

    def fits(self, num_tokens: int) -> bool:
        """Whether every row has room for ``num_tokens`` more tokens."""
        # Ask every cache: each may learn its rows' lengths when it is asked.
        answers = [cache.fits(num_tokens) for cache in self._caches]
        return all(answers)

    def trim_per_sequence(
        self, n: mx.array | Sequence[int], at_most: int, fewest: int = 0
    ) -> None:
        """Take back ``n[i]`` tokens that were just written to row ``i``.

        Args:
            n: each is ``fewest`` to ``at_most``.
        """
        for cache in self._caches:
            cache.trim_per_sequence(n, at_most, fewest, fresh=True)

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Tell the caches how long their rows are, as far as the host knows."""
        for cache in self._caches:
            cache.note_lengths(longest=longest, shortest=shortest)
        if self.runner.options.kv_bits is not None:
            maybe_quantize(self._caches, self.runner.options, longest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in that order, and free the memory of the others.

        This waits for the device after each layer, so that only one layer is held
        twice, and the memory is free before other rows need it.
        """
        self._images.filter(rows)
        self._finish = [self._finish[row] for row in rows]
        for cache in self._caches:
            cache.filter(rows)
            mx.eval(cache.written)

    def place(self, rows: Sequence[int], other: ModelRows) -> None:
        """Put the first rows of ``other``, which is not used again, into ``rows``."""
        self._images.place(rows, other._images)
        self._settle(self._caches)
        place_caches(self._caches, rows, other._caches)
        for i, row in enumerate(rows):
            self._finish[row] = other._finish[i]
        self.runner.joined = weakref.ref(self)

    def reset(self, rows: Sequence[int]) -> None:
        """Empty the given rows."""
        self._images.reset(rows)
        for row in rows:
            self._finish[row] = None
        for cache in self._caches:
            cache.reset(rows)

    def clean(self, rows: Sequence[int]) -> None:
        """Zero what the last rounds wrote after the given rows' tokens.

        This waits for the device after each layer, so that only one layer is held
        twice.
        """
        width = self._max_round + self.runner.backend.pad_single_token
        for cache in self._caches:
            cache.clean(rows, width)
            mx.eval(cache.written)

    def make_finite(self, rows: Sequence[int]) -> None:
        """Zero whatever is not finite in the given rows, layer by layer."""
        for cache in self._caches:
            cache.make_finite(rows)
            mx.eval(cache.written)

    def extend(self, other: ModelRows) -> None:
        """Append the rows of ``other``, which is not used afterwards."""
        self._images.extend(other._images)
        self._finish += other._finish
        extend_caches(self._caches, other._caches)


def _is_recurrent(cache: Any) -> TypeGuard[BatchRecurrentCache]:
    return isinstance(cache, BatchRecurrentCache)
