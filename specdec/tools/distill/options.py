"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError
from ...models.draft_folder import read_card
from ...models.precision import DTYPES
from .packing import Packing
from .schedule import Budget
from .train import Recipe
from .wave import Wave

# Four layers of SmolLM2-135M agreed no more on held-out texts after nine or ten times
# through what was written (docs/distill.md).
_EPOCHS = 8
# Minutes of writing for one of training, about the same on the GPU where that was.
_WRITING_MINUTES = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Args:
        target: folder, hub id or file; ``None``: the default one.
        out: the draft's folder; what it is made of is in ``work`` there. A dry run
            needs none.
        layers: a number of layers, or which.
        widen: MLPs of the target that each of them joins.
        budget: of training.
        data_minutes, data_tokens: what the target writes for at most; both, or
            neither, may be given: whichever comes first. By default twice the
            training's minutes, or an eighth of its tokens.
        prompts: files of prompts to answer and learn from.
        texts: files of text to learn from.
        holdout: files of prompts to measure with, never learnt from.
        data: folder of what the target writes; ``None``: in ``out``.
        resume: go on from the checkpoint there.
        bits: of the layers that are stored.
        layers_only: store no embedding.
        dtype: that models compute in; ``None``: bfloat16, on a CPU float32.
        trust_remote_code: run Python code that lies in the target's folder.
        writers, block_tokens: sizes, where the default ones are not wanted.
        recipe: how the draft learns.
        wave: how the target writes.
        rounds: prompts of each holdout file to decode at the end.
        num_draft_tokens: of these rounds, greedily; with the first at the temperature
            of ``wave``, too.
        command: for the card.

    Raises:
        ConfigError: a value is out of range, or ``out`` holds another model.
    """

    target: str | None
    out: Path | None = None
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
    recipe: Recipe = field(default_factory=Recipe)
    wave: Wave = field(default_factory=Wave)
    rounds: int = 128
    num_draft_tokens: tuple[int, ...] = (4,)
    command: str = "specdec distill"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}"
            )
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
        """The draft's folder.

        Raises:
            ConfigError: there is none.
        """
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
