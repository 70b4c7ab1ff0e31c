"""A whole run of ``specdec distill``: write, learn, measure, export."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import backend
from ..decoder import wired_memory
from ..errors import ConfigError, ModelError
from ..memory.sizes import format_size
from ..models import default_target, load, load_draft
from ..models.fingerprint import fingerprint
from ..models.precision import DTYPES
from ..models.runner import ModelRunner
from ..models.trunk import layers_of
from ..prompts import Prompt, encode_all, read_prompts, read_text
from . import checkpoint
from .blocks import Shapes, make_blocks
from .corpus import GREEDY, Corpus, Document
from .evaluate import HeldOut, measure_rounds
from .export import export, write_card
from .loss import ChunkedLoss
from .packing import Packing
from .plan import engine_config, longest_document, sizes_of
from .schedule import Budget
from .states import TargetStates
from .student import choose_layers, head_of, make_student, text_model
from .train import Recipe, Trainer, count
from .wave import Author, Wave, text_documents

Say = Callable[[str], None]

# One in so many user turns is held out.
_HELD_OUT = 64
_MOST_HELD_OUT = 256
_HOLDOUT_TOKENS = 128
_CHECKPOINT_SECONDS = 60
_LINE_SECONDS = 10
# Measurements on the way.
_MEASUREMENTS = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Args:
        target: folder, hub id or file; ``None``: the default one.
        out: the draft's folder; what it is made of is in ``work`` there.
        layers: a number of layers, or which.
        budget: of training.
        data_minutes, data_tokens: what the target writes for at most; both, or
            neither, may be given: whichever comes first. By default half of the
            training's minutes, or an eighth of its tokens.
        prompts: files of prompts to answer and learn from.
        texts: files of text to learn from.
        holdout: files of prompts to measure with, never learnt from.
        data: folder of what the target writes; ``None``: in ``out``.
        resume: go on from the checkpoint there.
        bits: of the layers that are stored.
        layers_only: store no embedding.
        dtype: that models compute in; ``None``: bfloat16, on a CPU float32.
        writers, block_tokens: sizes, where the default ones are not wanted.
        recipe: how the draft learns.
        wave: how the target writes.
        rounds: prompts of each holdout file to decode at the end.
        num_draft_tokens: of these rounds.
        command: for the card.
    """

    target: str | None
    out: Path
    layers: str = "4"
    budget: Budget
    data_minutes: float | None = None
    data_tokens: int | None = None
    prompts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    holdout: tuple[str, ...] = ()
    data: Path | None = None
    resume: bool = False
    bits: int | None = None
    layers_only: bool = False
    dtype: str | None = None
    writers: int | None = None
    block_tokens: int | None = None
    recipe: Recipe = Recipe()
    wave: Wave = Wave(batch_size=1)
    rounds: int = 128
    num_draft_tokens: int = 4
    command: str = "specdec distill"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}"
            )
        if self.bits is not None:
            Packing(self.bits)

    @property
    def packing(self) -> Packing | None:
        """How layers are stored."""
        return None if self.bits is None else Packing(self.bits)


