"""The options of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ... import backend
from ...errors import ConfigError
from ...utils.checks import require, require_int, require_range
from .seed_prompts import TOPICS

#: Shows a line of progress.
Say = Callable[[str], None]
#: Raises an exception if the user asked for an end: KeyboardInterrupt for the command.
Check = Callable[[], None]

Kind = Literal["layers", "block"]
HeadForm = Literal["dspark", "dflash", "dflash2"]
Dtype = Literal["float32", "bfloat16", "float16"]
#: Numbers of bits that a draft's matrices can be stored in.
BITS = (2, 3, 4, 5, 6, 8)
#: Rows of blocks are padded to a multiple of so many tokens.
ROW_MULTIPLE = 128
# Four layers of SmolLM2-135M agreed no more on held-out texts after nine or ten epochs
# over the written text (docs/distill.md).
_EPOCHS = 8
# Minutes of writing per minute of training, from the same measurements.
_WRITING_MINUTES = 2


def go_on() -> None:
    """A :data:`Check` that never asks for an end."""


@dataclass(frozen=True)
class Budget:
    """The limit of training: minutes, or tokens of text."""

    minutes: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.tokens is None):
            raise ConfigError("give a budget for training: minutes or tokens, not both")
        if not (self.minutes or self.tokens or 0) > 0:
            raise ConfigError(
                "there is no budget for training: give minutes or tokens above 0"
            )

    def share(self, *, seconds: float, tokens: int) -> float:
        """The share of the budget that is used up, at most 1."""
        if self.minutes is not None:
            return min(seconds / (60 * self.minutes), 1.0)
        assert self.tokens is not None
        return min(tokens / self.tokens, 1.0)


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """The user's options, as in ``specdec distill``.

    Args:
        out: the draft's folder; a dry run needs none.
        kind: what to make. With layers, a small model of the target's layers, which
            drafts token after token; with block, a head that reads the target's hidden
            states and drafts a block in one forward.
        form: which published form of a block head to make.
        block_size: slots of a block head's block. DSpark proposes up to N tokens,
            DFlash up to N - 1.
        layers: layers of the target to start from: N of them, spread evenly, or those
            listed, counted from 0.
        widen: join the MLPs of N layers of the target in each layer of the draft. Such
            a draft can learn more, and costs hardly more time on a GPU.
        begin_with: train this draft further, for example on prompts of your own. Its
            kind, block size, form and layers are used.
        data_tokens: let the target write N tokens. With 0, learn from given prompts and
            texts alone. ``None``: an eighth of the tokens of training.
        topics: topics of the user turns that the target makes up.
        texts: files of ``--text``.
        resume: continue from the checkpoint in DIR/work.
        bits: quantize the draft's matrices to N bits: 2, 3, 4, 5, 6 or 8. The end of
            training takes the rounding into account. ``None``: not quantized.
        layers_only: store no embedding; specdec takes the target's. mlx-lm cannot load
            such a draft. A block head never stores one.
        writers: how many texts the target writes at once. ``None``: as memory allows.
        block_tokens: tokens of a training step. ``None``: what is fast on the device,
            at most 8192 for a block head.
        learning_rate: peak learning rate.
        hard: share of the loss that uses only the target's arg-max.
        turn_tokens, answer_tokens: most tokens of a user turn, and of an answer.
        rounds: after training, decode the first N prompts of each holdout with the
            draft, and report how many draft tokens are accepted.
        num_draft_tokens: draft length for decoding a holdout. Each decodes greedily,
            the first also at temperature 0.7.
        command: the command line, for the card.

    Raises:
        ConfigError: a value is out of range, or ``out`` holds another model.
    """

    target: str | None
    out: Path | None = None
    kind: Kind = "layers"
    form: HeadForm = "dspark"
    block_size: int = 8
    layers: str = "4"
    widen: int = 1
    begin_with: str | None = None
    budget: Budget
    data_minutes: float | None = None
    data_tokens: int | None = None
    topics: tuple[str, ...] = TOPICS
    prompts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    holdout: tuple[str, ...] = ()
    data: Path | None = None
    resume: bool = False
    bits: int | None = None
    layers_only: bool = False
    dtype: Dtype | None = None
    trust_remote_code: bool = False
    writers: int | None = None
    block_tokens: int | None = None
    learning_rate: float = 1e-3
    hard: float = 0.3
    seed: int = 0
    turn_tokens: int = 128
    answer_tokens: int = 256
    rounds: int = 128
    num_draft_tokens: tuple[int, ...] = (4,)
    command: str = "specdec distill"

    def __post_init__(self) -> None:
        for name, kinds in (("kind", Kind), ("form", HeadForm), ("dtype", Dtype)):
            value, names = getattr(self, name), get_args(kinds)
            valid = value in names or (name == "dtype" and value is None)
            require(valid, name, value, f"one of {', '.join(names)}")
        known = bool(self.topics) and set(self.topics) <= set(TOPICS)
        require(known, "topics", self.topics, f"some of {', '.join(TOPICS)}")
        fits = 2 <= self.block_size <= ROW_MULTIPLE
        require(fits, "block_size", self.block_size, f"2 to {ROW_MULTIPLE}")
        for name, low in (
            ("widen", 1), ("data_tokens", 0), ("writers", 1), ("block_tokens", 128),
            ("rounds", 1),
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None:
                require_int(name, value, low)
        for length in self.num_draft_tokens:
            require_int("num_draft_tokens", length, 1)
        require_range("learning_rate", self.learning_rate, 0, 1e6, open_low=True)
        if self.bits is not None:
            bits = ", ".join(map(str, BITS))
            require(self.bits in BITS, "bits", self.bits, f"one of {bits}")
        self._check_out()

    def _check_out(self) -> None:
        """Refuse a folder with a model that distill did not make: it would be lost."""
        from ...models.draft_folder import read_card

        if self.out is None:
            return
        out = self.out.expanduser()
        if self.target is not None:
            target = Path(self.target).expanduser()
            if target.exists() and target.resolve() == out.resolve():
                raise ConfigError(
                    f"out is the target's own folder {out}: name another one"
                )
        # A draft's config.json is written last, after its card.
        if (out / "config.json").exists() and read_card(out) is None:
            raise ConfigError(
                f"{out} holds a model that specdec distill did not make: name "
                "another folder for out"
            )

    @property
    def folder(self) -> Path:
        """The draft's folder."""
        if self.out is None:
            raise ConfigError("out is missing: name a folder for the draft")
        return self.out

    @property
    def work(self) -> Path:
        """The folder of the checkpoint, and of the target's text without ``data``."""
        return self.folder / "work"

    @property
    def shares_embedding(self) -> bool:
        """Whether embedding, head and tokenizer stay with the target."""
        return self.layers_only or self.kind == "block"

    @property
    def where(self) -> Literal["cpu", "metal", "cuda"]:
        """The device's backend."""
        return backend.defaults().name

    @property
    def computing(self) -> str:
        """The type that models compute in."""
        return self.dtype or ("float32" if self.where == "cpu" else "bfloat16")

    @property
    def longest_document(self) -> int:
        """Most tokens of a prompt and its answer, with room for the chat template."""
        return self.turn_tokens + self.answer_tokens + 64

    @property
    def data_budget(self) -> tuple[float, float]:
        """Minutes and tokens that the target may write; infinite if not limited."""
        minutes, tokens = self.data_minutes, self.data_tokens
        if minutes is None and tokens is None:
            if self.budget.minutes is not None:
                minutes = _WRITING_MINUTES * self.budget.minutes
            elif self.budget.tokens is not None:
                tokens = -(-self.budget.tokens // _EPOCHS)
        return (
            float("inf") if minutes is None else minutes,
            float("inf") if tokens is None else tokens,
        )
