"""What drafts with recurrent layers propose, in every round of ragged batches.

The target verifies what they propose, so a state that is not taken back rightly changes
no token of the output: drafts are accepted less, and nothing says so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.models.layer_skip import SkippingModel
from specdec.models.precision import quantized_copy
from specdec.models.runner import ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    Drafter,
    DraftModel,
    NgramDrafter,
    Proposals,
    Round,
    draft_model,
)
from specdec.spec_decode.draft_model import DraftModelRows
from tests.models.test_recurrent import (
    PADDED,
    compiled_calls,
    left_to_the_kernel,
    model_of,
    slightly_off,
)
from tests.plain import AT_ONCE, BEHIND, METAL, drafts_of, exact, greedy
from tests.scripted import Script
from tests.spec_decode.test_catching_up import NARROW, Decoding, greedy_after, texts_of

MAX_LENGTH = 400


@cache
def draft_of(name: str) -> Any:
    """A model by its architecture; of ``self:`` and ``layers:`` that of a hybrid."""
    kind, _, arch = name.rpartition(":")
    if kind == "self":
        return quantized_copy(model_of(arch), 4)[0]
    return SkippingModel(model_of(arch), (0, 1)) if kind == "layers" else model_of(name)


def history(name: str, backend: BackendDefaults, seed: int) -> None:
    """Rounds of any width, rows that keep any number of tokens, come, go and move."""
    texts = [[t % 61 for t in text] for text in texts_of(9, 2, 21, 5, seed=seed)]
    decoding = Decoding(
        draft_of(name), texts, MAX_LENGTH,
        backend=backend, prefill_step_size=8, seed=seed,
    )  # fmt: skip
    rng = decoding.rng
    for number in range(20):
        match rng.choice(["miss", "join", "place", "filter", "end", "draft", "draft"]):
            case "miss":
                decoding.miss(rng.choice([1, 2, NARROW, 12, 21]))
                continue
            case "join" if len(decoding.texts) < 5:
                decoding.join([rng.randrange(61) for _ in range(rng.randint(2, 11))])
            case "place":
                row = rng.randrange(len(decoding.texts))
                decoding.replace(row, [rng.randrange(61) for _ in range(2 + number)])
            case "filter":
                some = range(len(decoding.texts))
                decoding.filter(rng.sample(some, max(2, len(some) - 1)))
            case "end" if len(decoding.texts) - len(decoding.ended) > 2:
                decoding.ended.add(rng.randrange(len(decoding.texts)))
        if rng.random() < 0.3:
            continue
        k = rng.randint(1, NARROW - 1)
        decoding.draft_and_check([rng.randint(0, k) for _ in decoding.texts], k=k)
        decoding.note_lengths()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_STEP", 16)


DRAFTS = (
    "qwen3_5",  # masked scans
    "mamba",  # token by token
    "lfm2",  # windows alone
    "falcon_h1",  # states beside keys in one list
    "self:qwen3_5",
    "layers:granitemoehybrid",
)


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED], ids=["exact", "padded"])
@pytest.mark.parametrize("name", DRAFTS)
def test_proposals_are_those_of_a_plain_forward(
    name: str, backend: BackendDefaults
) -> None:
    """States of tokens that were rejected or missed, of padding, or of another row."""
    history(name, backend, DRAFTS.index(name))


def test_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what was written before again only for the tokens that each row kept."""
    calls = left_to_the_kernel(monkeypatch, "qwen3_5")
    history("qwen3_5", PADDED, 1)
    assert True in calls


