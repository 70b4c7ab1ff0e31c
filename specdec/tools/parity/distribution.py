"""Test the tokens' distribution, for rules whose text depends on the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from ...decoder import SpecDecoder
from ..decoding import Task, decode, with_end
from .plain import PlainTarget
from .statistics import MIN_EXPECTED, Fit, chi_square_tail, fit, rare_tail
from .tokens import Progress, counted, each_shown

# Chance that a correct engine fails.
FALSE_ALARM = 1e-6
# The fewest draws from which two cells can be made.
MIN_DRAWS = int(2 * MIN_EXPECTED)


@dataclass(frozen=True)
class PrefixTest:
    """The test of the tokens that followed one prefix.

    Args:
        prompt: index of the prompt.
        tokens: the prefix's generated tokens, which follow the prompt.
        fit: how the next tokens fit the target's probabilities.
    """

    prompt: int
    tokens: tuple[int, ...]
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class DistributionCertificate:
    """The result of many draws of every prompt.

    Three tests share :data:`FALSE_ALARM`: all prefixes together, rare tokens of all
    prefixes together, and the worst prefix, corrected for the number of prefixes.

    Args:
        prompts: number of prompts.
        draws: decodings of each prompt.
        drafted, accepted: draft tokens of all rows.
        prefixes: every prefix that came often enough to be tested.
        errors: (prompt, message) of rows that the engine ended with an error.
    """

    prompts: int
    draws: int
    drafted: int
    accepted: int
    prefixes: tuple[PrefixTest, ...]
    errors: tuple[tuple[int, str], ...]

    @property
    def statistic(self) -> float:
        """Chi-square of all prefixes together."""
        return sum(t.fit.statistic for t in self.prefixes)

    @property
    def df(self) -> int:
        """Degrees of freedom of :attr:`statistic`."""
        return sum(t.fit.df for t in self.prefixes)

    @property
    def p_values(self) -> dict[str, float]:
        """P-values of the three tests; a test fails below a third of FALSE_ALARM."""
        rare = sum(t.fit.rare for t in self.prefixes)
        expected = sum(t.fit.rare_expected for t in self.prefixes)
        worst = min((t.fit.p_value for t in self.prefixes), default=1.0)
        return {
            "all prefixes": chi_square_tail(self.statistic, self.df),
            "rare tokens": rare_tail(rare, expected),
            "worst prefix": min(1.0, worst * len(self.prefixes)),
        }

    @property
    def verdict(self) -> Literal["consistent", "incomplete", "failure"]:
        """The verdict; ``incomplete`` if nothing drafted could be tested."""
        p_values = self.p_values
        if self.errors or min(p_values.values()) < FALSE_ALARM / len(p_values):
            return "failure"
        if not self.drafted or not any(t.tokens for t in self.prefixes):
            return "incomplete"
        return "consistent"

    @property
    def passed(self) -> bool:
        """Whether the draws are consistent with the target's distribution."""
        return self.verdict == "consistent"

    def to_dict(self) -> dict[str, object]:
        """All fields and derived values, for JSON."""
        return {
            **asdict(self),
            "false_alarm": FALSE_ALARM,
            "statistic": self.statistic,
            "df": self.df,
            "p_values": self.p_values,
            "prefixes": [
                {**asdict(t), "p_value": t.fit.p_value} for t in self.prefixes
            ],
            "errors": [{"prompt": i, "error": e} for i, e in self.errors],
        }


def certify_distribution(
    decoder: SpecDecoder,
    plain: PlainTarget,
    tasks: Sequence[Task],
    *,
    draws: int,
    progress: Progress,
) -> DistributionCertificate:
    """Decode every prompt ``draws`` times, and test the tokens after each prefix.

    Given a prefix, the next token is a draw from the target's distribution after it,
    whatever came before. So each prefix can be tested alone, and all of them together.
    The first token of a row is never drafted; the later ones may be.
    """
    rows = [
        # No two rows share a seed.
        replace(
            task, params=replace(task.params, seed=task.params.seed_key * draws + n)
        )
        for task in tasks
        for n in range(draws)
    ]
    results = decode(decoder, rows, counted(progress, "speculative", len(rows)))
    occurrences: dict[tuple[int, tuple[int, ...]], Counter[int]] = {}
    errors = []
    for row, result in enumerate(results):
        prompt = row // draws
        if result.finish_reason == "error":
            errors.append((prompt, result.error or ""))
            continue
        tokens = with_end(result)
        for at, token in enumerate(tokens):
            occurrences.setdefault((prompt, tokens[:at]), Counter())[token] += 1
    often = {at: c for at, c in sorted(occurrences.items()) if c.total() >= MIN_DRAWS}
    tests: list[PrefixTest] = []
    for (prompt, tokens), counts in each_shown(progress, "plain", often.items()):
        task = tasks[prompt]
        logits = plain.logits((*task.prompt.token_ids, *tokens))
        probabilities = mx.softmax(logits / task.params.temperature)
        chi_square = fit(counts, np.array(probabilities))
        tests.append(PrefixTest(prompt, tokens, chi_square))
    return DistributionCertificate(
        prompts=len(tasks),
        draws=draws,
        drafted=sum(r.drafted for r in results),
        accepted=sum(r.accepted for r in results),
        prefixes=tuple(tests),
        errors=tuple(errors),
    )
