"""How much each way of accepting sampled draft tokens accepts, on generated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

from specdec import EngineConfig, SamplingParams, backend
from specdec.engine.engine import Engine
from specdec.model_names import short
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.request import Sequence as TokenSequence
from specdec.sampling import gumbel_noise
from specdec.sampling_params import Verification
from specdec.spec_decode import Drafter, DraftModel, DraftRows, Proposals, Round
from specdec.spec_decode.rejection_sampler import Verdict
from specdec.tools.bench.models import load_model
from specdec.tools.bench.tables import markdown_table

from . import common

INDEPENDENT = "independent"
METHODS: dict[str, Verification] = {
    "coupled": "coupled",
    "rejection": "rejection",
    "block": "block",
    INDEPENDENT: "coupled",
}
# Seeds of requests are small: noise under these is independent of theirs.
OTHER_SEEDS = 2**31


class IndependentDraft(Drafter):
    """A draft that samples with noise of its own: mlx-lm's rule.

    Its tokens are kept when they equal the target's choice, as ``coupled`` does,
    but nothing makes the two alike.
    """

    def __init__(self, draft: Drafter):
        self._draft = draft

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> IndependentRows:
        return IndependentRows(self._draft.rows(prompts, max_length=max_length))


class IndependentRows(DraftRows):
    def __init__(self, rows: DraftRows):
        self._rows = rows

    def prefill(self) -> Iterator[None]:
        return self._rows.prefill()

    def propose(self, round_: Round) -> Proposals:
        draws, sampling = round_.draws, round_.sampling
        seed = sampling.seed + OTHER_SEEDS
        other = gumbel_noise(seed, draws.positions, sampling.vocab_size)
        return self._rows.propose(replace(round_, draws=replace(draws, gumbel=other)))

    def commit(self, round_: Round, verdict: Verdict) -> None:
        self._rows.commit(round_, verdict)

    def note_lengths(self, longest: int, shortest: int) -> None:
        self._rows.note_lengths(longest, shortest)

    def filter(self, rows: Sequence[int]) -> None:
        self._rows.filter(rows)

    def extend(self, other: IndependentRows) -> None:
        self._rows.extend(other._rows)


def decode(
    runner: ModelRunner,
    draft: Drafter,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    eos: frozenset[int],
) -> list[TokenSequence]:
    """The finished rows of all prompts."""
    engine = Engine(runner, draft, config, backend.defaults(), eos)
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(i, "", tuple(prompt), p))
    rows = []
    while engine.busy:
        rows += [o.sequence for o in engine.step() if o.ended]
    return rows


def measured(rows: Sequence[TokenSequence]) -> dict[str, Any]:
    """Acceptance over all rounds of all rows."""
    rounds = sum(r.rounds for r in rows)
    drafted, accepted = sum(r.drafted for r in rows), sum(r.accepted for r in rows)
    first_drafted = sum(r.drafted_at[0] for r in rows if r.drafted_at)
    first_accepted = sum(r.accepted_at[0] for r in rows if r.accepted_at)
    return {
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "tokens": sum(len(r.tokens) for r in rows),
        "acceptance_rate": accepted / drafted,
        "first_accepted": first_accepted / first_drafted,
        "acceptance_length": 1 + accepted / rounds,
    }


@click.command(cls=common.Script)
@click.option("--target", required=True)
@click.option("--draft", required=True)
@click.option("--prompts", "files", required=True, multiple=True)
@click.option("--num-prompts", default=8, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--num-draft-tokens", default=3, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temp", "temperatures", multiple=True, default=(0.3, 0.7, 1.0))
@click.option("--dtype", default=None)
@click.option("--out", default=None, help="Write OUT.md and OUT.json.")
def main(
    *,
    target: str,
    draft: str,
    files: tuple[str, ...],
    num_prompts: int,
    batch: int,
    num_draft_tokens: int,
    max_tokens: int,
    temperatures: tuple[float, ...],
    dtype: str | None,
    out: str | None,
) -> None:
    """Compare the three rules of this engine and mlx-lm's, on generated text."""
    config = EngineConfig(batch_size=batch, num_draft_tokens=num_draft_tokens)
    loaded = load_model(target, dtype)
    loaded_draft = load_model(draft, dtype, target=loaded)
    defaults = backend.defaults()
    runner = ModelRunner(loaded.model, target, config, defaults)
    model = DraftModel(
        ModelRunner(loaded_draft.model, draft, config, defaults),
        vocab_size=runner.vocab_size,
        max_draft_tokens=num_draft_tokens,
    )
    eos = frozenset(loaded.tokenizer.eos_token_ids)
    raw = common.header_of("Acceptance of sampled draft tokens, by rule")
    raw["options"] = {
        "num_draft_tokens": num_draft_tokens,
        "batch": batch,
        "max_tokens": max_tokens,
        "num_prompts": num_prompts,
    }
    raw["results"] = []
    table = []
    for file in files:
        prompts = common.encode_prompts(loaded.tokenizer, file, num_prompts)
        for temperature in temperatures:
            cells = []
            for name, rule in METHODS.items():
                params = [
                    SamplingParams(
                        max_tokens=max_tokens,
                        temperature=temperature,
                        seed=seed,
                        verification=rule,
                    )
                    for seed in range(num_prompts)
                ]
                drafter = IndependentDraft(model) if name == INDEPENDENT else model
                rows = decode(runner, drafter, config, prompts, params, eos)
                found = {
                    "prompts": Path(file).name,
                    "temperature": temperature,
                    "rule": name,
                    **measured(rows),
                }
                raw["results"].append(found)
                rate, length = found["acceptance_rate"], found["acceptance_length"]
                cells.append(f"{rate:.3f} / {length:.2f}")
                print(found, flush=True)
            table.append([Path(file).stem, temperature, *cells])
        mx.clear_cache()
    header = ["prompts", "T", "coupled", "rejection", "block", "independent (mlx-lm)"]
    body = (
        f"{short(target)} with {short(draft)}, k = {num_draft_tokens}; "
        f"{num_prompts} prompts of each file, up to {max_tokens} tokens. Acceptance "
        "rate / acceptance length (the round's extra token included).\n\n"
        + markdown_table(header, table)
    )
    common.write_report(out, raw, body)


if __name__ == "__main__":
    main()
