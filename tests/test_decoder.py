"""The Python API, on a small random model with a tokenizer made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec import (
    ConfigError,
    EngineConfig,
    ModelError,
    ModelNotFoundError,
    PromptError,
    SamplingParams,
    SpecDecoder,
    VocabularyMismatchError,
)
from specdec.decoder import wired_memory
from specdec.model_names import DraftSpec
from specdec.models import LoadedModel
from specdec.spec_decode import (
    DraftContext,
    DraftModel,
    NamedDrafter,
    NgramDrafter,
    NgramOptions,
)
from tests.models.folders import write_folder
from tests.plain import greedy

# Counts depend on k: what is asserted of them needs a fixed one.
FIXED = EngineConfig(num_draft_tokens=3)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


class Detokenizer:
    """Tokens as their numbers, comma separated; two tokens make one piece."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._shown = 0
        self._ready = 0

    @property
    def text(self) -> str:
        return "".join(f"{t}," for t in self._tokens)

    @property
    def last_segment(self) -> str:
        segment = "".join(f"{t}," for t in self._tokens[self._shown : self._ready])
        self._shown = self._ready
        return segment

    def add_token(self, token: int) -> None:
        self._tokens.append(token)
        self._ready = len(self._tokens) // 2 * 2

    def finalize(self) -> None:
        self._ready = len(self._tokens)


@dataclass
class Tokenizer:
    """What the decoder asks of mlx-lm's TokenizerWrapper."""

    vocabulary: dict[str, int]
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: None = None
    has_chat_template: bool = False
    bos_token: None = None

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.vocabulary[c] for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{t}," for t in tokens)


def loaded(model: Any, name: str = "tiny", **options: Any) -> LoadedModel:
    vocabulary = {chr(i + 161): i for i in range(97)}
    tokenizer: Any = Tokenizer(vocabulary, **options)
    return LoadedModel(model=model, tokenizer=tokenizer, config={}, name=name)


def drafting(model: Any, **options: Any) -> SpecDecoder:
    """A decoder whose draft is its target."""
    config = EngineConfig(**{"num_draft_tokens": 3, **options})
    return SpecDecoder(loaded(model), loaded(model, "draft"), config=config)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_results_come_in_the_order_of_the_prompts(target: Any, batch_size: int) -> None:
    decoder = drafting(target, batch_size=batch_size, num_draft_tokens=2)
    params = [SamplingParams(max_tokens=n) for n in (9, 2, 5, 7)]
    results = decoder.generate(PROMPTS, params)
    assert [r.index for r in results] == [0, 1, 2, 3]
    for result, prompt, p in zip(results, PROMPTS, params, strict=True):
        assert result.token_ids == greedy(target, prompt, p.max_tokens)
        assert result.text == "".join(f"{t}," for t in result.token_ids)
        assert result.prompt_tokens == len(prompt)
        assert result.finish_reason == "length"
        assert result.accepted == result.drafted


def test_streams_and_stats_add_up_to_the_results(target: Any) -> None:
    decoder = drafting(target)
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    results = {}
    for event in decoder.stream(PROMPTS, max_tokens=9):
        assert event.index not in results, "nothing may follow a result"
        texts[event.index] = texts.get(event.index, "") + event.text
        tokens.setdefault(event.index, []).extend(event.token_ids)
        if event.result is not None:
            results[event.index] = event.result
    whole = decoder.generate(PROMPTS, max_tokens=9)
    assert [results[i] for i in range(4)] == whole
    for index, result in results.items():
        assert texts[index] == result.text
        assert tokens[index] == result.token_ids
    stats = decoder.stats
    assert stats.prompts == 4
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert (stats.generated_tokens, stats.decode_tokens) == (36, 32)
    assert stats.row_rounds == sum(r.rounds for r in whole)
    assert stats.drafted == sum(r.drafted for r in whole)
    assert stats.accepted == sum(r.accepted for r in whole)
    assert stats.rounds == 2
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second > 0


def test_eos_ends_a_row_and_is_not_emitted(target: Any) -> None:
    whole = greedy(target, PROMPTS[0], 9)
    eos = whole[4]
    decoder = SpecDecoder(loaded(target, eos_token_ids=frozenset({eos})))
    (result,) = decoder.generate([PROMPTS[0]], SamplingParams(max_tokens=9))
    assert result.token_ids == whole[: whole.index(eos)]
    assert result.finish_reason == "stop"


