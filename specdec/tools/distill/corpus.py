"""The target's texts on disk: a file for each wave, kept for the next run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...errors import ModelError
from ...utils.files import open_plain, remove_leftovers
from .seed_prompts import TOPICS
from .storage import read_arrays, write_arrays

_WAVE = re.compile(r"wave-\d{5}")
_SUFFIX = ".safetensors"
FORMAT = "specdec distill data"

#: How a document's text was chosen.
GREEDY, SAMPLED, TEXT = range(3)


@dataclass(frozen=True)
class Document:
    """A text to learn from.

    Args:
        tokens: the prompt and the text after it.
        prompt_length: number of the prompt's tokens.
        kind: how the text after the prompt was chosen: ``GREEDY`` or ``SAMPLED`` by
            the target, or ``TEXT`` given by the user.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    kind: int


class Corpus:
    """A folder of named files of documents. Files named ``wave-NNNNN`` are waves.

    Args:
        folder: the folder, which is made when the first file is written.
        target: fingerprint of the model that writes.
        topics: what waves are about; others are refused.

    Attributes:
        waves: names of the waves, in the order in which they were written.
        num_tokens: tokens of all waves.
        seconds: time that it took to write all waves.
    """

    def __init__(self, folder: Path, target: str, topics: Collection[str] = TOPICS):
        self.folder = folder
        self._target = target
        self._topics = " ".join(sorted(set(topics)))
        self.waves: list[str] = []
        self.num_tokens = 0
        self.seconds = 0.0
        remove_leftovers(folder)
        while self.has(self.next_wave):
            documents, seconds = self._open(self.next_wave)
            self._count(self.next_wave, documents, seconds)

    @property
    def next_wave(self) -> str:
        """The name of the next wave to write."""
        return f"wave-{len(self.waves):05d}"

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self._path(name).exists()

    def add(
        self, name: str, documents: Sequence[Document], seconds: float = 0.0
    ) -> None:
        """Write a file.

        Args:
            seconds: time that it took to make the documents.

        Raises:
            ModelError: the file cannot be written.
        """
        numbers = np.array(
            [(len(d.tokens), d.prompt_length, d.kind) for d in documents], np.int32
        ).reshape(-1, 3)
        tokens = np.array([t for d in documents for t in d.tokens], np.int32)
        write_arrays(
            self._path(name),
            {"tokens": mx.array(tokens), "documents": mx.array(numbers)},
            {
                "format": FORMAT,
                "target": self._target,
                "topics": self._topics,
                "seconds": repr(seconds),
            },
        )
        if _WAVE.fullmatch(name):
            self._count(name, documents, seconds)

    def read(self, name: str) -> list[Document]:
        """The documents of a file.

        Raises:
            ModelError: the file cannot be read, or another target wrote it.
        """
        return self._open(name)[0]

    def documents(self, names: Iterable[str]) -> Iterator[Document]:
        """The documents of several files."""
        for name in names:
            yield from self.read(name)

    def digest(self, names: Iterable[str]) -> str:
        """The hash of several files' contents."""
        digest = hashlib.sha256()
        for name in names:
            with open_plain(self._path(name)) as file:
                digest.update(file.read())
        return digest.hexdigest()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _count(self, name: str, documents: Sequence[Document], seconds: float) -> None:
        self.waves.append(name)
        self.num_tokens += sum(len(d.tokens) for d in documents)
        self.seconds += seconds

    def _open(self, name: str) -> tuple[list[Document], float]:
        path = self._path(name)
        arrays, metadata = read_arrays(path)
        if metadata.get("format") != FORMAT or arrays.keys() != {"tokens", "documents"}:
            raise ModelError(f"{path} is not of specdec distill: remove it")
        if metadata.get("target") != self._target:
            raise ModelError(
                f"{path} was written by another target: name another --data folder, "
                "or remove this one"
            )
        about = metadata.get("topics", " ".join(sorted(TOPICS)))
        if about != self._topics and _WAVE.fullmatch(name):
            raise ModelError(
                f"{path} is about {about}: name the same --topic, or another --data "
                "folder"
            )
        documents, first = [], 0
        try:
            seconds = float(metadata.get("seconds", 0))
            tokens = np.array(arrays["tokens"]).tolist()
            for length, prompt_length, kind in np.array(arrays["documents"]).tolist():
                part = tuple(tokens[first : first + length])
                documents.append(Document(part, prompt_length, kind))
                first += length
        except (TypeError, ValueError) as error:  # another shape or type
            raise ModelError(f"{path} is not of specdec distill: remove it") from error
        return documents, seconds