class Job:
    """A target, and a draft that is made for it.

    Args:
        options: what the user asked for.
        say: shows a line of progress.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
        ConfigError: it has no such layers.
        ModelError: the target cannot be loaded, or a file cannot be read or written.
    """

    def __init__(self, options: Options, say: Say):
        self.options = options
        self._say = say
        # What can be wrong is found before a model is loaded.
        self._holdout = {
            Path(file).stem: read_prompts(file) for file in options.holdout
        }
        if len(self._holdout) < len(options.holdout):
            raise ConfigError("two holdout files have one name: rename one")
        self._given = [
            prompt for file in options.prompts for prompt in read_prompts(file)
        ]
        self._texts = [read_text(file) for file in options.texts]
        where = backend.defaults().name
        self.dtype = options.dtype or ("float32" if where == "cpu" else "bfloat16")
        self.target = load(options.target or default_target(), dtype=self.dtype)
        self._text_model = text_model(self.target)
        num_layers = len(layers_of(self.target.model))
        self.student = make_student(
            self.target, choose_layers(options.layers, num_layers)
        )
        self._head = head_of(self._text_model)
        self.sizes = sizes_of(
            self.target.model,
            self.target.config,
            self.target.name,
            vocab_size=self._head.shape[0],
            writers=options.writers,
            block_tokens=options.block_tokens,
        )
        self._wave = replace(options.wave, batch_size=self.sizes.writers)
        self._fingerprint = fingerprint(self.target.model)
        self._work = options.out / "work"

    def describe(self) -> list[str]:
        """What the run is, in lines: sizes, memory, budgets."""
        options, sizes = self.options, self.sizes
        learnt = count(self.student.parameters)
        whole = count(self.target.model.parameters())
        width, itemsize = self._head.shape[1], DTYPES[self.dtype].size
        logits = 6 * sizes.chunk * self._head.shape[0] * 4
        minutes, tokens = self._data_budget()
        bounds = []
        if minutes < float("inf"):
            bounds.append(f"{minutes:g} minutes")
        if tokens < float("inf"):
            bounds.append(f"{tokens:.0f} tokens")
        budget = options.budget
        return [
            f"target:   {self.target.name}, {whole / 1e6:.1f} M parameters",
            f"draft:    layers {', '.join(map(str, self.student.layers))}, "
            f"{learnt / 1e6:.1f} M parameters to learn",
            f"writing:  {sizes.writers} rows at once, up to {' or '.join(bounds)}",
            f"training: {sizes.block_tokens} tokens a step, up to "
            + (
                f"{budget.minutes:g} minutes"
                if budget.minutes is not None
                else f"{budget.tokens} tokens"
            ),
            f"memory:   target {format_size(whole * itemsize)}, draft and optimizer "
            f"{format_size(learnt * (16 + itemsize))}, a chunk's logits "
            f"{format_size(logits)}, target states "
            f"{format_size(width * itemsize)} a token, up to "
            f"{format_size(sizes.states_bytes)}",
        ]

    # -- the steps ----------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Do all of it.

        Returns:
            The card, as it was written.

        Raises:
            ModelError: a file cannot be written; what was there before is whole.
        """
        with wired_memory():
            corpus, names = self._write()
            held_out, blocks, documents = self._learnt(corpus, names)
            loss = ChunkedLoss(
                self._head, hard=self.options.recipe.hard, chunk=self.sizes.chunk
            )
            states = TargetStates(
                self._text_model, blocks, budget=self.sizes.states_bytes
            )
            trainer = Trainer(
                self.student,
                states,
                blocks,
                loss,
                replace(self.options.recipe, packing=self.options.packing),
                self.options.budget,
                dtype=DTYPES[self.dtype],
            )
            self._train(trainer, held_out, loss, corpus.digest(names))
            trainer.install()
            agreement = {h.name: h.measure(self.student, loss) for h in held_out}
            trainer.install(packed=False)
            own = sum(len(d.tokens) for d in documents if d.kind <= GREEDY + 1)
            card = self._card(trainer, agreement) | {
                "data": {
                    "documents": len(documents),
                    "tokens": sum(len(d.tokens) for d in documents),
                    "written_by_target": own,
                    "digest": corpus.digest(names),
                }
            }
            export(
                self.options.out,
                self.student,
                self.target,
                card,
                packing=self.options.packing,
                layers_only=self.options.layers_only,
            )
            self._say(f"wrote {self.options.out}")
            return self._measure_rounds(card)

    def _write(self) -> tuple[Corpus, list[str]]:
        """Have the target write until there is enough; the files to learn from."""
        options = self.options
        corpus = Corpus(options.data or self._work / "data", self._fingerprint)
        runner = ModelRunner(
            self.target.model,
            self.target.name,
            engine_config(self.sizes),
            backend.defaults(),
        )
        author = Author(runner, self.target.tokenizer, self._wave)
        names = self._answer_given(corpus, author)
        if not (options.resume and (self._work / checkpoint.NAME).exists()):
            self._write_waves(corpus, author)
        for name, prompts in self._holdout.items():
            self._answer(corpus, author, f"holdout-{name}", prompts, sampled=False)
        mx.clear_cache()
        return corpus, [*corpus.waves, *names]

    def _write_waves(self, corpus: Corpus, author: Author) -> None:
        minutes, tokens = self._data_budget()
        while corpus.num_tokens < tokens and corpus.seconds < 60 * minutes:
            start = time.perf_counter()
            documents = author.wave(len(corpus.waves))
            seconds = time.perf_counter() - start
            corpus.add(corpus.next_wave, documents, seconds)
            written = sum(len(d.tokens) for d in documents)
            left = min(
                60 * minutes - corpus.seconds,
                (tokens - corpus.num_tokens) * seconds / max(written, 1),
            )
            self._say(
                f"writing: wave {len(corpus.waves)}, {corpus.num_tokens / 1e6:.2f} M "
                f"tokens, {written / seconds:.0f} tokens/s, {clock(left)} left"
            )
            if not written and len(corpus.waves) > 2:
                raise ModelError(
                    f"{self.target.name} writes nothing that can be learnt from: give "
                    "--prompts or --text"
                )

    def _data_budget(self) -> tuple[float, float]:
        """Minutes and tokens, each infinite where it is no bound."""
        options, budget = self.options, self.options.budget
        minutes, tokens = options.data_minutes, options.data_tokens
        if minutes is None and tokens is None:
            if budget.minutes is not None:
                minutes = budget.minutes / 2
            elif budget.tokens is not None:
                tokens = -(-budget.tokens // 8)
        return (
            float("inf") if minutes is None else minutes,
            float("inf") if tokens is None else tokens,
        )

    def _answer_given(self, corpus: Corpus, author: Author) -> list[str]:
        """Answers to the user's prompts, and the user's texts, as files."""
        names = self._answer(corpus, author, "prompts", self._given, sampled=True)
        if self._texts:
            most = longest_document(self._wave)
            documents = text_documents(
                self.target.tokenizer, self._texts, max_tokens=most
            )
            name = f"text-{_digest(self._texts)}"
            if not corpus.has(name):
                corpus.add(name, documents)
            names.append(name)
        return names

    def _answer(
        self,
        corpus: Corpus,
        author: Author,
        kind: str,
        prompts: Sequence[Prompt],
        *,
        sampled: bool,
    ) -> list[str]:
        names = []
        encoded = encode_all(self.target.tokenizer, prompts)
        for first in range(0, len(encoded), self.sizes.writers):
            part = [e.token_ids for e in encoded[first : first + self.sizes.writers]]
            name = f"{kind}-{_digest(part)}"
            if not corpus.has(name):
                self._say(f"answering {len(part)} prompts ({kind})")
                corpus.add(name, author.answers(part, 0, sampled=sampled))
            names.append(name)
        return names

    def _learnt(
        self, corpus: Corpus, names: list[str]
    ) -> tuple[list[HeldOut], list[Any], list[Document]]:
        """What is held out, and blocks of all else."""
        kept_back: dict[str, list[Document]] = {}
        for name, prompts in self._holdout.items():
            found: list[Document] = []
            encoded = encode_all(self.target.tokenizer, prompts)
            for first in range(0, len(encoded), self.sizes.writers):
                part = [
                    e.token_ids for e in encoded[first : first + self.sizes.writers]
                ]
                found += corpus.read(f"holdout-{name}-{_digest(part)}")
            kept_back[name] = [_cut(d, _HOLDOUT_TOKENS) for d in found]
        forbidden = {_prompt(d) for each in kept_back.values() for d in each}
        documents, own = [], []
        for document in corpus.documents(names):
            prompt = _prompt(document)
            if prompt in forbidden:
                continue
            held = int(_digest([prompt])[:8], 16) % _HELD_OUT == 0
            if held and len(own) < _MOST_HELD_OUT:
                own.append(document)
            elif not held:
                documents.append(document)
        if not documents:
            raise ModelError("there is nothing to learn from: raise the data's budget")
        seed = self.options.recipe.seed
        shapes = Shapes(self.sizes.block_tokens, 512, self.sizes.chunk)
        blocks = make_blocks(documents, shapes, seed=seed)
        # Of what is held out, answers alone are measured.
        answers = replace(shapes, prompt_weight=0.0)
        kept_back = {"own": [d for d in own if d.kind == GREEDY], **kept_back}
        held_out = [
            HeldOut(
                name,
                self._text_model,
                make_blocks(each, answers, seed=seed),
                budget=self.sizes.states_bytes // 4,
            )
            for name, each in kept_back.items()
            if each
        ]
        return held_out, blocks, documents

    def _train(
        self,
        trainer: Trainer,
        held_out: Sequence[HeldOut],
        loss: ChunkedLoss,
        digest: str,
    ) -> None:
        identity = self._identity(digest)
        if self.options.resume:
            found = checkpoint.load(self._work, identity)
            if found is not None:
                trainer.restore(*found)
                self._say(f"going on behind step {trainer.progress.step}")
        saved = shown = time.perf_counter()
        tokens = trainer.progress.tokens
        measured = int(trainer.share * _MEASUREMENTS)
        try:
            while not trainer.done:
                trainer.step()
                now = time.perf_counter()
                if int(trainer.share * _MEASUREMENTS) > measured or trainer.done:
                    measured = int(trainer.share * _MEASUREMENTS)
                    self._measure(trainer, held_out, loss)
                if now - shown > _LINE_SECONDS or trainer.done:
                    rate = (trainer.progress.tokens - tokens) / max(now - shown, 1e-9)
                    self._show(trainer, rate)
                    shown, tokens = time.perf_counter(), trainer.progress.tokens
                if now - saved > _CHECKPOINT_SECONDS:
                    self._save(trainer, identity)
                    saved = time.perf_counter()
        finally:
            # Also where it is interrupted.
            if trainer.progress.step:
                self._save(trainer, identity)

    def _identity(self, digest: str) -> dict[str, Any]:
        """What a checkpoint must have been made with."""
        recipe = self.options.recipe
        return {
            "target": self._fingerprint,
            "layers": list(self.student.layers),
            "data": digest,
            "dtype": self.dtype,
            "block_tokens": self.sizes.block_tokens,
            "chunk": self.sizes.chunk,
            "bits": self.options.bits,
            "seed": recipe.seed,
            "learning_rate": recipe.learning_rate,
        }

    def _save(self, trainer: Trainer, identity: dict[str, Any]) -> None:
        """Save a checkpoint; what cannot be saved does not end the training."""
        try:
            checkpoint.save(
                self._work,
                parameters=trainer.parameters,
                optimizer=trainer.optimizer_state,
                progress=trainer.progress,
                identity=identity,
            )
        except ModelError as error:
            self._say(f"warning: no checkpoint: {error}")

    def _measure(
        self, trainer: Trainer, held_out: Sequence[HeldOut], loss: ChunkedLoss
    ) -> None:
        trainer.install()
        found = {h.name: h.measure(self.student, loss) for h in held_out}
        progress = trainer.progress
        progress.history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "seconds": progress.seconds,
                **trainer.last(),
                "held_out": found,
            }
        )

    def _show(self, trainer: Trainer, rate: float) -> None:
        progress, last = trainer.progress, trainer.last()
        share = trainer.share
        left = progress.seconds * (1 - share) / share if share else 0.0
        line = (
            f"training: step {progress.step}, {progress.tokens / 1e6:.2f} M tokens, "
            f"{rate:.0f} tokens/s, loss {last['loss']:.3f}, agreement "
            f"{last['agreement']:.3f}, {clock(left)} left"
        )
        if progress.history:
            sets = progress.history[-1]["held_out"].items()
            line += "; held out: " + ", ".join(
                f"{name} {found['agreement']:.3f}" for name, found in sets
            )
        self._say(line)

    def _card(
        self, trainer: Trainer, agreement: dict[str, dict[str, float]]
    ) -> dict[str, Any]:
        progress, recipe = trainer.progress, self.options.recipe
        return {
            "format": "specdec draft",
            "version": 1,
            "target": {
                "name": Path(self.target.name).name,
                "fingerprint": self._fingerprint,
            },
            "layers": list(self.student.layers),
            "parameters": count(trainer.parameters),
            "bits": self.options.bits,
            "dtype": self.dtype,
            "training": {
                "steps": progress.step,
                "tokens": progress.tokens,
                "seconds": progress.seconds,
                "learning_rate": recipe.learning_rate,
                "hard": recipe.hard,
                "block_tokens": self.sizes.block_tokens,
                "history": progress.history,
            },
            "agreement": agreement,
            "rounds": [],
            "command": self.options.command,
            "machine": backend.describe(),
        }

    def _measure_rounds(self, card: dict[str, Any]) -> dict[str, Any]:
        """Decode held-out prompts with what was written; the card with the results."""
        options = self.options
        if not self._holdout or not options.rounds:
            return card
        draft = load_draft(str(options.out), self.target, dtype=self.dtype)
        for name, prompts in self._holdout.items():
            for temperature in (0.0, self._wave.temperature):
                found = measure_rounds(
                    self.target,
                    draft,
                    prompts[: options.rounds],
                    temperature=temperature,
                    num_draft_tokens=options.num_draft_tokens,
                    max_tokens=_HOLDOUT_TOKENS,
                    batch_size=min(64, options.rounds),
                )
                card["rounds"].append({"set": name, **found.to_dict()})
                self._say(
                    f"{name}, temperature {temperature:g}: "
                    f"{found.acceptance_rate:.3f} of draft tokens accepted, "
                    f"{found.acceptance_length:.2f} tokens a round"
                )
                card["embedding"] = "target" if options.layers_only else "own"
                write_card(options.out, card)
        return card


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02d}"


def _digest(values: Any) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:16]


def _prompt(document: Document) -> tuple[int, ...]:
    return document.tokens[: max(document.prompt_length, 16)]


def _cut(document: Document, answer: int) -> Document:
    """The document with at most so many tokens of its answer."""
    kept = document.tokens[: document.prompt_length + answer]
    return replace(document, tokens=kept)