def test_one_seed_for_all_prompts_differs_from_row_to_row(target: Any) -> None:
    decoder = SpecDecoder(loaded(target))
    hot = SamplingParams(max_tokens=12, temperature=2.0)
    same = decoder.generate([[5, 6]] * 3, hot, seed=3)
    assert len({tuple(r.token_ids) for r in same}) == 3
    alone = [decoder.generate([[5, 6]], hot, seed=3 + i)[0] for i in range(3)]
    assert [r.token_ids for r in alone] == [r.token_ids for r in same]


def test_errors_come_before_any_work(target: Any) -> None:
    decoder = SpecDecoder(loaded(target))
    with pytest.raises(PromptError, match="prompt 1"):
        decoder.stream([[1], []])
    with pytest.raises(ConfigError, match="2 SamplingParams for 3 prompts"):
        decoder.stream([[1], [2], [3]], [SamplingParams()] * 2)
    assert decoder.generate([]) == []


def test_a_stream_left_midway_harms_nothing(target: Any) -> None:
    decoder = drafting(target)
    left = decoder.stream(PROMPTS, max_tokens=9)
    next(left)
    other = decoder.stream(PROMPTS[:1], max_tokens=9)
    next(other)
    results = decoder.generate(PROMPTS, max_tokens=9)
    assert [r.token_ids for r in results] == [greedy(target, p, 9) for p in PROMPTS]
    stats = decoder.stats
    for events in (left, other):
        for _ in events:
            pass
    # Each call counts for itself.
    assert (stats.prompts, stats.generated_tokens) == (4, 36)


def test_draft_of_another_vocabulary(target: Any) -> None:
    other = loaded(target, "other")
    other.tokenizer.vocabulary.clear()
    other.tokenizer.vocabulary.update({chr(i + 1161): i for i in range(97)})
    with pytest.raises(VocabularyMismatchError, match="has 0 of its 97 tokens"):
        SpecDecoder(loaded(target), other)


def test_no_draft_tokens_means_no_draft(target: Any) -> None:
    decoder = drafting(target, num_draft_tokens=0)
    results = decoder.generate(PROMPTS, max_tokens=4)
    assert decoder.stats.drafted == 0
    assert [r.token_ids for r in results] == [greedy(target, p, 4) for p in PROMPTS]


@pytest.mark.parametrize(
    "name", ["ngram", "layers:0", "ngram+layers:1", "ngram+self:8bit"]
)
def test_drafts_by_name(tiny_model: Callable[..., Any], name: str) -> None:
    """Through the factory that from_pretrained and the command line use."""
    model = tiny_model("llama", hidden_size=64, head_dim=16)
    decoder = SpecDecoder(loaded(model), drafter=name, config=FIXED)
    assert decoder.draft_name == name
    results = decoder.generate(PROMPTS, max_tokens=25)
    assert [r.token_ids for r in results] == [greedy(model, p, 25) for p in PROMPTS]
    assert decoder.stats.drafted > 0


@pytest.mark.parametrize("k", [0, 4])
def test_a_processor_after_a_stop_text(target: Any, k: int) -> None:
    """It may be called to the end of the round, to no effect (docs/sampling.md)."""
    decoder = SpecDecoder(
        loaded(target), loaded(target), config=EngineConfig(num_draft_tokens=4)
    )
    whole = greedy(target, [5, 6, 7], 30)
    stop = f"{whole[8]},"
    at = whole.index(whole[8])
    calls: list[int] = []

    def refuses_what_is_behind(tokens: Any, logits: Any) -> Any:
        calls.append(len(tokens) - 3)
        # Two tokens make one piece of text: the one after may be needed to see it.
        if calls[-1] > at + 1:
            raise ArithmeticError
        return logits

    params = SamplingParams(
        max_tokens=30,
        stop=(stop,),
        logits_processors=(refuses_what_is_behind,),
        num_draft_tokens=k,
    )
    (result,) = decoder.generate([[5, 6, 7]], params)
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == "".join(f"{t}," for t in whole[:at])
    assert calls == list(range(len(calls)))
    assert at < calls[-1] + 1 <= at + 2 + k


LOADING: Any = SpecDecoder.from_pretrained
MAKING: Any = SpecDecoder


class NoDrafter:
    def __init__(self, context: DraftContext): ...


