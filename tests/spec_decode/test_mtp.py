"""MTP heads inside a target's checkpoint: hybrid targets, and experts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

from specdec import EngineConfig, ModelError, SpecDecoder, UnsupportedModelError
from specdec.engine.build import check_before_loading
from specdec.model_names import named_draft
from specdec.models import load, load_draft, model_outline
from specdec.models.runner import ModelRunner
from specdec.spec_decode.head_drafter import ChainedRows, HeadDrafter
from tests.models.architectures import COMMON, OWN
from tests.models.folders import tokenizer_of, write_folder
from tests.models.gguf_files import VOCAB
from tests.plain import AT_ONCE, exact, greedy
from tests.scripted import Script
from tests.spec_decode.repetitive import make_prompts
from tests.spec_decode.test_heads import Noted

K = 3
# Of a layer like that of the head.
PLACES = {
    "qwen3_5": 1, "glm4_moe": 3, "glm4_moe_lite": 1, "qwen3_next": 1, "qwen3_5_moe": 1,
}  # fmt: skip


def random(array: mx.array, key: Any = None) -> mx.array:
    if array.ndim < 2:
        return mx.random.uniform(0.5, 1.5, array.shape)
    drawn: mx.array = mx.random.normal(array.shape) * 2 * array.shape[-1] ** -0.5
    return drawn


def arrays_of(module: Any) -> list[tuple[str, mx.array]]:
    leaves: Any = tree_flatten(module.parameters())
    return list(leaves)


def parts_of(arch: str, args: Any, module: Any) -> dict[str, Any]:
    """The head's own parts: a layer of mlx-lm, and what is around it."""
    if arch == "qwen3_5_moe":
        module = importlib.import_module("mlx_lm.models.qwen3_5")
    kind = next(
        value for name, value in vars(module).items() if name.endswith("DecoderLayer")
    )
    layer = kind(args, PLACES[arch])
    layer.update(tree_map(random, layer.parameters()))
    size = args.hidden_size
    return {
        "layer": layer,
        "fc": random(mx.zeros((size, 2 * size))),
        **{name: random(mx.zeros(size)) for name in ("token", "state", "out")},
    }


def write_checkpoint(path: Path, arch: str) -> dict[str, Any]:
    """A checkpoint as it is published, with an MTP head; the head's parts."""
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    config = {**COMMON, "model_type": arch, **OWN.get(arch, {}), "vocab_size": VOCAB}
    if arch == "qwen3_5_moe":
        config["num_experts"] = 4
    if "qwen" in arch:
        del config["rope_scaling"]  # which transformers has another name for
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(random, model.parameters()))
    qwen = "qwen" in arch
    args = model.language_model.args if "qwen3_5" in arch else model.args
    parts = parts_of(arch, args, module)
    arrays = dict(arrays_of(model))
    own = arrays_of(parts["layer"])
    if qwen:
        arrays = {
            key.replace("language_model.model.", "model."): a
            for key, a in arrays.items()
        }
        arrays = {k.replace("language_model.", ""): a for k, a in arrays.items()}
        arrays |= {f"mtp.layers.0.{name}": a for name, a in own}
        arrays |= {
            "mtp.fc.weight": parts["fc"],
            "mtp.pre_fc_norm_embedding.weight": parts["token"],
            "mtp.pre_fc_norm_hidden.weight": parts["state"],
            "mtp.norm.weight": parts["out"],
        }
        for key, array in arrays.items():
            if "conv1d.weight" in key:
                arrays[key] = array.moveaxis(1, 2)
            elif array.ndim == 1 and "norm" in key and "linear_attn" not in key:
                arrays[key] = array - 1
        if arch == "qwen3_5_moe":
            for key in [key for key in arrays if key.endswith("gate_proj.weight")]:
                before, found, _ = key.partition("switch_mlp.")
                if found and not before.startswith("mtp"):
                    both = [arrays.pop(key), arrays.pop(key.replace("gate", "up"))]
                    arrays[before + "experts.gate_up_proj"] = mx.concatenate(both, 1)
                    down = arrays.pop(key.replace("gate", "down"))
                    arrays[before + "experts.down_proj"] = down
    else:
        at = f"model.layers.{args.num_hidden_layers}."
        arrays |= {at + name: a for name, a in own}
        arrays |= {
            at + "eh_proj.weight": parts["fc"],
            at + "enorm.weight": parts["token"],
            at + "hnorm.weight": parts["state"],
            at + "shared_head.norm.weight": parts["out"],
            at + "shared_head.head.weight": arrays["lm_head.weight"],
            at + "embed_tokens.weight": arrays["model.embed_tokens.weight"],
        }
    for key in [key for key in arrays if key.endswith("embed_q.weight")]:
        before = key.removesuffix("embed_q.weight")
        both = [arrays.pop(key).swapaxes(-1, -2)]
        both.append(arrays.pop(before + "unembed_out.weight"))
        joined = mx.concatenate(both, axis=1)
        arrays[before + "kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    for key in [key for key in arrays if "switch_mlp" in key]:
        before, _, name = key.partition("switch_mlp.")
        for i, expert in enumerate(arrays.pop(key)):
            arrays[f"{before}experts.{i}.{name}"] = expert
    tokenizer_of(path.with_name("tokens")).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return parts


def proposals(
    arch: str, parts: dict[str, Any], model: Any, tokens: list[int], k: int
) -> list[int]:
    """By mlx-lm's layer without any cache: every step computes all pairs again."""
    owner = model.language_model if arch == "qwen3_5" else model
    trunk = owner.model

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, parts[name], 1e-5)

    feature, following = trunk(mx.array([tokens]))[:, :-1], tokens[1:]
    proposed: list[int] = []
    for _ in range(k):
        e = trunk.embed_tokens(mx.array([following]))
        pair = mx.concatenate([norm(e, "token"), norm(feature, "state")], axis=-1)
        h = parts["layer"](pair @ parts["fc"].T, causal(pair.shape[1]), None)
        after = norm(h, "out")
        proposed.append(int(mx.argmax(owner.lm_head(after[:, -1:]))))
        following = [*following, proposed[-1]]
        given = after if arch == "qwen3_5" else h
        feature = mx.concatenate([feature, given[:, -1:]], axis=1)
    return proposed


