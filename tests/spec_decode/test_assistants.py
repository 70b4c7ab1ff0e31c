"""Assistants of Gemma 4: they attend to the target's own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from specdec import SpecDecoder, UnsupportedModelError
from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.models import LoadedModel
from specdec.models.draft_heads import load_head
from specdec.models.draft_heads.loading import read_head_config
from specdec.models.runner import ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.sampling_params import SamplingParams
from specdec.spec_decode.head_drafter import AssistantRows, HeadDrafter
from tests.models.draft_heads import published
from tests.models.draft_heads.published import write_head
from tests.models.folders import write_folder
from tests.models.gguf_files import VOCAB as VOCABULARY
from tests.plain import AT_ONCE, BEHIND, ask, drafts_of, exact, finish, greedy
from tests.scripted import Script
from tests.spec_decode.repetitive import check_distribution, make_prompts
from tests.spec_decode.test_heads import Noted, noted_rounds, read_by

K = 3
#: Layers 2 and 3 are the last that compute keys and values.
TARGET = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "sliding_window_pattern": 2,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "global_head_dim": 16,
}
PLACES = {"sliding_attention": 2, "full_attention": 3}
CONFIGS = {
    "dense": published.assistant_config(),
    "ordered": published.assistant_config(ordered=True),
}


@pytest.fixture(scope="module")
def targets(tiny_model: Callable[..., Any]) -> dict[str, LoadedModel]:
    models: dict[str, Any] = {
        name: tiny_model("gemma4_text", **TARGET, vocab_size=vocab_size)
        for name, vocab_size in (("dense", 97), ("ordered", 96))
    }
    return {
        name: LoadedModel(model, None, {}, name)  # type: ignore[arg-type]
        for name, model in models.items()
    }


def drafter_of(
    path: Path,
    name: str,
    target: LoadedModel,
    backend: BackendDefaults = AT_ONCE,
    store: PrefixStore | None = None,
) -> tuple[HeadDrafter, dict[str, Any]]:
    """A drafter of an assistant that was written, and what was."""
    weights = write_head(path, CONFIGS[name])
    config = read_head_config(path)
    assert config is not None
    head = load_head(path, config, "the draft", target).model
    runner = ModelRunner(head, "the draft", EngineConfig(), backend, store)
    drafter = HeadDrafter(runner, vocab_size=runner.vocab_size, max_draft_tokens=K)
    return drafter, weights


def proposals(
    name: str, w: dict[str, Any], model: Any, text: Sequence[int], k: int = K
) -> list[int]:
    """What an assistant proposes greedily after ``text``, from a plain forward."""
    before = list(text[:-1])
    cache = make_prompt_cache(model)
    state = np.array(model.model(mx.array([before]), cache=cache)[0, -1])
    held = {}
    for kind, place in PLACES.items():
        arrays = (cache[place].keys, cache[place].values)
        keys, values = (np.array(a[0, :, : len(before)]).swapaxes(0, 1) for a in arrays)
        held[kind] = (keys, values)
    table = np.array(model.model.embed_tokens.weight)
    return published.assistant_chain(
        w, CONFIGS[name], lambda token: table[token] * 32**0.5, text[-1], state, held, k
    )


@pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_proposals_are_those_of_a_plain_forward(
    name: str,
    backend: BackendDefaults,
    targets: dict[str, LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every round of rows that join, leave, rest and begin with one token.

    Windows have wrapped and rounds were rolled back. Another layer's keys, a position
    more, or an entry that was rejected would show here.
    """
    target = targets[name]
    drafter, weights = drafter_of(tmp_path, name, target, backend)
    prompts = [[t % 96 for t in p] for p in make_prompts()[:6]]
    lengths = [9 + 2 * i for i in range(len(prompts))]
    whole = [
        [*p, *greedy(target.model, p, n)] for p, n in zip(prompts, lengths, strict=True)
    ]
    noted = Noted(monkeypatch, whole, AssistantRows)
    rows = exact(
        target.model, None, prompts, lengths,
        batch_size=3, num_draft_tokens=K, backend=backend, drafter=drafter,
        length=Script(lambda number: (K, K - 1, K, K, 0)[number % 5]),
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert drafted / 4 < accepted < drafted
    assert len(noted.found) > 25
    for texts, proposed in noted.found[:: 1 if backend is AT_ONCE else 3]:
        k = len(proposed)
        wanted = [proposals(name, weights, target.model, text, k) for text in texts]
        assert proposed in wanted, (len(texts[0]), proposed, wanted)


@pytest.mark.parametrize("bits", [None, 8])
def test_packed_keys_and_bounded_caches(
    bits: int | None,
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target's caches may be packed, and all of them rings."""
    sizes: dict[str, Any] = {"head_dim": 32, "global_head_dim": 64}
    monkeypatch.setitem(CONFIGS, "wide", published.assistant_config(**sizes))
    model = tiny_model("gemma4_text", **TARGET | sizes)
    target = LoadedModel(model, None, {}, "target")  # type: ignore[arg-type]
    drafter, _ = drafter_of(tmp_path, "wide", target)
    config = EngineConfig(
        num_draft_tokens=K, kv_bits=bits, kv_group_size=32, quantized_kv_start=4
    )
    if bits is None:
        config = replace(config, max_kv_size=16)
    plain = ModelRunner(target.model, "target", config, AT_ONCE)
    outputs = []
    for each, runner in ((drafter, read_by(drafter, target, config)), (None, plain)):
        engine = Engine(runner, each, config, AT_ONCE, frozenset())
        for i, prompt in enumerate(make_prompts()[2:5]):
            ask(engine, prompt, 20, i)
        outputs.append(finish(engine))
        assert engine.stats.draft_error is None
    assert outputs[0] == outputs[1]


def test_sampled_rows_follow_the_target(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution of the first three tokens, against exact enumeration."""
    monkeypatch.setitem(CONFIGS, "four", published.assistant_config(vocab_size=4))
    sizes = TARGET | {"vocab_size": 4, "vocab_size_per_layer_input": 4}
    model = tiny_model("gemma4_text", **sizes)
    target = LoadedModel(model, None, {}, "target")  # type: ignore[arg-type]
    accepted = check_distribution(
        model,
        drafter_of(tmp_path, "four", target, BEHIND)[0],
        SamplingParams(temperature=1.0, verification="block"),
        BEHIND,
        prompt=[1, 2, 0, 3],
        vocab_size=4,
        num_rows=512,
    )
    assert accepted > 50


@pytest.mark.parametrize("ordered", [False, True])
def test_a_packed_assistant(
    ordered: bool, targets: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """Its embedding too, of which single rows are read where it has centroids."""
    config = published.assistant_config(ordered, hidden_size=64, intermediate_size=64)
    target = targets["ordered" if ordered else "dense"]
    weights = write_head(tmp_path, config)
    packed, plain = dict[str, mx.array](), dict[str, mx.array]()
    for name, array in weights.items():
        a = mx.array(array)
        if a.ndim == 1:
            packed[name] = plain[name] = a
            continue
        stem = name.removesuffix(".weight")
        size = 64 if a.shape[1] % 64 == 0 else 32
        w, scales, biases = mx.quantize(a, group_size=size, bits=8)
        plain[name] = mx.dequantize(w, scales, biases, size, 8)
        packed |= {name: w, f"{stem}.scales": scales, f"{stem}.biases": biases}
    logits = []
    for arrays, more in ((plain, {}), (packed, {"quantization": {"bits": 8}})):
        mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
        head: Any = load_head(tmp_path, config | more, "the draft", target).model
        logits.append(np.array(head(mx.array([[3, 50]]), [])))
    shown = logits[0] > logits[0].max() - 1000
    assert np.allclose(logits[0][shown], logits[1][shown], atol=1e-3)


def test_prefixes_are_reused(
    targets: dict[str, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assistant needs no state of the prompt but the last, and keeps nothing.

    What is proposed after a reused prefix is what is proposed without.
    """
    target, rounds = targets["dense"], []
    config = EngineConfig(batch_size=2, num_draft_tokens=K, prefill_step_size=16)
    prefix = make_prompts()[4][:41]
    for store in (None, PrefixStore(memory=1 << 28, block_size=8)):
        drafter, _ = drafter_of(tmp_path, "dense", target, store=store)
        runner = read_by(drafter, target, config, store=store)
        with monkeypatch.context() as patch:
            rounds.append(noted_rounds(patch, AssistantRows))
            for text in ([*prefix, 1, 2], [*prefix, 5, 6]):
                engine = Engine(runner, drafter, config, AT_ONCE, frozenset())
                request = ask(engine, text, 6)
                finish(engine)
                assert request.tokens == greedy(target.model, text, 6)
        assert (request.prefix_tokens > 30) == (store is not None)
    assert rounds[0] == rounds[1]


def test_by_name(tmp_path: Path) -> None:
    """A folder is known by its configuration, and its memory is planned for.

    A chain with n-grams takes it too.
    """
    sizes: dict[str, Any] = TARGET | {"vocab_size_per_layer_input": VOCABULARY}
    sizes["head_dim"] = 8
    write_folder(tmp_path / "target", "gemma4_text", **sizes)
    described = published.assistant_config(vocab_size=VOCABULARY)
    described["backbone_hidden_size"] = 64
    write_head(tmp_path / "head", described)
    config = EngineConfig(num_draft_tokens="auto", batch_size=2)
    prompts, wanted = [[5, 9, 11, 40], [7], [3, 4]], []
    for draft in ("none", str(tmp_path / "head"), f"ngram+{tmp_path / 'head'}"):
        decoder = SpecDecoder.from_pretrained(
            str(tmp_path / "target"), draft, config=config
        )
        results = decoder.generate(prompts, max_tokens=9)
        wanted.append([r.token_ids for r in results])
        assert decoder.stats.draft_error is None
    assert wanted[1:] == wanted[:1] * 2


def test_other_targets_are_refused(
    tiny_model: Callable[..., Any], targets: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """By one line, before any work."""
    llama = LoadedModel(tiny_model("llama"), None, {}, "llama")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="name the Gemma 4 model"):
        drafter_of(tmp_path, "dense", llama)
    other = tiny_model("gemma4_text", **TARGET | {"global_head_dim": 32})
    with pytest.raises(UnsupportedModelError, match="4 heads of 16 do not fit"):
        drafter_of(tmp_path, "dense", LoadedModel(other, None, {}, "other"))  # type: ignore[arg-type]
