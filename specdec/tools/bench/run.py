"""Runs a recipe, a unit at a time, and keeps what each one measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...config import DEFAULT_PREFIX_CACHE_MEMORY, EngineConfig
from ...cuda.fused_linear import separated
from ...decoder import SpecDecoder, wired_memory
from ...draft_names import DraftSpec, named_draft
from ...model_names import DEFAULT_TARGET
from ...models import LoadedModel, check_same_vocabulary
from ...spec_decode import NamedDrafter
from .cells import Cell, Unit, units_of
from .engine import engine
from .job_figures import arrivals_per_second
from .jobs import System as JobSystem
from .jobs import (
    Tokenizing,
    mlx_lm_batch_jobs,
    mlx_lm_step_jobs,
    requests_of,
    run_job,
    specdec_jobs,
)
from .machine import origin
from .measure import measure
from .models import load_model, token_level
from .peers import mlx_lm_batch, mlx_lm_speculative
from .profile import profile
from .prompts import EncodedSet, encode_set
from .raw import RawFile, Results
from .recipe import WRONG, Recipe
from .waves import Clock, Options, Record, Run
from .wrong import WrongDrafter

#: Gets all units and those already done; gives what brackets each new unit.
Progress = Callable[[Unit], AbstractContextManager[Any]]


class Bench:
    """A recipe with its models and prompts in memory.

    Args:
        recipe: what to measure.
        clock: seconds.
        trust_remote_code: run Python code that lies in a model's folder.

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
        for name in (name.removeprefix(WRONG) for name in recipe.draft):
            if not name.startswith("random:"):
                named_draft(name)
        self._target = load_model(
            recipe.target or DEFAULT_TARGET, dtype, trust_remote_code=trust_remote_code
        )
        # With texts where whole jobs are measured; waves leave text out.
        self._job_target = self._target
        if self._target.tokenizer is None:
            self._job_target = token_level(self._target.model)
        self._texts = recipe.run.jobs and self._target.tokenizer is not None
        self._drafts = {
            name: _drafter(
                name, self._target, dtype, trust_remote_code, texts=self._texts
            )
            for name in recipe.draft
        }
        vocab_size = int(self._target.model(mx.array([[0]])).shape[-1])
        self.prompts: EncodedSet = encode_set(recipe, self._target, vocab_size)
        stop: Iterable[int] = ()
        if recipe.run.end_of_sequence and self._target.tokenizer is not None:
            stop = self._target.tokenizer.eos_token_ids
        self._eos_token_ids = frozenset(stop)
        self._kept: dict[Cell, SpecDecoder] = {}
        self._separated: dict[int, nn.Module] = {}

    @property
    def measures_jobs(self) -> bool:
        """Whether its units are jobs."""
        return self._recipe.run.jobs

    def run_pass(self, cell: Cell) -> Record:
        """One pass of a cell over all prompts."""
        prompts = self.prompts.behind(cell.conditions.context)
        return measure(self._system(cell), prompts, cell.conditions.batch)

    def run_job(self, cell: Cell, rate: float) -> Record:
        """One job of a cell.

        Args:
            rate: requests that arrive in a second; 0: all are there at once.
        """
        batch = cell.conditions.batch
        requests = requests_of(self.prompts.prompts, self._recipe, batch, rate)
        return run_job(self._job_system(cell), requests, self._clock)

    def _job_system(self, cell: Cell) -> JobSystem:
        options, draft = self._options(cell), None
        tokenizing = Tokenizing(
            self._job_target.tokenizer, self._recipe.prompts.chat_template
        )
        if cell.system == "specdec":
            # Load decides when requests come, not what decodes them.
            met = replace(cell, conditions=replace(cell.conditions, load=0.0))
            return specdec_jobs(lambda: self._kept_decoder(met), tokenizing, options)
        target = self._as_mlx_lm_has(self._target.model)
        if cell.system == "mlx-lm batch":
            batch = cell.conditions.batch
            return mlx_lm_batch_jobs(target, tokenizing, options, batch)
        if cell.draft is not None:
            loaded = self._drafts[cell.draft].model
            assert loaded is not None
            draft = self._as_mlx_lm_has(loaded.model)
        return mlx_lm_step_jobs(target, tokenizing, options, draft, cell.k)

    def run_profile(self, cell: Cell) -> list[Record]:
        """Some rounds of a cell, taken apart."""
        conditions = cell.conditions
        return profile(
            lambda: self._decoder(cell, end=False),
            self.prompts.behind(conditions.context)[: conditions.batch],
            cell.k,
            self._recipe.run.profile_rounds,
            temperature=conditions.temperature,
            clock=self._clock,
        )

    def _options(self, cell: Cell) -> Options:
        return Options(
            max_tokens=self._recipe.run.max_tokens,
            prefill_step_size=self._recipe.run.prefill_step_size,
            eos_token_ids=self._eos_token_ids,
            temperature=cell.conditions.temperature,
            seed=self._recipe.run.seed,
            clock=self._clock,
        )

    def _system(self, cell: Cell) -> Run:
        options = self._options(cell)
        if cell.system == "mlx-lm batch":
            return mlx_lm_batch(self._as_mlx_lm_has(self._target.model), options)
        if cell.system == "mlx-lm speculative":
            assert cell.draft is not None
            draft = self._drafts[cell.draft].model
            assert draft is not None
            return mlx_lm_speculative(
                self._as_mlx_lm_has(self._target.model),
                self._as_mlx_lm_has(draft.model),
                cell.k,
                options,
            )
        return engine(
            lambda: self._kept_decoder(cell),
            options,
            warm_prefixes=cell.conditions.prefix_cache,
        )

    def _as_mlx_lm_has(self, model: nn.Module) -> nn.Module:
        """The model with mlx-lm's own layers: ours are not to be measured as its."""
        if id(model) not in self._separated:
            self._separated[id(model)] = separated(model)
        return self._separated[id(model)]

    def _kept_decoder(self, cell: Cell) -> SpecDecoder:
        """One for all passes of a cell, as in a server: graphs are compiled once.

        Not where it keeps prefixes: the same prompts come in every pass, and every wave
        begins with none.
        """
        if cell.conditions.prefix_cache:
            return self._decoder(cell)
        if cell not in self._kept:
            self._kept[cell] = self._decoder(cell)
        return self._kept[cell]

    def _decoder(self, cell: Cell, *, end: bool = True) -> SpecDecoder:
        conditions = cell.conditions
        config = EngineConfig(
            batch_size=conditions.batch,
            num_draft_tokens=cell.num_draft_tokens,
            prefill_step_size=self._recipe.run.prefill_step_size,
            kv_bits=conditions.kv_bits or None,
            prefix_cache_memory=(
                DEFAULT_PREFIX_CACHE_MEMORY if conditions.prefix_cache else None
            ),
        )
        target = self._job_target
        if not self._texts:
            ends = self._eos_token_ids if end else ()
            target = token_level(self._target.model, ends)
        return SpecDecoder(
            target,
            drafter=None if cell.draft is None else self._drafts[cell.draft],
            config=config,
        )


