"""Small random targets with MTP heads, as published, and what heads compute."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from tests.models.architectures import COMMON, OWN
from tests.models.folders import tokenizer_of
from tests.models.gguf_files import VOCAB

QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
NEXTN = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
ARCHS = (*QWEN, *NEXTN, "mimo", "nemotron_h", "longcat_flash")
#: Published names of the parts around the layer, by what comes before a layer's names.
NAMES = {
    "qwen": {
        "fc": "mtp.fc", "token": "mtp.pre_fc_norm_embedding",
        "state": "mtp.pre_fc_norm_hidden", "out": "mtp.norm",
    },
    "nextn": {
        "fc": "model.layers.{n}.eh_proj", "token": "model.layers.{n}.enorm",
        "state": "model.layers.{n}.hnorm", "out": "model.layers.{n}.shared_head.norm",
    },
    "mimo": {
        "fc": "model.mtp_layers.0.input_proj",
        "token": "model.mtp_layers.0.token_layernorm",
        "state": "model.mtp_layers.0.hidden_layernorm",
        "out": "model.mtp_layers.0.final_layernorm",
    },
    "nemotron_h": {
        "fc": "mtp.layers.0.eh_proj", "token": "mtp.layers.0.enorm",
        "state": "mtp.layers.0.hnorm", "out": "mtp.layers.1.final_layernorm",
    },
    "longcat_flash": {
        "fc": "model.mtp.layers.0.eh_proj", "token": "model.mtp.layers.0.enorm.m",
        "state": "model.mtp.layers.0.hnorm.m", "out": "model.mtp.norm",
    },
}  # fmt: skip
BEFORE_LAYER = {
    "qwen": "mtp.layers.0.",
    "nextn": "model.layers.{n}.",
    "mimo": "model.mtp_layers.0.",
    "nemotron_h": "mtp.layers.",
    "longcat_flash": "model.mtp.layers.0.transformer_layer.",
}


def family(arch: str) -> str:
    return "qwen" if arch in QWEN else "nextn" if arch in NEXTN else arch


def random(array: mx.array, key: Any = None) -> mx.array:
    if array.ndim < 2:
        return mx.random.uniform(0.5, 1.5, array.shape)
    drawn: mx.array = mx.random.normal(array.shape) * 2 * array.shape[-1] ** -0.5
    return drawn


def arrays_of(module: Any) -> list[tuple[str, mx.array]]:
    leaves: Any = tree_flatten(module.parameters())
    return list(leaves)


class Plain(nn.Module):
    """A layer of attention and an MLP."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, size: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = nn.RMSNorm(size, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=1e-5)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        h = x + attention(self.input_layernorm(x), mask, cache)
        out: mx.array = h + mlp(self.post_attention_layernorm(h))
        return out