#: What cannot be, by a model and its LoadedModel, and the line that says so.
MISTAKES: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda m, loaded: MAKING("x"), "target is of type str: give a LoadedModel"),
    (lambda m, loaded: MAKING(None), "target is of type NoneType: give a Loaded"),
    (lambda m, loaded: LOADING(3), "target is of type int: name a"),
    (
        lambda m, loaded: LOADING(loaded),
        "target is of type LoadedModel: name a folder, a .gguf file or a hub id "
        "(SpecDecoder itself takes models that are loaded)",
    ),
    (lambda m, loaded: LOADING("owner/name", 4), "draft is of type int: name a fol"),
    (
        lambda m, loaded: MAKING(loaded, config={"batch_size": 1}),
        "config is of type dict: give EngineConfig(...)",
    ),
    (
        lambda m, loaded: LOADING("owner/name", config=4),
        "config is of type int: give EngineConfig(...)",
    ),
    (lambda m, loaded: MAKING(m), "target has no tokenizer: give what mlx_lm.load"),
    (lambda m, loaded: MAKING(m, 4), "a model and its tokenizer are needed, not Model"),
    (lambda m, loaded: MAKING(loaded, draft=(m,)), "draft has no tokenizer"),
    (lambda m, loaded: MAKING(loaded, loaded, loaded), "too many models"),
    (lambda m, loaded: MAKING(loaded, "self:4bit"), "draft is of type str: give a"),
    (
        lambda m, loaded: MAKING(loaded, loaded, drafter=NamedDrafter("mine", loaded)),
        "leave one out",
    ),
    (
        lambda m, loaded: MAKING(loaded, drafter=Described("mine", m)),
        "model of drafter mine is of type Model: it",
    ),
    *(
        (lambda m, loaded, drafter=drafter: MAKING(loaded, drafter=drafter), message)
        for drafter, message in (
            ("ngram:x", "draft 'ngram:x' is not known: use ngram"),
            (NgramDrafter(), "drafter is of type NgramDrafter, which makes no drafter"),
            (NgramDrafter, "takes NgramOptions, not a DraftContext: "),
            (DraftModel, "drafter is the class DraftModel, which makes no drafter of"),
            (lambda: None, "drafter is of type function, which makes no drafter"),
            (NoDrafter, "drafter NoDrafter made a NoDrafter: derive it from"),
            (lambda context: None, "made a NoneType: derive it from"),
        )
    ),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_what_cannot_be_is_one_line(
    target: Any, make: Callable[[Any, Any], object], message: str
) -> None:
    """A line that says what is wanted, instead of an error from within."""
    with pytest.raises(ConfigError) as refused:
        make(target, loaded(target))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_models_by_path(tmp_path: Path) -> None:
    """As mlx-lm's load takes them."""
    with pytest.raises(ModelError, match=r"has no config\.json"):
        SpecDecoder.from_pretrained(tmp_path)


def test_a_misspelt_draft_is_reported_before_the_target_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("specdec.decoder.check_before_loading")
    monkeypatch.delattr("specdec.decoder.load")
    with pytest.raises(ModelNotFoundError, match="no model at no-such: give a folder"):
        SpecDecoder.from_pretrained("owner/name", "no-such")


def test_a_factory_gets_what_it_makes_a_drafter_for(target: Any) -> None:
    contexts: list[DraftContext] = []

    def my_drafts(context: DraftContext) -> NgramDrafter:
        contexts.append(context)
        return NgramDrafter(NgramOptions(min_ngram=1))

    model = loaded(target)
    config = EngineConfig(num_draft_tokens=5)
    decoder = SpecDecoder(model, drafter=my_drafts, config=config)
    (context,) = contexts
    assert context.target is model
    assert (context.vocab_size, context.max_draft_tokens) == (97, 5)
    assert context.runner(model).vocab_size == 97
    assert decoder.draft_name == "my_drafts"
    decoder.generate(PROMPTS, max_tokens=20)
    assert decoder.stats.drafted > 0


@pytest.fixture
def draft(tiny_model: Callable[..., Any]) -> LoadedModel:
    return loaded(tiny_model("llama", seed=1, num_hidden_layers=1), "draft")


@dataclass
class Described:
    """As a third party would write it, who knows nothing of specdec's own."""

    name: str
    model: Any

    def __call__(self, context: DraftContext) -> NgramDrafter:
        return NgramDrafter()