def _drafter(
    name: str,
    target: LoadedModel,
    dtype: str | None,
    trust_remote_code: bool,
    *,
    texts: bool,
) -> NamedDrafter:
    """A drafter; without ``texts`` one to be driven with token ids alone."""
    source = name.removeprefix(WRONG)
    kind = NamedDrafter if source == name else WrongDrafter
    if source.startswith("random:"):
        found = kind(name, load_model(source, dtype))
    else:
        found = kind.load(
            DraftSpec.parse(source),
            target,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    if found.model is None:
        return found
    if target.tokenizer is not None and found.model.tokenizer is not None:
        check_same_vocabulary(target, found.model)
    if texts:
        return found
    return replace(found, model=token_level(found.model.model))


def run_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    command: str,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int], Progress] | None = None,
    trust_remote_code: bool = False,
) -> Results:
    """Run what of a recipe has not been run yet; results stay in ``folder``.

    Args:
        command: for the report.
        clock: seconds.
        progress: gets how many units there are and how many are done; gives what
            brackets each new one.
        trust_remote_code: run Python code that lies in a model's folder.

    Raises:
        ConfigError: the folder holds results of something else.
        ModelError, PromptError: models or prompts cannot be used.
    """
    raw = RawFile(folder, recipe.to_dict())
    units = list(units_of(recipe))
    minutes = recipe.run.minutes
    missing = [unit for unit in units if not raw.has(unit)]
    if missing or raw.results is None:
        bench = Bench(recipe, clock, trust_remote_code=trust_remote_code)
        raw.begin(_described(bench.prompts), origin(command))
        begun = clock()
        brackets = progress(len(units), len(units) - len(missing)) if progress else None
        with wired_memory():
            for unit in missing:
                if minutes is not None and clock() - begun >= 60 * minutes:
                    break
                with brackets(unit) if brackets else nullcontext():
                    _run(bench, unit, raw)
    assert raw.results is not None
    return raw.results


def _run(bench: Bench, unit: Unit, raw: RawFile) -> None:
    if unit.number is None:
        raw.add_profile(unit, bench.run_profile(unit.cell))
        return
    if bench.measures_jobs:
        assert raw.results is not None
        rate = arrivals_per_second(raw.results, unit.cell)
        raw.add_job(unit, bench.run_job(unit.cell, rate))
        return
    record = bench.run_pass(unit.cell)
    # Tokens are not what is measured here, and rounds are alike in every pass.
    del record["tokens"]
    for wave in record["waves"] if unit.number else ():
        del wave["rounds"]
    raw.add_pass(unit, record)


def _described(prompts: EncodedSet) -> Record:
    return {
        "digest": prompts.digest,
        "found": prompts.found,
        "tokens": [len(ids) for ids in prompts.token_ids],
        "categories": prompts.categories,
    }
