"""A whole run of ``specdec distill``: write text, train, measure, export."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

from ... import backend
from ...decoder import wired_memory
from ...errors import ModelError
from ...models import load_draft
from ...models.draft_folder import FORMAT, fingerprint, read_card
from ...models.precision import DTYPES
from ...utils.blas import usable_cores, use_threads
from ...utils.files import remove_leftovers
from . import checkpoint
from .beginning import as_begun, take_weights
from .evaluate import HeldOut, TargetStates, measure_rounds
from .export import export, write_card
from .loss import ChunkedLoss
from .material import HOLDOUT_TOKENS, Gatherer, Material, Sources, clock
from .options import Check, DistillOptions, Say, go_on
from .plan import TrainingPlan, count, load_target
from .train import OPTIMIZER, Trainer
from .wave import TEMPERATURE

_CHECKPOINT_SECONDS = 60
_LINE_SECONDS = 10
# How often held-out texts are measured during training; with a budget of minutes, only
# while measuring has taken less than this share of the time. The first measurement,
# which compiles, does not count.
_MEASUREMENTS, _MEASURING = 20, 0.05
# Most rows that decode together when rounds are measured.
_ROUNDS_BATCH = 64


class Distillation:
    """Makes a draft for a target.

    Args:
        options: the user's options.
        say: shows a line of progress.
        check: called in every long loop. If it raises, the run ends and keeps finished
            work.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
        ConfigError: the target does not have the layers asked for.
        ModelError: the target cannot be loaded.
        PromptError: a user's file cannot be read.
    """

    def __init__(self, options: DistillOptions, say: Say, check: Check = go_on):
        # A run that goes on has the same sums, whatever else the machine does.
        use_threads(usable_cores())
        self.options = options = as_begun(options)
        self._say = say
        self._check = check
        self._sources = Sources.read(options)  # errors come before a model is loaded
        self.target = load_target(options)
        self.plan = TrainingPlan.of(self.target, options)
        self.student = self.plan.student
        self._began_with: dict[str, Any] | None = None
        if options.begin_with is not None:
            self._began_with = take_weights(self.student, options.begin_with)
        self._fingerprint = fingerprint(self.target.model)

    def run(self) -> dict[str, Any]:
        """Do the whole run.

        Returns:
            The card, as it was written.

        Raises:
            ModelError: a file cannot be written; the old file is intact.
        """
        options = self.options
        for folder in (options.folder, options.work):
            remove_leftovers(folder)
        with wired_memory():
            plan = self.plan
            gatherer = Gatherer(
                options,
                self._sources,
                self.target,
                fingerprint=self._fingerprint,
                plan=plan,
                say=self._say,
                check=self._check,
            )
            # Training goes on from a checkpoint with the same data.
            resuming = options.resume and checkpoint.exists(options.work)
            material = gatherer.gather(write=not resuming)
            mx.clear_cache()
            loss = plan.loss(options.hard)
            trainer = Trainer(
                self.student,
                TargetStates(self.student, material.blocks, budget=plan.states_bytes),
                material.blocks,
                loss,
                options,
                dtype=DTYPES[options.computing],
            )
            held_out = [
                HeldOut(name, self.student, blocks, budget=plan.states_bytes // 4)
                for name, blocks in material.held_out.items()
            ]
            self._train(trainer, held_out, loss, material.digest)
            trainer.install()
            agreement = self._agreement(held_out, loss)
            card = self._card(trainer, material, agreement)
            trainer.install(packed=False)  # export packs the weights
            export(
                options.folder,
                self.student,
                self.target,
                card,
                bits=options.bits,
                alone=not options.shares_embedding,
            )
            self._say(f"wrote {options.folder}")
            return self._measure_rounds(card)

    def _train(
        self,
        trainer: Trainer,
        held_out: Sequence[HeldOut],
        loss: ChunkedLoss,
        digest: str,
    ) -> None:
        identity = self._identity(digest)
        if self.options.resume:
            contents = checkpoint.load(
                self.options.work,
                identity,
                like=(trainer.parameters, trainer.optimizer_state),
                say=self._say,
            )
            if contents is not None:
                trainer.restore(*contents)
                self._say(f"going on after step {trainer.progress.step}")
        saved = shown = time.perf_counter()
        tokens, shows = trainer.progress.tokens, True
        measured, measuring = int(trainer.share * _MEASUREMENTS), -inf
        began = trainer.progress.seconds
        timed = self.options.budget.minutes is not None
        try:
            while not trainer.done:
                self._check()
                trainer.step()
                due = int(trainer.share * _MEASUREMENTS)
                allowed = _MEASURING * (trainer.progress.seconds - began)
                if due > measured and not (timed and measuring > allowed):
                    measured, start = due, time.perf_counter()
                    self._measure(trainer, held_out, loss)
                    measuring = max(0.0, measuring + time.perf_counter() - start)
                now = time.perf_counter()
                if shows or now - shown > _LINE_SECONDS or trainer.done:
                    shows = False
                    rate = (trainer.progress.tokens - tokens) / (now - shown)
                    self._show(trainer, rate)
                    shown, tokens = time.perf_counter(), trainer.progress.tokens
                if now - saved > _CHECKPOINT_SECONDS:
                    self._save(trainer, identity)
                    saved = time.perf_counter()
        finally:  # also after an interrupt; nothing in here checks for one
            if trainer.progress.step and trainer.whole:
                self._save(trainer, identity)

    def _identity(self, digest: str) -> dict[str, Any]:
        """Everything that must be the same for a checkpoint to be resumed."""
        options = self.options
        return {
            "target": self._fingerprint,
            "layers": list(self.student.layers),
            "widen": options.widen,
            "data": digest,
            "dtype": options.computing,
            "block_tokens": self.plan.block_tokens,
            "chunk": self.plan.chunk,
            "bits": options.bits,
            "seed": options.seed,
            "optimizer": OPTIMIZER,
            "learning_rate": options.learning_rate,
            **self._block(),
            **self._beginning(),
        }

    def _beginning(self) -> dict[str, Any]:
        """What training began with, if not with the target's layers."""
        source = self._began_with
        return {} if source is None else {"began_with": source}

    def _block(self) -> dict[str, Any]:
        """Options that only a block head has; empty for a draft of layers."""
        options = self.options
        if options.kind != "block":
            return {}
        names = ("kind", "form", "block_size")
        return {name: getattr(options, name) for name in names}

    def _save(self, trainer: Trainer, identity: dict[str, Any]) -> None:
        """Save a checkpoint; if that fails, warn and go on training."""
        try:
            checkpoint.save(
                self.options.work,
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
        agreement = self._agreement(held_out, loss)
        progress = trainer.progress
        progress.history.append(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "seconds": progress.seconds,
                **trainer.last(),
                "held_out": agreement,
            }
        )

    def _agreement(
        self, held_out: Sequence[HeldOut], loss: ChunkedLoss
    ) -> dict[str, dict[str, float]]:
        """KL and agreement of the installed weights on each held-out set."""
        return {h.name: h.measure(loss, self._check) for h in held_out}

    def _show(self, trainer: Trainer, rate: float) -> None:
        progress, last, share = trainer.progress, trainer.last(), trainer.share
        left = progress.seconds * (1 - share) / share if share else 0.0
        line = (
            f"training: step {progress.step}, {progress.tokens / 1e6:.2f} M tokens, "
            f"{rate:.0f} tokens/s, loss {last['loss']:.3f}, agreement "
            f"{last['agreement']:.3f}, {clock(left)} left"
        )
        sets = progress.history[-1]["held_out"].items() if progress.history else ()
        if sets:
            line += "; held out: " + ", ".join(
                f"{name} {means['agreement']:.3f}" for name, means in sets
            )
        self._say(line)

    def _card(
        self,
        trainer: Trainer,
        material: Material,
        agreement: dict[str, dict[str, float]],
    ) -> dict[str, Any]:
        progress, options = trainer.progress, self.options
        training = {
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "optimizer": OPTIMIZER,
            "learning_rate": options.learning_rate,
            "hard": options.hard,
            "block_tokens": self.plan.block_tokens,
            "history": progress.history,
        }
        return {
            "format": FORMAT,
            "version": 1,
            "target": {
                "name": Path(self.target.name).name,
                "fingerprint": self._fingerprint,
            },
            "layers": list(self.student.layers),
            "widen": options.widen,
            "parameters": count(trainer.parameters),
            "bits": options.bits,
            "dtype": options.computing,
            "embedding": "target" if options.shares_embedding else "own",
            **self._block(),
            **self._beginning(),
            "data": {
                "documents": len(material.documents),
                "tokens": material.num_tokens,
                "written_by_target": material.written_by_target,
                "digest": material.digest,
            },
            "training": training,
            "agreement": agreement,
            "rounds": self._known_rounds(training),
            "command": options.command,
            "machine": backend.describe(),
        }

    def _known_rounds(self, training: dict[str, Any]) -> list[dict[str, Any]]:
        """Rounds that an earlier run measured after the same training."""
        if not self.options.resume:
            return []
        try:
            card = read_card(self.options.folder) or {}
        except ModelError:
            return []
        # The seconds identify a training.
        same = card.get("training") == training
        return list(card.get("rounds", [])) if same else []

    def _measure_rounds(self, card: dict[str, Any]) -> dict[str, Any]:
        """Decode held-out prompts with the new draft; return the card with results."""
        options = self.options
        if not self._sources.holdout:
            return card
        draft = load_draft(
            str(options.folder),
            self.target,
            dtype=options.computing,
            trust_remote_code=options.trust_remote_code,
        )
        settings = [(length, 0.0) for length in options.num_draft_tokens]
        settings.insert(1, (options.num_draft_tokens[0], TEMPERATURE))
        known = {_setting(entry) for entry in card["rounds"]}
        for name, prompts in self._sources.holdout.items():
            for length, temperature in settings:
                num_prompts = min(len(prompts), options.rounds)
                if (name, num_prompts, length, temperature) in known:
                    continue
                entry = measure_rounds(
                    self.target,
                    draft,
                    prompts[:num_prompts],
                    temperature=temperature,
                    num_draft_tokens=length,
                    max_tokens=HOLDOUT_TOKENS,
                    batch_size=min(_ROUNDS_BATCH, options.rounds),
                    check=self._check,
                )
                card["rounds"].append({"set": name, **entry})
                write_card(options.folder, card)
                self._say(
                    f"{name}, k = {length}, temperature {temperature:g}: "
                    f"{entry['acceptance_rate']:.3f} of {entry['drafted']} draft "
                    f"tokens accepted, {entry['acceptance_length']:.2f} tokens a round"
                )
        return card


def _setting(entry: dict[str, Any]) -> tuple[str, int, int, float]:
    """The settings that distinguish one measurement of rounds on a card from others."""
    return (
        entry["set"],
        entry["prompts"],
        entry["num_draft_tokens"],
        entry["temperature"],
    )