def test_a_factory_may_say_what_it_runs(target: Any, draft: LoadedModel) -> None:
    """Its name is shown and its model's memory counted; of others nothing is."""
    config = EngineConfig(memory_limit=2**40, num_draft_tokens=3)

    def planned(drafter: Any) -> Any:
        decoder = SpecDecoder(loaded(target), drafter=drafter, config=config)
        assert decoder.bounds.preflight is not None
        return decoder.draft_name, decoder.bounds.preflight.plan.draft

    name, counted = planned(Described("mine", draft))
    assert name == "mine"
    weights: Any = tree_flatten(draft.model.parameters())
    assert counted.weight_bytes == sum(array.nbytes for _, array in weights)
    assert planned(Described("mine", None)) == ("mine", None)
    assert planned(lambda context: NgramDrafter()) == ("<lambda>", None)


def test_a_class_with_such_properties_says_nothing(target: Any) -> None:
    """They are its instances': no model is to be found there."""

    class Mine(NgramDrafter):
        def __init__(self, context: DraftContext):
            super().__init__()

        @property
        def name(self) -> str:
            return "instance"

        @property
        def model(self) -> None:
            return None

    assert SpecDecoder(loaded(target), drafter=Mine).draft_name == "Mine"


def test_layers_that_are_not_there(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"2 layers, 0 to 1: .* layer 7"):
        NamedDrafter.load(DraftSpec.parse("ngram+layers:0,7"), loaded(target))


@pytest.mark.parametrize("with_config", [False, True])
def test_models_that_mlx_lm_loaded(
    target: Any, tmp_path: Path, with_config: bool
) -> None:
    """The tokenizer is taken for a draft; the context length is lost without config."""
    write_folder(tmp_path / "model")
    parts: Any = mlx_lm.load(str(tmp_path / "model"), return_config=with_config)
    decoder = SpecDecoder(*parts, draft=parts, config=FIXED, name="mine")
    assert decoder.target_name == "mine"
    results = decoder.generate(PROMPTS, max_tokens=9)
    expected = [greedy(parts[0], p, 9) for p in PROMPTS]
    assert [r.token_ids for r in results] == expected
    assert decoder.stats.accepted == decoder.stats.drafted > 0
    assert decoder.bounds.context_length == 512
    assert SpecDecoder(*parts).target_name == "llama"


