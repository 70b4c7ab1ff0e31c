"""A draft with other token ids than its target: what it reads, and proposes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec import EngineConfig, Grammar, SamplingParams, SpecDecoder
from specdec.backend import BackendDefaults
from specdec.models import LoadedModel, VocabularyMap, load
from specdec.models.runner import ModelRunner
from specdec.spec_decode import DraftModel, NamedDrafter, NgramOptions
from tests.models.folders import write_folder
from tests.models.gguf_files import byte_level
from tests.models.test_gguf_tokenizer import sentencepiece_vocabulary
from tests.plain import AT_ONCE, BACKENDS, drafts_of, exact
from tests.spec_decode.repetitive import check_distribution, make_prompts

MORE = 23


def shuffled(
    tiny_model: Callable[..., Any], target: Any, share: float = 1.0
) -> tuple[Any, VocabularyMap]:
    """The target itself with other ids and more tokens, and which are which.

    Args:
        share: of the target's tokens, those that the draft has; the others are read as
            its last token.
    """
    size = int(target.model.embed_tokens.weight.shape[0])
    rng = np.random.default_rng(2)
    ids = rng.permutation(size + MORE)[:size].astype(np.int32)
    proposes = rng.random(size) < share
    draft = tiny_model(
        "llama", seed=9, vocab_size=size + MORE,
        num_hidden_layers=len(target.model.layers),
    )  # fmt: skip
    weights = dict(target.parameters())
    embedding = draft.model.embed_tokens.weight
    embedding[mx.array(ids[proposes])] = target.model.embed_tokens.weight[
        mx.array(np.flatnonzero(proposes))
    ]
    draft.update(weights)
    draft.model.embed_tokens.weight = embedding
    mx.eval(draft)
    reads = np.where(proposes, ids, size + MORE - 1).astype(np.int32)
    return draft, VocabularyMap(reads, proposes, float(proposes.mean()))


def drafter_of(
    draft: Any,
    vocabulary: VocabularyMap,
    backend: BackendDefaults,
    k: int,
    kind: type[DraftModel] = DraftModel,
) -> DraftModel:
    runner = ModelRunner(draft, "draft", EngineConfig(prefill_step_size=16), backend)
    size = len(vocabulary.reads)
    return kind(runner, vocab_size=size, max_draft_tokens=k, vocabulary=vocabulary)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 20},
    {"temperature": 0.0},
    {"temperature": 0.5},
)
MIXED = [
    SamplingParams(max_tokens=23 + i % 3, seed=i, **settings)
    for i, settings in enumerate(SETTINGS)
]


@BACKENDS
@pytest.mark.parametrize(("k", "batch_size"), [(1, 8), (4, 3)])
def test_the_target_in_disguise_is_always_accepted(
    k: int, batch_size: int, backend: BackendDefaults,
    tiny_model: Callable[..., Any], target: Any,
) -> None:  # fmt: skip
    """An id that is read or proposed wrongly, noise of another id: not all accepted.

    Greedy rows, sampled ones, filters, penalties and bias, joining and leaving.
    """
    draft, vocabulary = shuffled(tiny_model, target)
    rows = exact(
        target, None, make_prompts(), MIXED,
        batch_size=batch_size, num_draft_tokens=k, backend=backend,
        drafter=drafter_of(draft, vocabulary, backend, k),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert accepted == drafted > 0


@BACKENDS
def test_tokens_that_the_draft_lacks(
    backend: BackendDefaults, tiny_model: Callable[..., Any], target: Any
) -> None:
    """They are read as another one, never proposed, and the output is the target's."""
    draft, vocabulary = shuffled(tiny_model, target, share=0.93)
    rows = exact(
        target, None, make_prompts(), MIXED,
        batch_size=5, num_draft_tokens=3, backend=backend,
        drafter=drafter_of(draft, vocabulary, backend, 3),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert 0.1 * drafted < accepted < drafted


def test_a_wrong_map_is_seldom_accepted(
    tiny_model: Callable[..., Any], target: Any
) -> None:
    """The output is exact with any map, so that only acceptance shows a wrong one."""
    draft, right = shuffled(tiny_model, target)
    wrong = replace(right, reads=np.roll(right.reads, 1))
    rows = exact(
        target, None, make_prompts(), 20, num_draft_tokens=3,
        drafter=drafter_of(draft, wrong, AT_ONCE, 3),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert accepted < 0.2 * drafted


class Unnormalised(DraftModel):
    """A planted fault: its probabilities add up to what it may propose of all."""

    def rows(self, prompts: Any, **options: Any) -> Any:
        rows: Any = super().rows(prompts, **options)
        propose = rows.propose

        def faulty(round_: Any) -> Any:
            proposals = propose(round_)
            return replace(proposals, probabilities=0.4 * proposals.probabilities)

        rows.propose = faulty
        return rows


@pytest.mark.parametrize(
    ("verification", "kind"),
    [("rejection", DraftModel), ("block", DraftModel), ("rejection", Unnormalised)],
)
def test_ratio_rules_keep_the_distribution(
    verification: Any, kind: type[DraftModel], tiny_model: Callable[..., Any]
) -> None:
    """Probabilities add up to 1 over what the draft may propose, by target ids."""
    model = tiny_model("llama", seed=3, vocab_size=4, num_hidden_layers=2)
    draft = tiny_model("llama", seed=4, vocab_size=9, num_hidden_layers=1)
    vocabulary = VocabularyMap(
        np.array([7, 2, 5, 0], np.int32), np.array([True, True, False, True]), 0.75
    )

    drafter = drafter_of(draft, vocabulary, AT_ONCE, 2, kind)
    scores: Any = drafter.proposable(mx.arange(9.0)).tolist()
    assert scores == [7.0, 2.0, -math.inf, 0.0]

    def check() -> int:
        return check_distribution(
            model,
            drafter,
            SamplingParams(temperature=1.0, verification=verification),
            AT_ONCE,
            prompt=[1, 2, 0],
            vocab_size=4,
            num_rows=1024,
        )

    if kind is Unnormalised:  # the check sees such a fault
        with pytest.raises(AssertionError):
            check()
    else:
        assert check() > 100


def folder_of(path: Path, vocabulary: Any, seed: int) -> LoadedModel:
    mx.random.seed(seed)
    write_folder(path, vocabulary=vocabulary)
    return load(str(path))


def other_byte_level() -> Any:
    """The bytes in another order, other merges, other names for special tokens."""
    vocabulary = byte_level()
    first = vocabulary.tokens[:256]
    vocabulary.tokens[:256] = first[128:] + first[:128]
    for name, other in (("<|im_end|>", "<|eot|>"), ("<|im_start|>", "<|start|>")):
        vocabulary.tokens[vocabulary.tokens.index(name)] = other
    at = vocabulary.merges.index("a b")
    vocabulary.tokens[vocabulary.tokens.index("ab")] = "ba"
    vocabulary.merges[at] = "b a"
    return vocabulary


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_through_the_python_api(kind: str, tmp_path: Path) -> None:
    """Special tokens, samplers, grammars, prefix cache, n-grams: the same tokens.

    The second call finds prompts in the prefix store, for the draft by its own ids.
    """
    target = folder_of(tmp_path / "target", None, 0)
    spm = sentencepiece_vocabulary(space_prefix=True)
    other = other_byte_level() if kind == "byte-level" else spm
    draft = folder_of(tmp_path / "draft", other, 0)
    prompts = ["Hello the don't 123", "ab " * 20, "<|im_start|>user\n\n\u00e9"]
    params = [
        SamplingParams(max_tokens=8, temperature=1.0, seed=1),
        SamplingParams(max_tokens=8, grammar=Grammar.regex("[ab12 ]{30}the")),
        SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=3),
    ]
    config = EngineConfig(
        batch_size=2, num_draft_tokens=3, prefix_cache_memory=1 << 24,
        prefill_step_size=8,
    )  # fmt: skip
    plain = SpecDecoder(target, config=config).generate(prompts, params)
    chained = NamedDrafter("ngram+draft", draft, NgramOptions(min_ngram=3))
    for factory, calls in ((NamedDrafter("draft", draft), 2), (chained, 1)):
        decoder = SpecDecoder(target, drafter=factory, config=config)
        for _ in range(calls):
            results = decoder.generate(prompts, params)
            assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        share = decoder.stats.vocabulary_share
        assert share is not None
        assert 0.05 < share < 1
        assert decoder.stats.drafted > 0
        assert (decoder.stats.prefix_tokens > 0) is (calls > 1)
