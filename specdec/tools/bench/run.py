"""Run a recipe one unit at a time, and keep the results of each unit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...config import DEFAULT_PREFIX_CACHE_MEMORY, EngineConfig
from ...cuda.fused_linear import separated
from ...decoder import SpecDecoder, wired_memory
from ...model_names import DEFAULT_TARGET, DraftSpec, named_draft
from ...models import LoadedModel, map_vocabulary
from ...models.draft_heads import DraftHead
from ...prompts import Prompt
from ...sampling_params import SamplingParams
from ...spec_decode import NamedDrafter
from ..decoding import token_level
from .cells import Cell, Unit, units_of
from .job import Clock, JobRecord, requests_of, untraced
from .machine import origin
from .models import load_model
from .prompts import EncodedSet, encode_set, require_room
from .raw import PromptsRecord, RawFile, Results
from .recipe import Recipe
from .systems import System, SystemOptions, mlx_lm_batch, mlx_lm_step, run_job, specdec

#: A context manager that is entered around each new unit.
Bracket = Callable[[Unit], AbstractContextManager[Any]]


class Bench:
    """A recipe with its models and prompts in memory.

    Args:
        recipe: what to measure.
        clock: returns a time in seconds.
        trust_remote_code: run Python code from a model's folder.

    Raises:
        ModelError: a model cannot be loaded, or a draft does not fit.
        PromptError: the prompts cannot be used.
    """

    def __init__(
        self,
        recipe: Recipe,
        clock: Clock = time.perf_counter,
        *,
        trust_remote_code: bool = False,
    ):
        self._recipe, self._clock = recipe, clock
        dtype = None if recipe.dtype == "stored" else recipe.dtype
        for name in recipe.draft:
            if not name.startswith("random:"):
                named_draft(name)
        target = load_model(
            recipe.target or DEFAULT_TARGET, dtype, trust_remote_code=trust_remote_code
        )
        vocab_size = int(target.model(mx.array([[0]])).shape[-1])
        self.prompts: EncodedSet = encode_set(recipe, target, vocab_size)
        require_room(self.prompts, max(recipe.sweep.context), target.config)
        # Without end-of-sequence tokens, no text is made.
        self._texts = recipe.run.end_of_sequence and target.tokenizer is not None
        self._target = target if self._texts else token_level(target.model)
        self._drafts = {
            name: _drafter(name, target, dtype, trust_remote_code)
            for name in recipe.draft
        }
        self._kept: dict[Cell, SpecDecoder] = {}
        self._separated: dict[int, nn.Module] = {}

    def refuses(self, cell: Cell) -> bool:
        """Whether the cell's system cannot run it: mlx-lm has no draft heads."""
        if cell.system != "mlx-lm speculative" or cell.draft is None:
            return False
        loaded = self._drafts[cell.draft].model
        return loaded is not None and isinstance(loaded.model, DraftHead)

    def run_pass(self, cell: Cell) -> JobRecord:
        """Run one job of a cell."""
        requests = requests_of(self._prompts(cell), self._recipe, cell.batch)
        decoder = None
        if cell.system == "specdec":
            decoder = self._kept_decoder(cell)
            if cell.prefix_cache:
                once = SamplingParams(max_tokens=1)
                decoder.generate(self.prompts.after(cell.context), once)
        return run_job(self._system(cell, decoder), requests, self._clock)

    def _prompts(self, cell: Cell) -> list[Prompt]:
        """The prompts as texts, which the job encodes, or as token ids."""
        if self._texts and not cell.context:
            return self.prompts.prompts
        return list(self.prompts.after(cell.context))

    def _system(self, cell: Cell, decoder: SpecDecoder | None) -> System:
        tokenizer = self._target.tokenizer
        options = SystemOptions(
            tokenizer=tokenizer,
            chat_template=self._recipe.prompts.chat_template,
            prefill_step_size=self._recipe.run.prefill_step_size,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            temperature=cell.temperature,
            seed=self._recipe.run.seed,
        )
        if decoder is not None:
            return specdec(decoder, options)
        target = self._as_mlx_lm_has(self._target.model)
        if cell.system == "mlx-lm batch":
            return mlx_lm_batch(target, options, cell.batch)
        draft, k = None, cell.num_draft_tokens
        if cell.draft is not None:
            loaded = self._drafts[cell.draft].model
            assert loaded is not None
            draft = self._as_mlx_lm_has(loaded.model)
        assert k != "auto"
        return mlx_lm_step(target, options, draft, k)

    def _as_mlx_lm_has(self, model: nn.Module) -> nn.Module:
        """The model with mlx-lm's own layers, since mlx-lm does not have ours."""
        if id(model) not in self._separated:
            self._separated[id(model)] = separated(model)
        return self._separated[id(model)]

    def _kept_decoder(self, cell: Cell) -> SpecDecoder:
        """The decoder of all passes of a cell: as in a server, graphs compile once.

        A cell with a prefix cache gets a new decoder for every job. Otherwise the cache
        would hold the prompts of earlier passes, which are the same.
        """
        if cell.prefix_cache:
            return self._decoder(cell)
        if cell not in self._kept:
            self._kept[cell] = self._decoder(cell)
        return self._kept[cell]

    def _decoder(self, cell: Cell) -> SpecDecoder:
        memory = DEFAULT_PREFIX_CACHE_MEMORY if cell.prefix_cache else None
        config = EngineConfig(
            batch_size=cell.batch,
            num_draft_tokens=cell.num_draft_tokens,
            prefill_step_size=self._recipe.run.prefill_step_size,
            kv_bits=cell.kv_bits or None,
            prefix_cache_memory=memory,
        )
        target = self._target
        drafter = None if cell.draft is None else self._drafts[cell.draft]
        if not self._texts:  # both models run with token ids alone
            target = token_level(target.model)
            if drafter is not None and drafter.model is not None:
                drafter = replace(drafter, model=token_level(drafter.model.model))
        return SpecDecoder(target, drafter=drafter, config=config)


