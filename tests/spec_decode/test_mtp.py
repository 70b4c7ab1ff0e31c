"""MTP heads: in a target's checkpoint, beside it and apart, of all families."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import utils as mlx_lm_utils

from specdec import (
    EngineConfig,
    ModelError,
    SamplingParams,
    SpecDecoder,
    UnsupportedModelError,
)
from specdec.engine.build import check_before_loading
from specdec.model_names import named_draft
from specdec.models import LoadedModel, load, load_draft, model_outline
from specdec.models.draft_heads import load_head, mtp
from specdec.models.runner import ModelRunner
from specdec.spec_decode.head_drafter import ChainedRows, HeadDrafter
from tests.models.architectures import COMMON, build
from tests.models.draft_heads import mtp_checkpoints as published
from tests.models.draft_heads.mtp_checkpoints import (
    ARCHS,
    QWEN,
    arrays_of,
    head_arrays,
    less_one,
    make_parts,
    proposals,
    write_apart,
    write_target,
)
from tests.models.draft_heads.published import attention, mlp, norm, turned
from tests.models.folders import write_folder
from tests.models.gguf_files import VOCAB
from tests.plain import AT_ONCE, BEHIND, exact, greedy
from tests.scripted import Script
from tests.spec_decode.repetitive import check_distribution, make_prompts
from tests.spec_decode.test_heads import Noted

K = 3
EVERY = pytest.mark.parametrize("arch", ARCHS)
# One of each way of naming arrays.
SOME = ("qwen3_5", "qwen3_5_moe", "glm4_moe_lite", "mimo", "nemotron_h")


def check_arrays(head: Any, parts: dict[str, Any], number: int = 0) -> None:
    """Every array of a head is that of ``parts``."""
    module = head.heads[number]
    pairs = {"fc": module.fc.weight, "out": module.norm.weight}
    pairs |= {"token": module.token_norm.weight, "state": module.state_norm.weight}
    for name, array in pairs.items():
        assert mx.allclose(array, parts[name], atol=1e-6), name
    stored = dict(arrays_of(module.layer))
    wanted = dict(arrays_of(parts["layer"]))
    assert stored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert mx.allclose(stored[name], array, atol=1e-6), name


@EVERY
def test_arrays_are_read(arch: str, tmp_path: Path) -> None:
    """Of every family: experts one by one, gains less one, latent matrices joined."""
    _, parts, _ = write_target(tmp_path / "target", arch)
    check_arrays(load_draft("mtp", load(tmp_path / "target")).model, parts)


@EVERY
def test_proposals_are_those_of_a_plain_forward(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that join, leave and rest, of a target with recurrent layers too.

    Pairs in another order, a norm left out before the output is fed back, or a position
    too many would show here.
    """
    _, parts, _ = write_target(tmp_path / "target", arch)
    target = load(tmp_path / "target")
    head: Any = load_draft("mtp", target).model
    check_proposals(arch, [parts], target.model, head, monkeypatch)
    shared = {id(a) for _, a in arrays_of(target.model)}
    arrays = [a for _, a in arrays_of(head) if id(a) not in shared]
    assert sum(a.size for a in arrays) < 45_000