def causal(size: int) -> mx.array:
    position = mx.arange(size)
    return position[:, None] >= position


@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_moe"])
def test_arrays_are_read(arch: str, tmp_path: Path) -> None:
    """Of targets with experts: joined, or one by one; norms less one or whole."""
    parts = write_checkpoint(tmp_path / "target", arch)
    head: Any = load_draft("mtp", load(str(tmp_path / "target"))).model
    found = {"fc": head.fc.weight, "out": head.norm.weight}
    found |= {"token": head.token_norm.weight, "state": head.state_norm.weight}
    for name, array in found.items():
        assert mx.allclose(array, parts[name], atol=1e-6), name
    own = dict(arrays_of(head.layers[0]))
    wanted = dict(arrays_of(parts["layer"]))
    assert own.keys() == wanted.keys()
    assert all(mx.allclose(own[n], a, atol=1e-6) for n, a in wanted.items())


@pytest.mark.parametrize("arch", ["qwen3_5", "glm4_moe", "glm4_moe_lite"])
def test_proposals_are_those_of_a_plain_forward(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that join, leave and rest, of a target with recurrent layers too.

    Norms that are stored less one, experts one by one, and keys and values that latent
    attention has in one matrix, would show here.
    """
    parts = write_checkpoint(tmp_path / "target", arch)
    target = load(str(tmp_path / "target"))
    head: Any = load_draft("mtp", target).model
    runner = ModelRunner(head, "mtp", EngineConfig(prefill_step_size=16), AT_ONCE)
    drafter = HeadDrafter(runner, vocab_size=VOCAB, max_draft_tokens=K)
    prompts = make_prompts()[:4]
    lengths = [6 + i for i in range(len(prompts))]
    whole = [
        [*p, *greedy(target.model, p, n)] for p, n in zip(prompts, lengths, strict=True)
    ]
    noted = Noted(monkeypatch, whole)
    exact(
        target.model, None, prompts, lengths,
        batch_size=3, num_draft_tokens=K, backend=AT_ONCE, drafter=drafter,
        length=Script(lambda number: (K, 0, K - 1)[number % 3]),
    )  # fmt: skip
    assert len(noted.found) > 8
    for texts, proposed in noted.found[::2]:
        k = len(proposed)
        wanted = [proposals(arch, parts, target.model, t, k) for t in texts]
        assert proposed in wanted
    assert isinstance(drafter.rows([[1, 2]], max_length=9), ChainedRows)
    shared = {id(a) for _, a in arrays_of(target.model)}
    own = [a for _, a in arrays_of(head) if id(a) not in shared]
    assert sum(a.size for a in own) < 20_000


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mtp`` is checked before any work, and drafts in a chain as well."""
    write_checkpoint(tmp_path / "target", "glm4_moe")
    source = str(tmp_path / "target")
    config = EngineConfig(num_draft_tokens=2)
    found = []
    for draft in ("none", "mtp", "ngram+mtp"):
        decoder = SpecDecoder.from_pretrained(source, draft, config=config)
        results = decoder.generate([[5, 9, 11], [7]], max_tokens=6)
        found.append([r.token_ids for r in results])
        assert (draft == "none") == (not sum(r.drafted for r in results))
    assert found[1:] == found[:1] * 2
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
    with pytest.raises(ModelError, match=r"has no MTP head \(mlx-lm's conversions"):
        load_draft("mtp", load(source))
    # Of the revision that was asked for, not of the hub's newest.
    write_checkpoint(tmp_path / "older", "glm4_moe")
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
    assert "mask_embedding.pt" in patterns