def test_one_prompt_and_settings_by_keyword(
    target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text is a list of letters; settings are dropped; a bar is there unasked."""
    decoder = SpecDecoder(loaded(target), config=FIXED)
    text = "".join(chr(161 + token) for token in PROMPTS[0])
    (one,) = decoder.generate(text, max_tokens=5)
    assert one.token_ids == greedy(target, PROMPTS[0], 5)
    assert decoder.generate(PROMPTS[0], max_tokens=5)[0].token_ids == one.token_ids
    # Fields of shared parameters, and of each prompt's own.
    shared = SamplingParams(max_tokens=3, temperature=1.0, seed=4)
    drawn = decoder.generate(PROMPTS, shared, max_tokens=6)
    assert drawn == decoder.generate(
        PROMPTS, SamplingParams(max_tokens=6, temperature=1.0, seed=4)
    )
    assert [len(r.token_ids) for r in drawn] == [6] * 4
    each = [SamplingParams(max_tokens=n) for n in (1, 2, 3, 4)]
    results = decoder.generate(iter(PROMPTS), each, logprobs=True)
    assert [len(r.logprobs or ()) for r in results] == [1, 2, 3, 4]
    assert capsys.readouterr().err == ""
    shown = decoder.generate(PROMPTS, max_tokens=6, progress=True)
    assert [r.index for r in shown] == [0, 1, 2, 3]
    assert "4/4" in capsys.readouterr().err
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"max_token": 5},
            "SamplingParams has no setting max_token: did you mean max_tokens?",
        ),
        (
            {"zzz": 5},
            "SamplingParams has no setting zzz: it has max_tokens, min_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError) as caught:
            decoder.stream(PROMPTS, None, **settings)
        assert str(caught.value).startswith(message)


def test_whatever_is_passed_as_prompts(target: Any) -> None:
    """A message's keys became prompts, arrays were refused, None had a traceback."""
    decoder = SpecDecoder(loaded(target), config=FIXED)
    want = decoder.generate([[5, 6, 7]], max_tokens=3)[0].token_ids
    array = np.array([5, 6, 7])
    one_prompt: list[Any] = [(5, 6, 7), array, mx.array(array), [array], [*array]]
    for prompts in [*one_prompt, array[None]]:
        (one,) = decoder.generate(prompts, max_tokens=3)
        assert one.token_ids == want
    both: list[Any] = [array, [5, 6, 7]]
    two = decoder.generate(both, max_tokens=3)
    assert [each.token_ids for each in two] == [want, want]
    wrong: list[tuple[Any, str]] = [
        (None, "prompts is of type NoneType: give a string"),
        (5, "prompts is of type int"),
        (mx.array(5), "prompts is of type int"),
        (b"hi", "prompts is of type bytes"),
        (memoryview(b"hi"), "prompts is of type memoryview"),
        ({5, 6}, "prompts is of type set"),
        ({"content": "Hi"}, "prompt 0: chat messages need a chat template"),
        ([b"hi"], "prompt 0: expected a string, a list of chat messages"),
        ([[1.5]], "prompt 0: a token id is a whole number"),
        (np.array([1.5]), "prompt 0: expected a string"),
        ([None], "prompt 0: expected a string"),
    ]
    for prompts, message in wrong:
        with pytest.raises(PromptError) as caught:
            decoder.generate(prompts, max_tokens=3)
        assert str(caught.value).startswith(message)


def test_a_prompt_that_cannot_be_served_harms_none(target: Any) -> None:
    """One that is too long, or empty, ended a file of ten thousand."""
    model = loaded(target)
    model.config["max_position_embeddings"] = 12
    decoder = SpecDecoder(model, model, config=FIXED)
    prompts: list[Any] = [[5] * 20, [5, 6, 7], "", [8], [5, 6]]
    params = [SamplingParams(max_tokens=4, stop_token_ids=(9,))] * 4
    params.append(SamplingParams(stop_token_ids=(100_000,)))
    events = decoder.stream(prompts, params, keep_going=True)
    results = {e.index: e.result for e in events if e.result is not None}
    errors = {i: r.error for i, r in results.items() if r.finish_reason == "error"}
    assert errors.keys() == {0, 2, 4}
    assert all(r.index == i for i, r in results.items())
    for index, message in ((0, "it has 20 tokens"), (2, "it is empty"), (4, "names")):
        assert message in str(errors[index])
    for index in (1, 3):
        assert results[index].token_ids == greedy(target, prompts[index], 4)
    with pytest.raises(PromptError, match="prompt 0"):
        decoder.stream(prompts, params)


def test_wired_memory_stays_until_the_last_context_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first to end dropped the limit while others decoded; the last left it."""
    limits = [0]

    def recommend() -> int:
        limits.append(100)
        return limits[-2]

    monkeypatch.setattr("specdec.decoder.maybe_set_recommended_wired_limit", recommend)
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    # A stream that another test has not read to its end still counts.
    monkeypatch.setattr("specdec.decoder._Wired.users", 0)
    first, second = wired_memory(), wired_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert limits[-1] == 100
    second.__exit__(None, None, None)
    assert limits == [0, 100, 0]
    with wired_memory(), wired_memory():
        assert limits[-1] == 100
    assert limits == [0, 100, 0, 100, 0]

    def fail() -> None:
        raise RuntimeError("the device failed")

    monkeypatch.setattr(mx, "synchronize", fail)
    with pytest.raises(RuntimeError, match="device failed"), wired_memory():
        pass
    assert limits[-1] == 0


def test_tokens_after_the_first_are_counted_however_they_are_shown(
    tiny_model: Callable[..., Any],
) -> None:
    """A first token that a stop text held back was counted among those after it."""
    decoder = SpecDecoder(loaded(tiny_model("llama")))
    plain = decoder.generate([[5, 6, 7], [8]], max_tokens=12)
    assert decoder.stats.decode_tokens == 22
    stops = tuple({r.text[0] + "\1\2" for r in plain})
    held = decoder.generate([[5, 6, 7], [8]], max_tokens=12, stop=stops)
    assert [r.token_ids for r in held] == [r.token_ids for r in plain]
    assert decoder.stats.decode_tokens == 22
    decoder.generate([[5, 6, 7], [8]], max_tokens=1)
    assert decoder.stats.decode_tokens == 0
