"""A small target on disk, and a run over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec.tools.distill.job import Distillation
from specdec.tools.distill.options import Budget, Check, DistillOptions, go_on
from specdec.tools.distill.wave import Author
from tests.models.folders import write_folder

LAYERS = 4
QUESTIONS = "".join(f"What is {i} times {i + 3}?\n" for i in range(12))


def write_target(folder: Path, arch: str = "llama", **changes: Any) -> Path:
    """A random model that a draft can learn something of."""
    write_folder(folder, arch, **({"num_hidden_layers": LAYERS} | changes))
    return folder


def options(target: Path, out: Path, **changes: Any) -> DistillOptions:
    """A run of a few small steps on answers to :data:`QUESTIONS`."""
    questions = target.with_name("questions.txt")
    questions.write_text(QUESTIONS, "utf-8")
    standard: dict[str, Any] = {
        "target": str(target),
        "out": out,
        "layers": "2",
        "budget": Budget(tokens=2000),
        "data_tokens": 0,
        "prompts": (str(questions),),
        "turn_tokens": 8,
        "answer_tokens": 12,
        "learning_rate": 3e-3,
        "writers": 12,
        "block_tokens": 256,
    }
    return DistillOptions(**(standard | changes))


def quietly(line: str) -> None:
    """Say nothing."""


def run(wanted: DistillOptions) -> dict[str, Any]:
    """Do it all; the card."""
    return Distillation(wanted, quietly).run()


def same(a: Any, b: Any) -> bool:
    """Whether two trees of arrays are equal, bit by bit."""
    from mlx.utils import tree_flatten

    left, right = dict(tree_flatten(a)), dict(tree_flatten(b))
    return left.keys() == right.keys() and all(
        bool(mx.array_equal(left[name], right[name])) for name in left
    )


def longer(wanted: DistillOptions, tokens: int) -> DistillOptions:
    """The same with another budget."""
    return replace(wanted, budget=Budget(tokens=tokens))


class NoTemplate:
    """A tokenizer without a chat template, for a model driven with token ids."""

    has_chat_template = False

    def __init__(self, *ends: int):
        self.eos_token_ids = set(ends)


def make_author(model: Any, check: Check = go_on, ends: tuple[int, ...] = ()) -> Author:
    """Writes with a model alone, up to eight rows at once."""
    wanted = DistillOptions(target=None, budget=Budget(tokens=1))
    tokenizer: Any = NoTemplate(*ends)
    return Author(model, tokenizer, wanted, 8, check)