class Series(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: list[Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = blocks

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self.blocks:
            x = block(x, mask, cache)
        return x


def owner_of(model: Any) -> Any:
    return getattr(model, "language_model", model)


def trunk_of(model: Any) -> Any:
    owner = owner_of(model)
    return owner.get("backbone") or owner.model


def make_layer(arch: str, model: Any) -> Any:
    """A layer like the head's, of mlx-lm's classes."""
    args, layers = owner_of(model).args, trunk_of(model).layers
    if arch == "mimo":
        return type(layers[0])(args)
    if arch == "nemotron_h":
        return Series([type(layers[0])(args, letter) for letter in "*E"])
    if arch == "longcat_flash":
        attention = type(layers[0].self_attn[0])(args)
        return Plain(attention, type(layers[0].mlps[0])(args), args.hidden_size)
    place = 1 if arch in QWEN else len(layers) - 1
    return type(layers[place])(args, place)


def make_parts(arch: str, model: Any) -> dict[str, Any]:
    """A head of random weights."""
    layer = make_layer(arch, model)
    layer.update(tree_map(random, layer.parameters()))
    size = owner_of(model).args.hidden_size
    return {
        "layer": layer,
        "fc": random(mx.zeros((size, 2 * size))),
        **{name: random(mx.zeros(size)) for name in ("token", "state", "out")},
    }


def make_model(arch: str) -> tuple[Any, dict[str, Any]]:
    """A target of random weights, and its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    config = {**COMMON, "model_type": arch, **OWN.get(arch, {}), "vocab_size": VOCAB}
    if arch == "qwen3_5_moe":
        config["num_experts"] = 4
    if arch in (*QWEN, "mimo", "nemotron_h"):
        del config["rope_scaling"]  # which transformers has another name for
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(random, model.parameters()))
    return model, config


def head_arrays(arch: str, model: Any, parts: dict[str, Any]) -> dict[str, mx.array]:
    """The head's arrays by their published names, gains as they are."""
    kind, n = family(arch), len(trunk_of(model).layers)
    before = BEFORE_LAYER[kind].format(n=n)
    arrays = {
        before + name.removeprefix("blocks."): a
        for name, a in arrays_of(parts["layer"])
    }
    for part, name in NAMES[kind].items():
        arrays[f"{name.format(n=n)}.weight"] = parts[part]
    return as_published(arrays)


def as_published(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Keys and values of latent attention in one matrix, and experts one by one."""
    arrays = dict(arrays)
    for key in [key for key in arrays if key.endswith("embed_q.weight")]:
        before = key.removesuffix("embed_q.weight")
        both = [arrays.pop(key).swapaxes(-1, -2)]
        both.append(arrays.pop(before + "unembed_out.weight"))
        joined = mx.concatenate(both, axis=1)
        arrays[before + "kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    names = {"fc1.weight": "up_proj.weight", "fc2.weight": "down_proj.weight"}
    for key in [key for key in arrays if "switch_mlp" in key]:
        before, _, name = key.partition("switch_mlp.")
        for i, expert in enumerate(arrays.pop(key)):
            arrays[f"{before}experts.{i}.{names.get(name, name)}"] = expert
    return arrays


def less_one(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Gains of norms as Qwen's files hold them."""
    return {
        key: a - 1 if a.ndim == 1 and "norm" in key and "linear_attn" not in key else a
        for key, a in arrays.items()
    }


def target_arrays(arch: str, model: Any) -> dict[str, mx.array]:
    """The target's arrays by their published names."""
    arrays = dict(arrays_of(model))
    if arch not in QWEN:
        return as_published(arrays)
    arrays = {
        k.replace("language_model.model.", "model."): a for k, a in arrays.items()
    }
    arrays = {k.replace("language_model.", ""): a for k, a in arrays.items()}
    for key, array in arrays.items():
        if "conv1d.weight" in key:
            arrays[key] = array.moveaxis(1, 2)
    if arch == "qwen3_5_moe":
        for key in [key for key in arrays if key.endswith("gate_proj.weight")]:
            before, found, _ = key.partition("switch_mlp.")
            if found:
                both = [arrays.pop(key), arrays.pop(key.replace("gate", "up"))]
                arrays[before + "experts.gate_up_proj"] = mx.concatenate(both, 1)
                down = arrays.pop(key.replace("gate", "down"))
                arrays[before + "experts.down_proj"] = down
    return less_one(as_published(arrays))


def write_target(
    path: Path, arch: str, *, with_head: bool = True
) -> tuple[Any, dict[str, Any], dict[str, mx.array]]:
    """Write a target as it is published; the target, the head, and its arrays."""
    model, config = make_model(arch)
    parts = make_parts(arch, model)
    head = head_arrays(arch, model, parts)
    arrays = target_arrays(arch, model)
    stored = less_one(head) if arch in QWEN else dict(head)
    if arch in NEXTN:
        at = f"model.layers.{len(trunk_of(model).layers)}."
        stored[at + "shared_head.head.weight"] = arrays["lm_head.weight"]
        stored[at + "embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
    beside = arch == "deepseek_v3"  # mlx-lm leaves out layer 61, and no other
    if with_head and not beside:
        arrays |= stored
    tokenizer_of(path.with_name(f"{path.name}-tokens")).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    if with_head and beside:
        mx.save_safetensors(str(path / "model-mtp.safetensors"), stored)
    return model, parts, head


def write_apart(path: Path, arch: str, head: dict[str, mx.array], **more: Any) -> Path:
    """Write a head as a repository of its own: the names without their beginnings."""
    path.mkdir(parents=True)
    strip = re.compile(r"^(model\.)?(mtp\.|layers\.\d+\.(?=.))")
    if family(arch) == "nextn":
        arrays = {_in_repository(strip.sub("", key)): a for key, a in head.items()}
    else:
        arrays = {key.replace("mtp.", "", 1): a for key, a in head.items()}
    text: dict[str, Any] = {"model_type": f"{arch}_text", "vocab_size": VOCAB}
    config = {"model_type": f"{arch}_mtp", "text_config": text, "block_size": 3, **more}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    metadata = {"format": "mlx"}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata)
    return path


def _in_repository(name: str) -> str:
    """As the published repository of GLM-4.7-Flash names them."""
    name = name.replace("shared_head.norm", "shared_head_norm")
    around = name.startswith(("enorm", "hnorm", "eh_proj", "shared_head_norm"))
    return f"model.{name}" if around else f"model.mtp_block.{name}"


# -- what heads compute --------------------------------------------------------------


def causal(size: int) -> mx.array:
    position = mx.arange(size)
    return position[:, None] >= position


def rms(x: mx.array, gain: mx.array) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * gain."""
    return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def proposals(
    arch: str,
    heads: list[dict[str, Any]],
    model: Any,
    tokens: list[int],
    k: int,
    first: int | None = None,
) -> list[int]:
    """Without any cache: every step computes all pairs again.

    Step i is of head i modulo their number; each head has read every pair. Only the
    ``first`` tokens are proposed.
    """
    owner, trunk = owner_of(model), trunk_of(model)
    embed = trunk.get("embeddings") or trunk.embed_tokens
    states, following = trunk(mx.array([tokens]))[:, :-1], tokens[1:]
    proposed: list[int] = []
    for i in range(k):
        parts = heads[i % len(heads)]
        e, g = (
            rms(embed(mx.array([following])), parts["token"]),
            rms(states, parts["state"]),
        )
        pair = mx.concatenate([g, e] if arch == "mimo" else [e, g], axis=-1)
        h = parts["layer"](pair @ parts["fc"].T, causal(pair.shape[1]), None)
        after = rms(h, parts["out"])
        proposed.append(int(mx.argmax(owner.lm_head(after[:, -1:])[..., :first])))
        following = [*following, proposed[-1]]
        states = mx.concatenate([states, after[:, -1:]], axis=1)
    return proposed
