"""Texts to learn from and to measure with, from the target and from the user."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, ModelError
from ...models import LoadedModel
from ...prompts import Prompt, encode_all, read_prompts, read_text
from .blocks import Block, make_blocks
from .corpus import GREEDY, SAMPLED, Corpus, Document
from .options import Check, DistillOptions, Say
from .wave import Author, text_documents

if TYPE_CHECKING:
    from .plan import TrainingPlan

# One in _HELD_OUT prompts is held out, up to _MOST_HELD_OUT texts.
_HELD_OUT, _MOST_HELD_OUT = 64, 256
# Tokens that are measured of the answer to a prompt of the user's holdout files.
HOLDOUT_TOKENS = 128


@dataclass(frozen=True)
class Sources:
    """The contents of the user's files.

    Args:
        prompts: prompts that the target answers, to learn from.
        texts: texts to learn from.
        holdout: prompts to measure with, by the name of their file.
    """

    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    holdout: dict[str, list[Prompt]]

    @classmethod
    def read(cls, options: DistillOptions) -> Sources:
        """Read the user's files.

        Raises:
            PromptError: a file cannot be read.
            ConfigError: two holdout files have the same name.
        """
        holdout = {Path(file).stem: read_prompts(file) for file in options.holdout}
        if len(holdout) < len(options.holdout):
            raise ConfigError("two holdout files have one name: rename one")
        prompts = [p for file in options.prompts for p in read_prompts(file)]
        texts = [read_text(file) for file in options.texts]
        return cls(tuple(prompts), tuple(texts), holdout)


@dataclass(frozen=True)
class Material:
    """The texts that a run learns from and measures with.

    Args:
        documents: documents to learn from.
        blocks: the same documents as blocks.
        held_out: blocks to measure with, by name; ``own`` are the target's own.
        digest: hash of the files that the documents come from.
    """

    documents: list[Document]
    blocks: list[Block]
    held_out: dict[str, list[Block]]
    digest: str

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(len(d.tokens) for d in self.documents)

    @property
    def written_by_target(self) -> int:
        """Tokens of one epoch in texts that the target wrote."""
        answers = (d for d in self.documents if d.kind in (GREEDY, SAMPLED))
        return sum(len(d.tokens) for d in answers)


class Gatherer:
    """Lets the target write, and gathers all texts.

    Args:
        options: the user's options.
        sources: the contents of the user's files.
        target: the model that writes.
        fingerprint: fingerprint of the target.
        plan: gives the number of rows that write together and the shapes of blocks.
        say: shows a line of progress.
        check: called while the target writes.
    """

    def __init__(
        self,
        options: DistillOptions,
        sources: Sources,
        target: LoadedModel,
        *,
        fingerprint: str,
        plan: TrainingPlan,
        say: Say,
        check: Check,
    ):
        self._options = options
        self._sources = sources
        self._target = target
        self._plan = plan
        self._say = say
        folder = options.data or options.work / "data"
        self._corpus = Corpus(folder, fingerprint, options.topics)
        self._author = Author(
            target.model, target.tokenizer, options, plan.writers, check
        )

    def gather(self, *, write: bool = True) -> Material:
        """Gather all texts; the target writes those that are missing.

        Args:
            write: whether more waves may be written.
        """
        corpus = self._corpus
        names = [
            *self._answered("prompts", self._sources.prompts, sampled=True),
            *self._texts(),
        ]
        if write:
            self._write_waves()
        names = [*corpus.waves, *names]
        held_out = {
            name: [
                _cut(document, HOLDOUT_TOKENS)
                for file in self._answered(f"holdout-{name}", prompts, sampled=False)
                for document in corpus.read(file)
            ]
            for name, prompts in self._sources.holdout.items()
        }
        known = {
            _prompt(d)
            for documents_of_set in held_out.values()
            for d in documents_of_set
        }
        documents, from_target = _held_back(corpus.documents(names), known)
        if not documents:
            raise ModelError("there is nothing to learn from: raise the data's budget")
        sizes = self._plan.block_tokens, self._plan.chunk
        held_out = {"own": [d for d in from_target if d.kind == GREEDY], **held_out}
        seed = self._options.seed
        # Only greedy answers of held-out texts are measured.
        return Material(
            documents,
            make_blocks(documents, *sizes, seed=seed),
            {
                name: make_blocks(documents_of_set, *sizes, seed=seed, prompt_weight=0)
                for name, documents_of_set in held_out.items()
                if documents_of_set
            },
            corpus.digest(names),
        )

    def _write_waves(self) -> None:
        corpus = self._corpus
        minutes, tokens = self._options.data_budget
        while corpus.num_tokens < tokens and corpus.seconds < 60 * minutes:
            start = time.perf_counter()
            documents = self._author.wave(len(corpus.waves))
            seconds = time.perf_counter() - start
            written = sum(len(d.tokens) for d in documents)
            if not written:
                raise ModelError(
                    f"{self._target.name} writes nothing that can be learnt from: give "
                    "--prompts or --text, and --data-tokens 0"
                )
            corpus.add(corpus.next_wave, documents, seconds)
            left = min(
                60 * minutes - corpus.seconds,
                (tokens - corpus.num_tokens) * seconds / written,
            )
            self._say(
                f"writing: wave {len(corpus.waves)}, {corpus.num_tokens / 1e6:.2f} M "
                f"tokens, {written / seconds:.0f} tokens/s, {clock(left)} left"
            )

    def _texts(self) -> list[str]:
        if not self._sources.texts:
            return []
        name = f"text-{_digest(self._sources.texts)}"
        if not self._corpus.has(name):
            documents = text_documents(
                self._target.tokenizer,
                self._sources.texts,
                max_tokens=self._options.longest_document,
            )
            self._corpus.add(name, documents)
        return [name]

    def _answered(
        self, kind: str, prompts: Sequence[Prompt], *, sampled: bool
    ) -> list[str]:
        """Names of the files of answers to prompts; each file has one batch."""
        encoded = [e.token_ids for e in encode_all(self._target.tokenizer, prompts)]
        names = []
        for first in range(0, len(encoded), self._plan.writers):
            part = encoded[first : first + self._plan.writers]
            name = f"{kind}-{_digest(part)}"
            if not self._corpus.has(name):
                self._say(f"answering {len(part)} prompts ({kind})")
                documents = self._author.answers(part, 0, sampled=sampled)
                self._corpus.add(name, documents)
            names.append(name)
        return names


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = max(int(seconds), 0)
    return f"{whole // 60}:{whole % 60:02d}"


def _held_back(
    documents: Iterator[Document], known: set[tuple[int, ...]]
) -> tuple[list[Document], list[Document]]:
    """Split documents, by their prompts, into those to learn from and to measure with.

    Args:
        known: prompts of the user's holdout files, whose documents are left out.
    """
    learnt: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        prompt = _prompt(document)
        if prompt in known:
            continue
        if int(_digest(prompt)[:8], 16) % _HELD_OUT:
            learnt.append(document)
        elif len(held_out) < _MOST_HELD_OUT:
            held_out.append(document)
    return learnt, held_out


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:16]


def _prompt(document: Document) -> tuple[int, ...]:
    """The tokens by which texts are split: equal ones must not be on both sides."""
    return document.tokens[: max(document.prompt_length, 16)]


def _cut(document: Document, answer: int) -> Document:
    tokens = document.tokens[: document.prompt_length + answer]
    return replace(document, tokens=tokens)