@pytest.mark.parametrize("kernel", [False, True])
def test_by_compiled_forwards(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several writes that a trim takes back, each is left by a graph of its own."""
    if kernel:
        left_to_the_kernel(monkeypatch, "qwen3_5")
    used = compiled_calls(monkeypatch)
    texts = [[t % 61 for t in text] for text in texts_of(9, 2, 21)]
    decoding = Decoding(
        draft_of("qwen3_5"), texts, MAX_LENGTH, backend=BEHIND, prefill_step_size=8
    )
    for number in range(10):
        if number in (4, 7):
            decoding.miss(number)
        if number == 6:
            decoding.ended.add(1)
        if number == 8:
            decoding.replace(1, [5, 6, 7, 8])
        accepted = [decoding.rng.randint(0, 3) for _ in decoding.texts]
        decoding.draft_and_check(accepted, k=3)
        decoding.note_lengths()
    assert used.count(True) > 20


# -- whole runs ------------------------------------------------------------------

LENGTHS = (3, 17, 2, 8, 6, 9)
UNDRAFTED = 1
PROMPTS = [
    [(5 * i + 3 * j + i * j) % 61 for j in range(n)] for i, n in enumerate(LENGTHS)
]


# The beginning of one that ran before it.
PROMPTS[5] = [*PROMPTS[3], 7, 1, 4]


class Store(PrefixStore):
    """Notes how many tokens are found of prompts."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.found: list[int] = []

    def lookup(self, *args: Any) -> Any:
        answer = super().lookup(*args)
        self.found.append(answer.plan.length)
        return answer


@pytest.mark.parametrize(
    ("arch", "backend", "chained"),
    [
        ("qwen3_5", AT_ONCE, True),
        ("qwen3_5", METAL, False),
        ("mamba", PADDED, False),
        ("lfm2", PADDED, True),
    ],
)
def test_in_whole_runs(
    arch: str, backend: BackendDefaults, chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join while others run, rest, end, are not drafted for, or were met before.

    States that were kept after another number of tokens would show here.
    """
    model, draft = model_of(arch), slightly_off(arch)
    lengths = [10 + i for i in range(len(PROMPTS))]
    each = zip(PROMPTS, lengths, strict=True)
    texts = [[*p, *greedy(model, p, n)] for p, n in each]
    # Texts that a row may have had, what was proposed, and which of it was given.
    rounds: list[tuple[list[list[int]], list[int], list[bool]]] = []
    propose = DraftModelRows.propose

    def noted(self: DraftModelRows, round_: Round) -> Proposals:
        proposals = propose(self, round_)
        meant = mx.zeros(proposals.tokens.shape, mx.bool_)
        if round_.given is not None:
            meant = round_.given.meant
        arrays = round_.lengths, round_.tail, round_.active, proposals.tokens, meant
        for n, tail, active, proposed, which in zip(
            *(a.tolist() for a in arrays), strict=True
        ):
            fits = [t for t in texts if n <= len(t) and t[:n][-2:] == tail]
            # One that was read late may have ended.
            if active and fits and texts[UNDRAFTED] not in fits:
                rounds.append(([t[:n] for t in fits], proposed, which))
        return proposals

    monkeypatch.setattr(DraftModelRows, "propose", noted)
    store = Store(memory=1 << 24, block_size=4)
    config = EngineConfig(prefill_step_size=6)
    runner = ModelRunner(draft, "draft", config, backend, store)
    drafter: Drafter = DraftModel(
        runner, vocab_size=runner.vocab_size, max_draft_tokens=4
    )
    if chained:
        drafter = ChainDrafter(NgramDrafter(), drafter)
    params = [SamplingParams(max_tokens=n) for n in lengths]
    params[UNDRAFTED] = replace(params[UNDRAFTED], num_draft_tokens=0)
    rows = exact(
        model, None, PROMPTS, params,
        batch_size=3, backend=backend, prefill_step_size=6, drafter=drafter,
        length=Script(lambda number: (3, 2, 0, 3, 0, 0, 1)[number % 7]),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert drafted / 4 < accepted < drafted
    assert len(rounds) > 12
    assert max(store.found) == len(PROMPTS[3]) - 1
    for had, proposed, meant in rounds:
        said = greedy_after(draft, had, [proposed] * len(had))
        assert any(
            all(g or a == b for g, a, b in zip(meant, proposed, s, strict=True))
            for s in said
        ), (had, proposed, said)