def _drafter(
    name: str, target: LoadedModel, dtype: str | None, trust_remote_code: bool
) -> NamedDrafter:
    if name.startswith("random:"):
        return NamedDrafter(name, load_model(name, dtype))
    drafter = NamedDrafter.load(
        DraftSpec.parse(name), target, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if drafter.model is not None and drafter.model.tokenizer is not None:
        # Later both models may lack their tokenizers, which the mapping needs.
        drafter = replace(drafter, vocabulary=map_vocabulary(target, drafter.model))
    return drafter


def run_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    command: str,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int], Bracket] | None = None,
    trust_remote_code: bool = False,
) -> Results:
    """Run the missing units of a recipe, and keep all results in ``folder``.

    Args:
        command: the command line, for the report.
        clock: returns a time in seconds.
        progress: called with the number of units and the number of those done;
            returns the :data:`Bracket` of each new unit.
        trust_remote_code: run Python code from a model's folder.

    Raises:
        ConfigError: the folder holds results of another recipe or of other prompts.
        ModelError, PromptError: models or prompts cannot be used.
    """
    raw = RawFile(folder, recipe.to_dict())
    units = list(units_of(recipe))
    minutes = recipe.run.minutes
    if raw.results is None or not all(map(raw.has, units)):
        bench = Bench(recipe, clock, trust_remote_code=trust_remote_code)
        raw.begin(_described(bench.prompts), origin(command))
        for cell in filter(bench.refuses, dict.fromkeys(u.cell for u in units)):
            raw.refuse(cell)
        missing = [unit for unit in units if not raw.has(unit)]
        start = clock()
        brackets = progress(len(units), len(units) - len(missing)) if progress else None
        with wired_memory():
            for unit in missing:
                if minutes is not None and clock() - start >= 60 * minutes:
                    break
                with brackets(unit) if brackets else nullcontext():
                    record = bench.run_pass(unit.cell)
                    raw.add(unit, untraced(record) if unit.number else record)
    assert raw.results is not None
    return raw.results


def _described(prompts: EncodedSet) -> PromptsRecord:
    return PromptsRecord(
        digest=prompts.digest,
        found=prompts.available,
        tokens=[len(ids) for ids in prompts.token_ids],
        categories=prompts.categories,
    )
