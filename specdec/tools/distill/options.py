"""What a run is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ... import backend
from ...errors import ConfigError
from ...models.draft_folder import read_card
from ...models.precision import DTYPES
from ...utils.checks import require
from .blocks import ROW_MULTIPLE
from .packing import Packing

#: Shows a line of progress.
Say = Callable[[str], None]
#: Raises where an end was asked for, KeyboardInterrupt on the command line.
Check = Callable[[], None]

KINDS = ("layers", "block")
FORMS = ("dspark", "dflash")
# Four layers of SmolLM2-135M agreed no more on held-out texts after nine or ten times
# through what was written (docs/distill.md).
_EPOCHS = 8
# Minutes of writing for one of training, about the same on the GPU where that was.
_WRITING_MINUTES = 2


def go_on() -> None:
    """Nobody asks for an end but by an exception."""


@dataclass(frozen=True)
class Budget:
    """What training may take: minutes, or tokens of text."""

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
        """The share of it that is used up, at most 1."""
        if self.minutes is not None:
            return min(seconds / (60 * self.minutes), 1.0)
        assert self.tokens is not None
        return min(tokens / self.tokens, 1.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for, as the options of ``specdec distill`` say.

    Args:
        out: a dry run needs none.
        texts: files of ``--text``.
        bits: of the layers that are stored; ``None``: they are not packed.
        hard: share of the loss that is the target's arg-max alone.
        turn_tokens, answer_tokens: most tokens of a user turn, and of an answer.
        command: for the card.

    Raises:
        ConfigError: a value is out of range, or ``out`` holds another model.
    """

    target: str | None
    out: Path | None = None
    kind: str = "layers"
    form: str = "dspark"
    block_size: int = 8
    layers: str = "4"
    widen: int = 1
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
        known = self.dtype is None or self.dtype in DTYPES
        require(known, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        known = self.kind in KINDS
        require(known, "kind", self.kind, " or ".join(KINDS))
        known = self.form in FORMS
        require(known, "form", self.form, " or ".join(FORMS))
        fits = 2 <= self.block_size <= ROW_MULTIPLE
        require(fits, "block_size", self.block_size, f"2 to {ROW_MULTIPLE}")
        if self.bits is not None:
            Packing(self.bits)
        self._check_out()

    def _check_out(self) -> None:
        """Refuse a folder whose model is no draft of ours: it would be replaced."""
        if self.out is None:
            return
        out = self.out.expanduser()
        if self.target is not None:
            target = Path(self.target).expanduser()
            if target.exists() and target.resolve() == out.resolve():
                raise ConfigError(
                    f"out is the target's own folder {out}: name another one"
                )
        # A draft's own is written last, after its card.
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
        """Where the checkpoint is, and what the target writes if nowhere else."""
        return self.folder / "work"

    @property
    def packing(self) -> Packing | None:
        """How layers are stored."""
        return None if self.bits is None else Packing(self.bits)

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
        """Tokens of a prompt and its answer, with room for the template's own."""
        return self.turn_tokens + self.answer_tokens + 64

    @property
    def data_budget(self) -> tuple[float, float]:
        """Minutes and tokens for the target to write, infinite where not bounded."""
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
