"""Draft heads in whole runs: what they propose, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec import SpecDecoder, UnsupportedModelError
from specdec.backend import BackendDefaults
from specdec.cache.core import FEW_TOKENS
from specdec.config import EngineConfig
from specdec.cuda.attention_patch import usual_calls
from specdec.engine.build import check_before_loading
from specdec.engine.engine import Engine
from specdec.engine.profiler import draft_length, measure_forwards
from specdec.memory import RowNeeds
from specdec.memory.planning import plan_memory
from specdec.model_names import named_draft
from specdec.models import LoadedModel, metal_kernels
from specdec.models.compiled import CompiledForwards
from specdec.models.draft_heads import load_head
from specdec.models.runner import ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    DraftRows,
    NgramDrafter,
    NgramOptions,
    Proposals,
    Round,
)
from specdec.spec_decode.drafter import most_proposed
from specdec.spec_decode.head_drafter import BlockRows, ChainedRows, HeadDrafter
from tests.cache.test_in_place import Device, mlx_writes
from tests.cuda.test_cache_write import attending
from tests.models.draft_heads import published
from tests.models.draft_heads.published import LAYERS, READS, VOCAB, write_head
from tests.models.folders import write_folder
from tests.models.gguf_files import VOCAB as VOCABULARY
from tests.plain import (
    AT_ONCE,
    BEHIND,
    METAL,
    ask,
    drafts_of,
    exact,
    finish,
    greedy,
    run_rows,
)
from tests.scripted import Script
from tests.spec_decode.by_hand import layer_outputs
from tests.spec_decode.repetitive import check_distribution, make_prompts

CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": published.dflash_config(
        layer_types=["sliding_attention", "full_attention"], sliding_window=9
    ),
    "dflash2": published.dflash2_config(),
    "dspark": published.dspark_config(),
    "dspark gated": published.dspark_config(markov_head_type="gated"),
    "dspark rnn": published.dspark_config(markov_head_type="rnn"),
    "eagle3": published.eagle_config(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
    "dspark qwen3.5": published.qwen35_config(),
    "nemotron": published.nemotron_config(),
    "muse": published.muse_config(),
    "peagle": published.peagle_config(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
    "dflash of few tokens": published.speculators_config("dflash"),
}
#: Windows, causality and rotated numbers of some, as the numpy forward takes them.
HOW: dict[str, dict[str, Any]] = {
    "dflash": {"windows": (9, None), "causal": (True, False)},
    "dspark qwen3.5": {"dims": 4},
    "nemotron": {"windows": (7, 7), "causal": (True, True)},
    "muse": {"windows": (7, 7)},
}
K = 3
TAILS = replace(METAL, tail=8)


@pytest.fixture(scope="module")
def lender(tiny_model: Callable[..., Any]) -> LoadedModel:
    model = tiny_model("qwen3", num_hidden_layers=LAYERS)
    return LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]


def drafter_of(
    path: Path,
    config: dict[str, Any],
    target: LoadedModel,
    backend: BackendDefaults = AT_ONCE,
    k: int = K,
    store: PrefixStore | None = None,
) -> tuple[HeadDrafter, dict[str, Any]]:
    """A drafter of a head that was written, and what was."""
    weights = write_head(path, config)
    head = load_head(path, config, "the draft", target).model
    runner = ModelRunner(
        head, "the draft", EngineConfig(prefill_step_size=16), backend, store
    )
    drafter = HeadDrafter(runner, vocab_size=runner.vocab_size, max_draft_tokens=k)
    return drafter, weights


def read_by(
    drafter: HeadDrafter,
    target: LoadedModel,
    config: EngineConfig,
    backend: BackendDefaults = AT_ONCE,
    store: PrefixStore | None = None,
) -> ModelRunner:
    """The target, which records what that head reads."""
    runner = ModelRunner(target.model, "target", config, backend, store)
    return runner.recording(
        drafter.hidden_layers, drafter.context, whole=drafter.reads_prompts
    )


def noted_rounds(patch: pytest.MonkeyPatch, *kinds: type[DraftRows]) -> list[Any]:
    """Lengths of rows and what they propose, round by round, from now on."""
    rounds: list[Any] = []
    for kind in kinds:

        def noted(rows: Any, round_: Round, usual: Any = kind.propose) -> Proposals:
            proposals: Proposals = usual(rows, round_)
            rounds.append((round_.lengths.tolist(), proposals.tokens.tolist()))
            return proposals

        patch.setattr(kind, "propose", noted)
    return rounds


def proposals(
    name: str, w: dict[str, Any], model: Any, tokens: Sequence[int], k: int = K
) -> list[int]:
    """What a head proposes greedily after ``tokens``, by numpy and a plain forward.

    A block has K slots to propose from, however few of them a round takes.
    """
    embedding = np.array(model.model.embed_tokens.weight)
    outputs = layer_outputs(model, range(LAYERS), mx.array([list(tokens)]))
    features = np.concatenate([np.array(outputs[i][0]) for i in READS], -1)[:-1]
    if "eagle" in name:
        following = np.array(tokens[1:])
        found, _ = published.eagle_chain(
            w, features, following, embedding, k, config=CONFIGS[name]
        )
        return found
    anchored = "dspark" in name
    mask = {"dflash of few tokens": 94, "nemotron": 95}.get(
        name, 95 if anchored else 96
    )
    block = embedding[[tokens[-1], *[mask] * (K - anchored)]]
    states = published.block_states(w, features, block, **HOW.get(name, {}))
    states = (states if anchored else states[1:])[:k]
    logits = states @ w.get("lm_head.weight", embedding).T
    if name == "dflash2":
        logits = 3 * np.tanh(0.5 * logits / 3)
    proposed: list[int] = []

    def chosen(logits: Any) -> int:
        proposed.append(int(logits.argmax()))
        return proposed[-1]

    published.walk(w, states, logits, tokens[-1], chosen)
    return proposed


class Noted:
    """Notes what rows of heads propose, and has most of it accepted.

    What is handed on is mostly how the row goes on, so that rounds keep one to all of
    their tokens; heads of random weights are hardly ever right.

    Args:
        whole: prompts, with what follows them.
        kinds: the classes of rows.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        whole: Sequence[list[int]],
        *kinds: type[DraftRows],
    ):
        self.whole = whole
        #: Texts that a row may have had, and what it proposed.
        self.found: list[tuple[list[list[int]], list[int]]] = []
        for kind in kinds or (BlockRows, ChainedRows):
            patch.setattr(kind, "propose", self.noting(kind.propose))

    def noting(self, usual: Callable[..., Proposals]) -> Callable[..., Proposals]:
        def propose(rows: Any, round_: Round) -> Proposals:
            proposals = usual(rows, round_)
            arrays: list[Any] = [
                round_.lengths, round_.recent, round_.active, proposals.tokens,
            ]  # fmt: skip
            handed_on = []
            each = zip(*(a.tolist() for a in arrays), strict=True)
            for n, recent, active, tokens in each:
                newest = [t for t in recent[-2:] if t >= 0]
                texts = [
                    t for t in self.whole
                    if active and n <= len(t) and t[:n][-2:] == newest
                ]  # fmt: skip
                if texts:
                    self.found.append(([t[:n] for t in texts], tokens))
                    tokens = [*texts[0][n : n + len(tokens)], *tokens][: len(tokens)]
                    tokens[n % len(tokens)] = (tokens[n % len(tokens)] + n % 3) % VOCAB
                handed_on.append(tokens)
            return replace(proposals, tokens=mx.array(handed_on, mx.int32))

        return propose


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, BEHIND) for name in CONFIGS),
        *((name, AT_ONCE) for name in ("dflash", "eagle3", "peagle")),
        *((name, TAILS) for name in ("dflash", "eagle3", "peagle")),
    ],
)
def test_proposals_are_those_of_a_plain_forward(
    name: str,
    backend: BackendDefaults,
    lender: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every round of rows that join, leave, rest and begin with one token.

    Features of a wrong layer or position, a context that kept what was rejected, or
    one of another row, would show here; none of them changes what is emitted.
    """
    monkeypatch.setattr(metal_kernels, "tail_from", lambda head: 24)
    drafter, weights = drafter_of(tmp_path, CONFIGS[name], lender, backend)
    assert drafter.runner.options.tail == backend.tail
    check_proposals(name, drafter, weights, lender, backend, monkeypatch)


def check_proposals(
    name: str,
    drafter: HeadDrafter,
    weights: dict[str, Any],
    lender: LoadedModel,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = make_prompts()[:6]
    lengths = [9 + 2 * i for i in range(len(prompts))]
    whole = [
        [*p, *greedy(lender.model, p, n)] for p, n in zip(prompts, lengths, strict=True)
    ]
    noted = Noted(monkeypatch, whole)
    rows = exact(
        lender.model, None, prompts, lengths,
        batch_size=3, num_draft_tokens=K, backend=backend, drafter=drafter,
        length=Script(lambda number: (K, K - 1, K, K, 0)[number % 5]),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert drafted / 4 < accepted < drafted
    compiled: Any = drafter.runner.compiled
    # A block is one function, its choices included.
    proposes = {"eagle3": "step", "peagle": "states"}.get(name, "greedy")
    assert compiled is None or {key[0] for key in compiled._functions} == {
        "absorb", proposes,
    }  # fmt: skip
    assert len(noted.found) > 25
    for texts, proposed in noted.found[:: 1 if backend is AT_ONCE else 3]:
        k = len(proposed)  # the last rounds of a row are narrower
        wanted = [proposals(name, weights, lender.model, text, k) for text in texts]
        assert proposed in wanted, (len(texts[0]), proposed, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_contexts_are_written_in_place(
    name: str, lender: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As proposals above; a context is written in one round, and read in the next."""
    device = Device(monkeypatch)
    backend = replace(BEHIND, kernels=True, compile_after=None)
    attending(lender.model)
    try:
        drafter, weights = drafter_of(tmp_path, CONFIGS[name], lender, backend)
        assert drafter.runner.options.in_place
        widths = mlx_writes(monkeypatch)
        check_proposals(name, drafter, weights, lender, backend, monkeypatch)
    finally:
        usual_calls(lender.model)
    assert device.writes
    assert all(width > FEW_TOKENS for width in widths)


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_rows_are_placed_with_their_own_context(
    name: str, lender: LoadedModel, tmp_path: Path
) -> None:
    """Three rows are prefilled in four slots; the last slot is idle, and left out."""
    drafter, _ = drafter_of(tmp_path, CONFIGS[name], lender, BEHIND)

    def rows_of(lengths: Sequence[int], seed: int) -> Any:
        rows = drafter.rows([[1] * (n + 1) for n in lengths], max_length=64)
        shape = len(lengths), 8, len(READS) * published.WIDTH
        hidden = mx.random.normal(shape, key=mx.random.key(seed))
        rows.observe(hidden, mx.ones(shape[:2], mx.int32), lengths)
        return rows

    def contents(rows: Any) -> list[Any]:
        arrays = [mx.array(state) for state in rows._outputs]
        for cache in rows.context._caches:
            arrays += [cache.keys[:, :, :8], cache.values[:, :, :8], cache.offset]
        return [np.array(a) for a in arrays]

    rows, others = rows_of([3, 4, 5, 6], 0), rows_of([7, 2, 8, 0], 1)
    before, new = contents(rows), contents(others)
    rows.place([3, 0, 1], others, 4)
    for got, old, placed in zip(contents(rows), before, new, strict=True):
        np.testing.assert_array_equal(got[[3, 0, 1]], placed[:3])
        np.testing.assert_array_equal(got[2], old[2])
    rows.reset([1, 2])  # an idle slot that holds tokens is read, and written after
    for cache in rows.context._caches:
        assert cache.offset.tolist() == [2, 0, 0, 7]


def of_few_tokens(name: str, vocab_size: int) -> dict[str, Any]:
    """The configuration for a target of so many tokens."""
    config = copy.deepcopy(CONFIGS[name])
    config.get("transformer_layer_config", config)["vocab_size"] = vocab_size
    if name != "eagle3":
        config.get("dflash_config", config)["mask_token_id"] = vocab_size - 1
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = vocab_size - 1
    if name == "dflash2":
        config["dflash_config"]["selector_top_k"] = 2  # the others have no chance
    return config


@pytest.mark.parametrize(
    ("name", "verification"),
    [
        ("dspark", "block"),
        ("dspark rnn", "block"),
        ("dflash2", "block"),
        ("dflash2", "rejection"),
        ("eagle3", "block"),
        ("peagle", "block"),
        ("dflash of few tokens", "rejection"),
    ],
)
def test_sampled_rows_follow_the_target(
    name: str, verification: Any, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The distribution of the first three tokens, against exact enumeration.

    It would be another one if a head named other probabilities than it draws from.
    """
    model = tiny_model("qwen3", num_hidden_layers=LAYERS, vocab_size=4)
    target = LoadedModel(model, None, {}, "target")  # type: ignore[arg-type]
    config = of_few_tokens(name, 4)
    accepted = check_distribution(
        model,
        drafter_of(tmp_path, config, target, BEHIND, k=2)[0],
        SamplingParams(temperature=1.0, verification=verification),
        BEHIND,
        prompt=[1, 2, 0, 3],
        vocab_size=4,
        num_rows=512,
    )
    assert accepted > 50


@pytest.mark.parametrize(
    "name", ["dflash of few tokens", "dflash2", "dspark", "eagle3", "peagle"]
)
def test_sampled_rows_are_those_without_a_draft(
    name: str, lender: LoadedModel, tmp_path: Path
) -> None:
    """With penalties, bias and filters too, which choose proposals one by one."""
    drafter, _ = drafter_of(tmp_path, CONFIGS[name], lender, k=K)
    params = [
        SamplingParams(max_tokens=12, temperature=0.9, seed=3),
        SamplingParams(max_tokens=9, temperature=0.6, top_p=0.8, seed=4),
        SamplingParams(max_tokens=10, repetition_penalty=1.3, logit_bias={7: 2.0}),
    ]
    rows = exact(
        lender.model, None, make_prompts()[1:4], params,
        num_draft_tokens=K, drafter=drafter,
    )  # fmt: skip
    assert drafts_of(rows)[0] > 30


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_companions_do_not_change_a_block(
    verification: Any, lender: LoadedModel, tmp_path: Path
) -> None:
    """Rows that draft more, or end later, change no row's text under the ratio rules.

    Slots of a block see those after them: in a block as wide as the round, a row's
    first proposals would depend on how many tokens other rows draft.
    """
    drafter, _ = drafter_of(tmp_path, CONFIGS["dspark"], lender)
    prompts = make_prompts()[1:5]
    params = [
        SamplingParams(
            max_tokens=n,
            temperature=1.2,
            seed=n,
            verification=verification,
            num_draft_tokens=k,
        )
        for n, k in ((24, 1), (6, None), (20, 2), (28, None))
    ]
    rows = run_rows(lender.model, None, prompts, params, drafter=drafter)
    for row, prompt, p in zip(rows[:3], prompts, params, strict=False):
        (alone,) = run_rows(lender.model, None, [prompt], [p], drafter=drafter)
        assert row.tokens == alone.tokens
        assert row.accepted == alone.accepted


def test_one_row_writes_entries_by_a_graph(
    lender: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone row's entry needs no exact read: else each plain round runs as usual."""
    drafter, _ = drafter_of(tmp_path, CONFIGS["dspark"], lender, BEHIND)
    compiled, usual = drafter.runner.compiled, list[Any]()
    assert compiled is not None
    call = CompiledForwards.__call__

    def counted(self: CompiledForwards, *given: Any, **how: Any) -> Any:
        result = call(self, *given, **how)
        if self is compiled:
            usual.append(result is None)
        return result

    monkeypatch.setattr(CompiledForwards, "__call__", counted)
    run_rows(
        lender.model, None, [[5, 6, 7]], [SamplingParams(max_tokens=24)],
        drafter=drafter, backend=BEHIND, length=Script(lambda number: 0),
    )  # fmt: skip
    assert len(usual) > 20
    assert not any(usual[4:])  # shapes are new before


def test_a_block_has_an_end(
    lender: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds are no wider than a block; beside n-grams the rest counts for nothing.

    Else what nobody proposed would be verified round after round.
    """
    config = CONFIGS["dspark"] | {"block_size": 2}
    drafter, _ = drafter_of(tmp_path, config, lender, k=4)
    (row,) = exact(
        lender.model, None, [[5, 6, 7]],
        SamplingParams(max_tokens=20, temperature=1.0, seed=1, verification="coupled"),
        num_draft_tokens=4, drafter=drafter,
    )  # fmt: skip
    assert len(row.num_draft_tokens_per_pos) == 2
    runner = ModelRunner(lender.model, "target", EngineConfig(), AT_ONCE)
    caplog.set_level("INFO", "specdec")
    for chosen in (4, 2, "auto"):
        asked = EngineConfig(num_draft_tokens=chosen)
        length = draft_length(asked, runner, drafter, AT_ONCE)
        assert most_proposed(drafter, asked.max_draft_tokens) == 2
    assert length is not None
    assert length.max_draft_tokens == 2
    assert caplog.messages == ["the draft proposes up to 2 tokens in a round, not 4"]
    both = draft_length(
        asked, runner, ChainDrafter(NgramDrafter(NgramOptions()), drafter), AT_ONCE
    )
    assert both is not None
    assert both.max_draft_tokens == 8


def test_by_name(tmp_path: Path) -> None:
    """A folder is known by its configuration, checked before loading, and drafts.

    A chain with n-grams takes it too.
    """
    write_folder(tmp_path / "target", "qwen3", num_hidden_layers=LAYERS)
    size = {"hidden_size": 64, "vocab_size": VOCABULARY}
    write_head(tmp_path / "head", published.dflash_config(**size))
    write_head(tmp_path / "other", published.eagle_config())
    config = EngineConfig(num_draft_tokens=2, batch_size=2)
    prompts = [[5, 9, 11, 40], [7], [3, 4]]
    target, wanted = str(tmp_path / "target"), []
    for draft in ("none", str(tmp_path / "head"), f"ngram+{tmp_path / 'head'}"):
        decoder = SpecDecoder.from_pretrained(target, draft, config=config)
        results = decoder.generate(prompts, max_tokens=9)
        wanted.append([r.token_ids for r in results])
        if draft != "none":
            assert sum(r.drafted for r in results) > 0
    assert wanted[1:] == wanted[:1] * 2
    with pytest.raises(UnsupportedModelError, match=r"other was made for .* width 32"):
        check_before_loading(target, named_draft(str(tmp_path / "other")), None, config)


def test_memory_stays_within_the_plan(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Features of prompts, contexts, and logits of whole blocks.

    Left out of the plan, rows would be admitted that do not fit.
    """
    sizes = {"hidden_size": 128, "vocab_size": 1000, "intermediate_size": 256}
    model = tiny_model("qwen3", num_hidden_layers=LAYERS, head_dim=32, **sizes)
    described = {**sizes, "num_attention_heads": 4, "head_dim": 32}
    target = LoadedModel(model, None, described, "target")  # type: ignore[arg-type]
    head_config = published.dflash_config(
        **sizes, num_hidden_layers=1, layer_types=None, dflash={"mask_token_id": 9}
    )
    write_head(tmp_path, head_config)
    draft = load_head(tmp_path, head_config, "head", target)
    config = EngineConfig(batch_size=4, num_draft_tokens=5, prefill_step_size=64)
    plan = plan_memory(target, draft, config, AT_ONCE)
    assert plan.draft is not None
    assert plan.draft.feature_bytes >= 4 * 3 * 128
    assert len(plan.draft.caches) == 1
    runner = ModelRunner(model, "target", config, AT_ONCE)
    drafter = HeadDrafter(
        ModelRunner(draft.model, "head", config, AT_ONCE),
        vocab_size=1000,
        max_draft_tokens=5,
    )
    runner = runner.recording(drafter.hidden_layers)
    gc.collect()
    mx.synchronize()
    others = mx.get_active_memory() - plan.weight_bytes
    mx.reset_peak_memory()
    engine = Engine(runner, drafter, config, AT_ONCE, frozenset())
    params = SamplingParams(max_tokens=20)
    for i in range(4):
        ask(engine, (5 + i,) * 150, params, i)
    finish(engine)
    planned = plan.peak([RowNeeds(150, params)] * 4)
    assert planned / 3 < mx.get_peak_memory() - others < planned


@pytest.mark.parametrize("undrafted", ["request", "policy"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dflash", [0, 41, 41, 0, 16, 42, 43]),  # a window is not cut
        ("dflash2", [0, 41, 41, 24, 16, 42, 43]),
        ("dspark rnn", [0, 41, 41, 24, 16, 42, 43]),
        ("eagle3", [0, 40, 40, 23, 16, 42, 42]),
        ("peagle", [0, 40, 40, 23, 16, 42, 42]),
    ],
)
def test_prefixes_are_kept_with_the_context(
    name: str,
    expected: list[int],
    undrafted: str,
    lender: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is proposed after a reused prefix is what is proposed without.

    An entry of EAGLE-3's context reads the token after its own, and must not be reused
    where another one follows. Of a row that is not drafted for, the prompt is stored,
    and not the answer: the head has not followed it.
    """
    config = EngineConfig(batch_size=2, num_draft_tokens=K, prefill_step_size=16)
    prefix = make_prompts()[4][:41]
    k = 0 if undrafted == "request" else None
    plain = SamplingParams(max_tokens=9, num_draft_tokens=k)
    never = Script(lambda _: 0, may_pay=False) if undrafted == "policy" else None
    # One after the other, so that each finds what those before it stored.
    texts = [[*prefix, 1, 2], [*prefix, 5, 6], [*prefix, 9], [*prefix[:24], 3, 4]]
    texts += [prefix[:17], [*prefix, 1, 2, 3]]
    texts += [[*texts[0], *greedy(lender.model, texts[0], 9), 7]]
    rounds = []
    for store in (None, PrefixStore(memory=1 << 28, block_size=8)):
        drafter, _ = drafter_of(tmp_path, CONFIGS[name], lender, store=store)
        runner, reused = read_by(drafter, lender, config, store=store), []
        with monkeypatch.context() as patch:
            rounds.append(noted_rounds(patch, BlockRows, ChainedRows))
            for number, text in enumerate(texts):
                length = None if number else never
                engine = Engine(
                    runner, drafter, config, AT_ONCE, frozenset(), length=length
                )
                request = ask(engine, text, 4 if number else plain)
                finish(engine)
                wanted = greedy(lender.model, text, request.params.max_tokens)
                assert request.tokens == wanted
                reused.append(request.prefix_tokens)
    assert reused == expected
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("backend", [AT_ONCE, METAL], ids=["cpu", "metal"])
@pytest.mark.parametrize("name", ["dflash", "eagle3", "peagle"])
def test_answers_are_kept_with_the_context(
    name: str, backend: BackendDefaults, lender: LoadedModel, tmp_path: Path
) -> None:
    """After a reused answer, the head proposes what it proposes without a store.

    An entry too few or too many, or of another token, would change what is accepted.
    """
    config = EngineConfig(batch_size=2, num_draft_tokens=K, prefill_step_size=16)
    counts: list[list[tuple[int, int]]] = []
    for store in (None, PrefixStore(memory=1 << 28, block_size=8)):
        drafter, _ = drafter_of(tmp_path, CONFIGS[name], lender, backend, store=store)
        runner = read_by(drafter, lender, config, backend, store)
        prompts = [list(make_prompts()[4][:n]) for n in (41, 20)]
        counts.append([])
        for turn in range(3):
            engine = Engine(runner, drafter, config, backend, frozenset())
            requests = [ask(engine, p, 9 + 5 * i, i) for i, p in enumerate(prompts)]
            finish(engine)
            assert engine.stats.draft_error is None
            for prompt, request in zip(prompts, requests, strict=True):
                wanted = greedy(lender.model, prompt, request.params.max_tokens)
                assert request.tokens == wanted
                counts[-1].append((request.drafted, request.accepted))
                if store and turn:  # the token before the message is the newest
                    assert request.prefix_tokens == len(prompt) - 3
                prompt += [*request.tokens, 3 + turn, 7]
    assert counts[0] == counts[1]


def test_a_prefix_fits_beside_rows_that_are_not_drafted_for(
    lender: LoadedModel, tmp_path: Path
) -> None:
    """The head gets their prefix and is shown whole chunks after it.

    With room for a prompt of one token, it raised an error, and the engine went on
    without a draft for all rows.
    """
    config = EngineConfig(num_draft_tokens=K, prefill_step_size=64)
    store = PrefixStore(memory=1 << 28, block_size=8)
    drafter, _ = drafter_of(tmp_path, CONFIGS["dspark"], lender, BEHIND, store=store)
    runner = read_by(drafter, lender, config, BEHIND, store)
    engine = Engine(runner, drafter, config, BEHIND, frozenset())
    for i, k in enumerate((None, 0)):
        prompt = (*range(3, 20), *range(1 + 2 * i))
        params = SamplingParams(max_tokens=4, num_draft_tokens=k)
        request = ask(engine, prompt, params, i)
        finish(engine)
        assert request.tokens == greedy(lender.model, prompt, 4)
        assert request.prefix_tokens == 18 * i
    assert engine.stats.draft_error is None


def test_costs_and_types(lender: LoadedModel, tmp_path: Path) -> None:
    """Drafting is timed for one token and for several: a block is no row of steps.

    In bfloat16 nothing of a head is wider: it would be slower, and caches larger.
    """
    model = copy.deepcopy(lender.model)
    model.set_dtype(mx.bfloat16)
    target = LoadedModel(model, None, {}, "target")  # type: ignore[arg-type]
    for name in ("dspark", "dflash2", "eagle3", "peagle"):
        drafter, _ = drafter_of(tmp_path / name, CONFIGS[name], target)
        runner = ModelRunner(model, "target", EngineConfig(), AT_ONCE)
        runner = runner.recording(drafter.hidden_layers)
        forwards = measure_forwards(
            runner, drafter, 2, max_draft_tokens=K, budget_seconds=0.05
        )
        assert forwards.draft_step + forwards.draft_once > 0
        rows: Any = drafter.rows([[1, 2, 3], [4]], max_length=40)
        hidden = mx.zeros((2, 1, 32 * len(READS)), mx.bfloat16)
        rows.observe(hidden, mx.array([[5], [6]]), [1, 1])
        for cache in rows.context._caches:
            assert cache.keys.dtype == mx.bfloat16
        chained = "eagle" in name
        assert [s.dtype for s in rows._outputs] == [mx.bfloat16] * chained
        states = sum(s.nbytes for s in rows._outputs)
        assert rows.nbytes == states + rows.context.nbytes > states