def check_proposals(
    arch: str,
    heads: list[dict[str, Any]],
    model: Any,
    head: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ModelRunner(head, "mtp", EngineConfig(prefill_step_size=16), AT_ONCE)
    drafter = HeadDrafter(runner, vocab_size=VOCAB, max_draft_tokens=K)
    prompts = make_prompts()[:6]
    lengths = [3, 14, 6, 9, 4, 11]  # rows in the middle leave first
    whole = [[*p, *greedy(model, p, n)] for p, n in zip(prompts, lengths, strict=True)]
    noted = Noted(monkeypatch, whole)
    exact(
        model, None, prompts, lengths,
        batch_size=3, num_draft_tokens=K, backend=AT_ONCE, drafter=drafter,
        length=Script(lambda number: (K, K - 1, K, 0, 1)[number % 5]),
    )  # fmt: skip
    assert len(noted.found) > 12
    for texts, proposed in noted.found:
        k = len(proposed)
        wanted = [proposals(arch, heads, model, t, k) for t in texts]
        assert proposed in wanted
    assert isinstance(drafter.rows([[1, 2]], max_length=9), ChainedRows)


@pytest.mark.parametrize("arch", ["qwen3_5", "glm4_moe"])
def test_several_heads_take_turns(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second head proposes the second token; Qwen's share what is around them."""
    path = tmp_path / "target"
    model, parts, first = write_target(path, arch, with_head=False)
    other = make_parts(arch, model)
    more = head_arrays(arch, model, other)
    if arch in QWEN:
        more = {k: a for k, a in less_one(more).items() if "layers.0." in k}
        other |= {name: parts[name] for name in ("fc", "token", "state", "out")}
    n = len(published.trunk_of(model).layers)
    both = less_one(first) if arch in QWEN else dict(first)
    for key, array in more.items():
        key = key.replace(f"layers.{n}.", f"layers.{n + 1}.")
        both[key.replace("mtp.layers.0.", "mtp.layers.1.")] = array
    mx.save_safetensors(str(path / "mtp.safetensors"), both)
    target = load(path)
    head: Any = load_draft("mtp", target).model
    for number, each in enumerate((parts, other)):
        check_arrays(head, each, number)
    check_proposals(arch, [parts, other], target.model, head, monkeypatch)


def test_a_head_by_its_formulas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In numpy, from the published arrays, without a line of mlx-lm's for the head."""
    model, _, head = write_target(tmp_path / "target", "mimo")
    w = {
        k.removeprefix("model.mtp_layers.0."): np.array(a).astype(np.float64)
        for k, a in head.items()
    }
    embedding = np.array(model.model.embed_tokens.weight)
    output = np.array(model.lm_head.weight)

    def projected(x: Any, kind: str, at: Any) -> Any:
        name = f"self_attn.{kind}_proj"
        each = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        each = each.reshape(len(x), -1, 8)
        return each if kind == "v" else turned(each, at)

    def chain(
        arch: str, heads: Any, target: Any, tokens: list[int], k: int
    ) -> list[int]:
        states = np.array(model.model(mx.array([tokens])))[0, :-1]
        following, proposed = tokens[1:], list[int]()
        for _step in range(k):
            at = np.arange(len(following))
            e = norm(embedding[following], w["token_layernorm.weight"], 1e-5)
            g = norm(states, w["hidden_layernorm.weight"], 1e-5)
            x = np.concatenate([g, e], -1) @ w["input_proj.weight"].T
            y = norm(x, w["input_layernorm.weight"], 1e-5)
            q, key, value = (projected(y, kind, at) for kind in "qkv")
            seen = attention(q, key, value, at <= at[:, None])
            x = x + seen @ w["self_attn.o_proj.weight"].T
            x = x + mlp(norm(x, w["post_attention_layernorm.weight"], 1e-5), w, "")
            after = norm(x, w["final_layernorm.weight"], 1e-5)
            proposed.append(int((after[-1] @ output.T).argmax()))
            following = [*following, proposed[-1]]
            states = np.concatenate([states, after[-1:]])
        return proposed

    monkeypatch.setattr(f"{__name__}.proposals", chain)
    target = load(tmp_path / "target")
    loaded: Any = load_draft("mtp", target).model
    check_proposals("mimo", [], target.model, loaded, monkeypatch)


FEW = 48


@pytest.mark.parametrize(
    ("bits", "backend"), [(None, AT_ONCE), (None, BEHIND), (4, AT_ONCE)]
)
def test_rows_of_frequent_tokens(
    bits: int | None, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are proposed the best of the first tokens, whichever rows are beside them.

    Rows whose prompts have others are proposed any, and what templates add counts for
    neither. A part of another row's logits, or of the wrong tokens, would show here.
    """
    monkeypatch.setattr(mtp, "FREQUENT", FEW)
    _, parts, _ = write_target(tmp_path / "target", "qwen3_5")
    target = load(tmp_path / "target")
    if bits is not None:
        fits = [nn.Linear, nn.Embedding]
        nn.quantize(
            target.model, 32, bits,
            class_predicate=lambda _, m: type(m) in fits and m.weight.shape[-1] == 32,
        )  # fmt: skip
    head: Any = load_draft("mtp", target).model
    hidden = mx.random.normal((2, 3, 32))
    whole = head.predict(hidden)
    few = head.frequent.logits(hidden)
    assert few.shape[-1] == head.num_frequent == FEW < whole.shape[-1] / 2
    assert mx.allclose(few, whole[..., :FEW], atol=1e-5)
    runner = ModelRunner(head, "mtp", EngineConfig(prefill_step_size=16), backend)
    drafter = HeadDrafter(
        runner, vocab_size=VOCAB, max_draft_tokens=K, special=[VOCAB - 1]
    )
    rng = np.random.default_rng(3)
    drawn: Any = [rng.integers(0, FEW if i % 3 else VOCAB - 1, 24) for i in range(9)]
    prompts = [[*row.tolist(), VOCAB - 1, VOCAB - 1] for row in drawn]
    lengths = [3, 14, 6, 9, 4, 11, 16, 13, 8]
    model = target.model
    texts = [[*p, *greedy(model, p, n)] for p, n in zip(prompts, lengths, strict=True)]
    noted = Noted(monkeypatch, texts)
    exact(
        model, None, prompts, lengths,
        batch_size=4, num_draft_tokens=K, backend=backend, drafter=drafter,
    )  # fmt: skip
    seen = {True: 0, False: 0}
    for rows, proposed in noted.found:
        k, few_alone = len(proposed), drafter.mostly_frequent(rows[0][:26])
        first = FEW if few_alone else None
        wanted = [proposals("qwen3_5", [parts], model, t, k, first=first) for t in rows]
        assert proposed in wanted
        seen[few_alone] += max(proposed) >= FEW
    assert seen[False] > 3
    assert not seen[True]
    # An idle slot makes no row wait for the logits of all tokens.
    idle: Any = drafter.rows([[FEW] * 3, [1] * 3], max_length=64)
    idle.reset([0])
    monkeypatch.delattr(type(head), "predict")
    idle._logits(mx.zeros((2, 1, 32)))


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_rows_of_frequent_tokens(
    verification: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow the target's distribution, also where it draws tokens never proposed."""
    monkeypatch.setattr(mtp, "FREQUENT", 2)
    monkeypatch.setattr(published, "VOCAB", 4)
    model, _ = published.make_model("qwen3_5")
    arrays = head_arrays("qwen3_5", model, make_parts("qwen3_5", model))
    apart = write_apart(tmp_path / "apart", "qwen3_5", arrays)
    target = LoadedModel(model, None, {}, "target")  # type: ignore[arg-type]
    config = json.loads((apart / "config.json").read_text())
    head = load_head(apart, config, "apart", target).model
    runner = ModelRunner(head, "mtp", EngineConfig(), BEHIND)
    accepted = check_distribution(
        model,
        HeadDrafter(runner, vocab_size=4, max_draft_tokens=2),
        SamplingParams(temperature=1.0, verification=verification),
        BEHIND,
        prompt=[1, 0, 0, 1],
        vocab_size=4,
        num_rows=512,
    )
    assert accepted > 50


SIDECARS = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors",
            "model-mtp-head.safetensors", "extra/head.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", SIDECARS)
def test_a_file_beside_the_target(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Conversions leave the head out, or put it there; it is said where it was."""
    path = tmp_path / "target"
    _, parts, head = write_target(path, "qwen3_5", with_head=False)
    (path / name).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / name), less_one(head))
    if name.startswith("extra"):
        config = json.loads((path / "config.json").read_text())
        config["mlx_lm_extra_tensors"] = {"mtp_file": name}
        (path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "specdec"):
        check_arrays(load_draft("mtp", load(path)).model, parts)
    assert f"mtp: the head is in {name}" in caplog.text
    outlined: Any = model_outline.outline_draft("mtp", model_outline.outline(path))
    assert (
        dict(arrays_of(outlined.model)).keys()
        == dict(arrays_of(load_draft("mtp", load(path)).model)).keys()
    )


def test_files_that_are_links_or_none(tmp_path: Path) -> None:
    """The hub's client links each file; a pipe would be read for ever."""
    path, linked = tmp_path / "target", tmp_path / "linked"
    _, parts, head = write_target(path, "qwen3_5", with_head=False)
    (path / "head").mkdir()
    mx.save_safetensors(str(path / "head/x.safetensors"), less_one(head))
    config = json.loads((path / "config.json").read_text())
    config["mlx_lm_extra_tensors"] = {"mtp_file": "head/x.safetensors"}
    (path / "config.json").write_text(json.dumps(config))
    (linked / "head").mkdir(parents=True)
    for file in path.rglob("*.*"):
        (linked / file.relative_to(path)).symlink_to(file)
    (linked / "mtp").mkdir()
    os.mkfifo(linked / "mtp/weights.safetensors")
    check_arrays(load_draft("mtp", load(linked)).model, parts)
    (linked / "head/x.safetensors").unlink()
    with pytest.raises(ModelError, match="has no MTP head, nor has a file beside it"):
        load_draft("mtp", load(linked))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", 7])
def test_a_file_elsewhere_is_not_read(name: Any, tmp_path: Path) -> None:
    """A configuration may name any path."""
    path = tmp_path / "target"
    _, _, head = write_target(path, "qwen3_5", with_head=False)
    mx.save_safetensors(str(tmp_path / "x.safetensors"), head)
    config = json.loads((path / "config.json").read_text())
    config["mlx_lm_extra_tensors"] = {"mtp_file": name}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no MTP head, nor has a file beside it"):
        load_draft("mtp", load(path))


@EVERY
def test_a_repository_of_its_own(arch: str, tmp_path: Path) -> None:
    """Names lose their beginnings there, and gains are stored as they are."""
    _, parts, head = write_target(tmp_path / "target", arch, with_head=False)
    apart = write_apart(tmp_path / "apart", arch, head)
    check_arrays(load_draft(str(apart), load(tmp_path / "target")).model, parts)


@pytest.mark.parametrize("arch", SOME)
def test_a_packed_head(arch: str, tmp_path: Path) -> None:
    """Some layers in 4 bits, others not; nothing but shapes says so."""
    _, parts, head = write_target(tmp_path / "target", arch, with_head=False)
    packed = dict(head)
    for key, array in head.items():
        stays = re.search(r"kv_b|gate\.weight|fc\.|eh_proj|input_proj", key)
        if array.ndim == 2 and array.shape[1] % 32 == 0 and not stays:
            three = mx.quantize(array, group_size=32, bits=4)
            stem = key.removesuffix("weight")
            names = ("weight", "scales", "biases")
            packed |= {stem + n: a for n, a in zip(names, three, strict=True)}
    apart = write_apart(tmp_path / "apart", arch, packed)
    loaded: Any = load_draft(str(apart), load(tmp_path / "target")).model
    for name, module in loaded.heads[0].layer.named_modules():
        if "weight" in module and module.weight.dtype == mx.uint32:
            plain = parts["layer"]
            for step in filter(None, name.split(".")):
                plain = plain[int(step)] if step.isdigit() else plain[step]
            whole = mx.dequantize(
                module.weight, module.scales, module.biases, group_size=32, bits=4
            )
            assert mx.abs(whole - plain.weight).max() < 0.2 * mx.abs(plain.weight).max()
            break
    else:
        raise AssertionError("nothing is packed")
    assert mx.allclose(loaded.heads[0].fc.weight, parts["fc"])


def _write_gains(
    path: Path, head: dict[str, mx.array], *, prefix: bool, mlx: bool
) -> None:
    arrays = head if prefix else {k.removeprefix("mtp."): a for k, a in head.items()}
    metadata = {"format": "mlx" if mlx else "pt"}
    mx.save_safetensors(str(path / "mtp.safetensors"), arrays, metadata)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("mlx", [True, False])
@pytest.mark.parametrize("less", [True, False])
def test_gains_are_told_by_their_values(
    prefix: bool, mlx: bool, less: bool, tmp_path: Path
) -> None:
    """Published files contradict the rules of names: values that are clear decide."""
    path = tmp_path / "target"
    _, parts, head = write_target(path, "qwen3_5", with_head=False)
    _write_gains(path, less_one(head) if less else head, prefix=prefix, mlx=mlx)
    check_arrays(load_draft("mtp", load(path)).model, parts)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("mlx", [True, False])
def test_gains_that_say_nothing(prefix: bool, mlx: bool, tmp_path: Path) -> None:
    """All of them small and positive: names and converters decide."""
    path = tmp_path / "target"
    _, _, head = write_target(path, "qwen3_5", with_head=False)
    small = {k: mx.full(a.shape, 0.4) if a.ndim == 1 else a for k, a in head.items()}
    _write_gains(path, small, prefix=prefix, mlx=mlx)
    loaded: Any = load_draft("mtp", load(path)).model
    expected = 1.4 if prefix and not mlx else 0.4
    for gain in (loaded.heads[0].norm, loaded.heads[0].layer.self_attn.q_norm):
        assert mx.allclose(gain.weight, mx.array(expected))


def test_gains_that_contradict_each_other(tmp_path: Path) -> None:
    """A converter that knew the layer's norms alone."""
    path = tmp_path / "target"
    _, _, head = write_target(path, "qwen3_5", with_head=False)
    inside = {k: a for k, a in head.items() if ".layers." in k}
    _write_gains(path, less_one(head) | inside, prefix=True, mlx=True)
    with pytest.raises(ModelError, match="are stored in another way"):
        load_draft("mtp", load(path))


def test_a_head_with_ends_of_its_own(tmp_path: Path) -> None:
    """GLM-4.7-Flash's differ from the target's; those of others are copies."""
    for arch in ("glm4_moe_lite", "glm4_moe"):
        path = tmp_path / arch
        model, _, _ = write_target(path, arch)
        n = len(published.trunk_of(model).layers)
        arrays: Any = mx.load(str(path / "model.safetensors"))
        name = f"model.layers.{n}.shared_head.head.weight"
        arrays[name] = arrays[name] * 2
        mx.save_safetensors(str(path / "model.safetensors"), arrays)
        head: Any = load_draft("mtp", load(path)).model
        owns = arch == "glm4_moe_lite"
        assert ("lm_head" in head, "embed_tokens" in head) == (owns, owns)
        if owns:
            assert mx.array_equal(head.lm_head.weight, arrays[name])


SPOILT: dict[str, Any] = {
    "an expert missing": lambda a: [a.pop(k) for k in list(a) if "experts.2." in k],
    "an expert misshapen": lambda a: a.update(
        {k: v[:-1] for k, v in a.items() if "experts.1.up" in k}
    ),
    "no layer": lambda a: [a.pop(k) for k in list(a) if "mlp" in k],
    "a latent matrix of another shape": lambda a: a.update(
        {k: v[:-1] for k, v in a.items() if "kv_b_proj" in k}
    ),
    "a number of many digits": lambda a: a.update(
        {f"layers.{'9' * 5000}.x": mx.ones(3)}
    ),
    "a norm of another shape": lambda a: a.update({"model.enorm.weight": mx.ones(3)}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_damaged_head_is_refused(name: str, tmp_path: Path) -> None:
    """In our words: each was an error of mlx-lm's code, or of Python's."""
    _, _, head = write_target(tmp_path / "target", "glm4_moe_lite", with_head=False)
    apart = write_apart(tmp_path / "apart", "glm4_moe_lite", head)
    arrays: Any = mx.load(str(apart / "model.safetensors"))
    SPOILT[name](arrays)
    mx.save_safetensors(str(apart / "model.safetensors"), arrays)
    target = load(tmp_path / "target")
    with pytest.raises(ModelError, match="apart") as caught:
        load_draft(str(apart), target)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("arch", ["qwen3_5", "deepseek_v32", "nemotron_h"])
def test_texts_are_the_targets(arch: str, tmp_path: Path) -> None:
    """With prefixes that are found again, chunks, and rows that wait for others."""
    write_target(tmp_path / "target", arch)
    prompts = make_prompts()[:4]
    outputs = []
    for draft in ("none", "mtp"):
        config = EngineConfig(
            num_draft_tokens=3,
            batch_size=2,
            prefill_step_size=16,
            prefix_cache_memory=1 << 26,
        )
        decoder = SpecDecoder.from_pretrained(tmp_path / "target", draft, config=config)
        for _ in range(2):
            results = decoder.generate(prompts, max_tokens=12)
            outputs.append([r.token_ids for r in results])
        assert (decoder.stats.drafted > 0) == (draft == "mtp")
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("hunyuan", "HY 3 and 4, which mlx-lm does not have"),
        ("deepseek_v41", "stages of DSpark instead, and mlx-lm runs no published one"),
        ("mimo_v2_flash", "could not be compared"),
        ("step3p5", "could not be compared"),
        ("llama", "qwen3_5, .* are"),
    ],
)
@pytest.mark.parametrize("apart", [True, False])
def test_other_families_are_refused(
    arch: str, why: str, apart: bool, tmp_path: Path
) -> None:
    """By the target's name and with the reason, wherever the head lies."""
    target = LoadedModel(build(arch), None, {}, "target")  # type: ignore[arg-type]
    mx.save_safetensors(str(tmp_path / "mtp.safetensors"), {"mtp.x": mx.ones(2)})
    message = rf"target: MTP heads of {arch} models are not supported \(.*{why}"
    opened: Callable[[LoadedModel], object] = partial(mtp.open_mtp, tmp_path)
    if apart:
        opened = partial(load_head, tmp_path, {"model_type": f"{arch}_mtp"}, "apart")
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        opened(target)
    assert "\n" not in str(caught.value)


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mtp`` is checked before any work, and drafts in a chain as well."""
    write_target(tmp_path / "target", "glm4_moe")
    source = str(tmp_path / "target")
    config = EngineConfig(num_draft_tokens=2)
    outputs = []
    for draft in ("none", "mtp", "ngram+mtp"):
        decoder = SpecDecoder.from_pretrained(source, draft, config=config)
        results = decoder.generate([[5, 9, 11], [7]], max_tokens=6)
        outputs.append([r.token_ids for r in results])
        assert (draft == "none") == (not sum(r.drafted for r in results))
    assert outputs[1:] == outputs[:1] * 2
    write_folder(tmp_path / "plain", "qwen3")
    for name, error, message in (
        ("plain", UnsupportedModelError, "MTP heads of qwen3 models are not supp"),
    ):
        with pytest.raises(error, match=message):
            check_before_loading(str(tmp_path / name), named_draft("mtp"), None, config)
    arrays: Any = mx.load(str(tmp_path / "target" / "model.safetensors"))
    at = f"layers.{COMMON['num_hidden_layers']}."
    left = {k: np.array(a) for k, a in arrays.items() if at not in k}
    mx.save_safetensors(
        str(tmp_path / "target" / "model.safetensors"),
        {k: mx.array(a) for k, a in left.items()},
    )
    with pytest.raises(ModelError, match=r"has no MTP head, .*by mlx-lm leave it out"):
        load_draft("mtp", load(source))
    # Of the revision that was asked for, not of the hub's newest.
    write_target(tmp_path / "older", "glm4_moe")
    patterns = list[str]()

    def fetched(name: str, revision: str | None = None, **options: Any) -> str:
        patterns.extend(options.get("allow_patterns", ()))
        return str(tmp_path / ("older" if revision == "v1" else "target"))

    monkeypatch.setattr(mlx_lm_utils, "snapshot_download", fetched)
    monkeypatch.setattr(model_outline, "snapshot_download", fetched)
    load_draft("mtp", load("owner/model", revision="v1"))
    planned = model_outline.outline("owner/model", revision="v1")
    model_outline.outline_draft("mtp", planned)
    # A head that has one is refused, not run with another embedding.
    assert "mask_embedding.*" in patterns
