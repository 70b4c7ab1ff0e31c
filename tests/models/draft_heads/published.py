"""Small random draft heads as they are published: files, keys and configurations.

And what they compute, in numpy, from those files alone and one row at a time: written
after the papers and their reference code, without anything of specdec or mlx-lm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray
WIDTH, VOCAB, LAYERS = 32, 97, 6
READS = (1, 3, 4)
SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
#: Tokens that heads with a vocabulary of their own propose, in ascending order.
SOME_TOKENS = sorted({(7 * i * i + 3) % VOCAB for i in range(60)})


def dflash_config(**changes: Any) -> dict[str, Any]:
    """As z-lab's are."""
    dflash = {"mask_token_id": 96, "target_layer_ids": list(READS)}
    dflash |= changes.pop("dflash", {})
    return {
        "architectures": ["DFlashDraftModel"],
        **SIZES,
        "block_size": 6,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": dflash,
        **changes,
    }


def dspark_config(**changes: Any) -> dict[str, Any]:
    """As DeepSeek's are."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **SIZES,
        "block_size": 5,
        "num_target_layers": LAYERS,
        "mask_token_id": 95,
        "target_layer_ids": list(READS),
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **changes,
    }


#: Of DFlash 2: kernel, group, rank and candidates; small, so that each matters.
SELECTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "selector_rank": 5,
    "selector_top_k": 7,
}


def dflash2_config(**changes: Any) -> dict[str, Any]:
    """As z-lab's and Inco's are."""
    more = {
        "block_size": 6,
        **SELECTS,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
    }
    return dflash_config(
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        block_size=None,
        dflash=more | changes.pop("dflash", {}),
        **changes,
    )


def nemotron_config(**changes: Any) -> dict[str, Any]:
    """As NVIDIA's is: causal, a window, sinks, the anchor reserved."""
    dflash = {
        "causal": True,
        "use_swa": True,
        "swa_window_size": 7,
        "sample_from_anchor": False,
    }
    return (
        dspark_config(
            dflash_query_causal=True, attention_sink_bias=True, dflash_config=dflash
        )
        | changes
    )


def qwen35_config(**changes: Any) -> dict[str, Any]:
    """As Ornith's are."""
    return dspark_config(
        architectures=["Qwen35DSparkModel"],
        model_type="qwen3_5",
        enable_qwen35_gated_q_proj=True,
        rope_theta=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        },
        **changes,
    )


def muse_config(**changes: Any) -> dict[str, Any]:
    """As that of Muse Glimmer's assistant."""
    left_out = ("vocab_size", "num_target_layers", "dflash_config", "rope_theta")
    config = dflash_config(
        architectures=["MuseGlimmerAssistantModel"],
        layer_types=["sliding_attention"] * 2,
        sliding_window=7,
        mask_token_id=96,
        target_layer_ids=list(READS),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return {n: v for n, v in config.items() if n not in left_out} | changes


def assistant_config(ordered: bool = False, **changes: Any) -> dict[str, Any]:
    """As Google's assistants of Gemma 4 are, for a target of these sizes."""
    text = gemma_config(
        architectures=None,
        hidden_size=24,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=3,
        sliding_window=8,
        attention_k_eq_v=False,
        vocab_size=96 if ordered else VOCAB,
    )
    del text["num_target_layers"]
    text["rope_parameters"]["sliding_attention"] = {
        "rope_theta": 10000.0, "rope_type": "default",
    }  # fmt: skip
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": WIDTH,
        "use_ordered_embeddings": ordered,
        "num_centroids": 12,
        "centroid_intermediate_top_k": 3,
        "tie_word_embeddings": True,
        "text_config": text | changes,
    }


def assistant_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """All arrays of an assistant."""
    text, rng = config["text_config"], np.random.default_rng(seed)
    size, wide, vocab = (
        text["hidden_size"],
        text["intermediate_size"],
        text["vocab_size"],
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, size),
        "model.norm.weight": (size,),
        "pre_projection.weight": (size, 2 * config["backbone_hidden_size"]),
        "post_projection.weight": (config["backbone_hidden_size"], size),
    }
    for i, kind in enumerate(text["layer_types"]):
        at = f"model.layers.{i}."
        head = text["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        shapes |= {
            at + "input_layernorm.weight": (size,),
            at + "post_attention_layernorm.weight": (size,),
            at + "pre_feedforward_layernorm.weight": (size,),
            at + "post_feedforward_layernorm.weight": (size,),
            at + "layer_scalar": (1,),
            at + "self_attn.q_proj.weight": (4 * head, size),
            at + "self_attn.q_norm.weight": (head,),
            at + "self_attn.o_proj.weight": (size, 4 * head),
            at + "mlp.gate_proj.weight": (wide, size),
            at + "mlp.up_proj.weight": (wide, size),
            at + "mlp.down_proj.weight": (size, wide),
        }
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (12, size)
    weights = {
        name: rng.uniform(0.5, 1.5, shape)
        if len(shape) == 1
        else rng.normal(size=shape) * 2 * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    if config["use_ordered_embeddings"]:
        weights["masked_embedding.token_ordering"] = rng.permutation(vocab)
    return weights


def gemma_config(**changes: Any) -> dict[str, Any]:
    """As DeepSeek's head for Gemma 4 is: a copy of the target's, mostly."""
    config = dspark_config(
        architectures=["Gemma4DSparkModel"],
        model_type="gemma4_text",
        hidden_activation="gelu_pytorch_tanh",
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=False,
        hidden_size_per_layer_input=0,
        layer_types=["full_attention"] * 2,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
        },
        draft_vocab_size=None,
    )
    return {n: v for n, v in config.items() if n != "hidden_act"} | changes


def eagle_config(**changes: Any) -> dict[str, Any]:
    """As SafeAILab's are."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **SIZES,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(SOME_TOKENS),
        **changes,
    }


def peagle_config(**changes: Any) -> dict[str, Any]:
    """As SpecForge's are, with the mask's token."""
    return eagle_config(
        architectures=["PEagleDraftModel"],
        num_hidden_layers=2,
        mask_token_id=93,
        **changes,
    )


def speculators_config(kind: str, **changes: Any) -> dict[str, Any]:
    """As those of the speculators library are."""
    layers = {"layer_types": ["full_attention"] * 2, **SIZES}
    layers |= changes.pop("layers", {})
    own: dict[str, Any] = {"draft_vocab_size": len(SOME_TOKENS)}
    if kind == "dflash2":
        del own["draft_vocab_size"]
        own |= SELECTS
    if kind in ("eagle3", "peagle"):
        layers["num_hidden_layers"] = 1 + (kind == "peagle")
        layers["layer_types"] = layers["layer_types"][: layers["num_hidden_layers"]]
        own["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in READS]
        own |= {"mask_token_id": 94} if kind == "peagle" else {}
    else:
        own["aux_hidden_state_layer_ids"] = [i + 1 for i in READS]
        own |= {"mask_token_id": 94, "block_size": 6}
    names = {
        "eagle3": "Eagle3",
        "dflash": "DFlash",
        "dflash2": "DFlash2",
        "dspark": "DSpark",
        "peagle": "PEagle",
    }
    return {
        "architectures": [f"{names[kind]}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": layers,
        **own,
        **changes,
    }


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """All arrays that a head of this configuration is published with."""
    rng = np.random.default_rng(seed)
    kind = config.get("speculators_model_type") or config["architectures"][0].lower()
    layers = config.get("transformer_layer_config", config)
    size, wide = layers["hidden_size"], layers["intermediate_size"]
    head = layers["head_dim"]
    queries = layers["num_attention_heads"] * head
    keys = layers["num_key_value_heads"] * head
    eagle = "eagle" in kind
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, size * len(READS)),
        "norm.weight": (size,),
    }
    for i in range(layers["num_hidden_layers"]):
        first = f"layers.{i}."
        if (
            "Eagle3" in config["architectures"][0]
            and "speculators_version" not in config
        ):
            first = "midlayer."
        source = 2 * size if eagle and i == 0 else size
        shapes |= {
            first + "input_layernorm.weight": (size,),
            first + "post_attention_layernorm.weight": (size,),
            first + "self_attn.q_proj.weight": (queries, source),
            first + "self_attn.k_proj.weight": (keys, source),
            first + "self_attn.v_proj.weight": (keys, source),
            first + "self_attn.o_proj.weight": (size, queries),
            first + "mlp.gate_proj.weight": (wide, size),
            first + "mlp.up_proj.weight": (wide, size),
            first + "mlp.down_proj.weight": (size, wide),
        }
        if eagle and i == 0:
            shapes[first + "hidden_norm.weight"] = (size,)
        if not eagle or layers["model_type"] == "qwen3":
            shapes[first + "self_attn.q_norm.weight"] = (head,)
            shapes[first + "self_attn.k_norm.weight"] = (head,)
    if not eagle:
        shapes["hidden_norm.weight"] = (size,)
    if "peagle" in kind:
        shapes["mask_hidden"] = (1, 1, size * len(READS))
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (size * len(READS),)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(READS))}
    some, vocab_size = config.get("draft_vocab_size"), layers.get("vocab_size", VOCAB)
    if config["architectures"] == ["Qwen3Eagle3Model"]:
        shapes["embed_tokens.weight"] = shapes["lm_head.weight"] = (vocab_size, size)
    if config.get("attention_sink_bias"):
        for i in range(layers["num_hidden_layers"]):
            sinks = (layers["num_attention_heads"],)
            shapes[f"layers.{i}.self_attn.attention_sink_bias"] = sinks
    if config.get("enable_qwen35_gated_q_proj"):
        for i in range(layers["num_hidden_layers"]):
            shapes[f"layers.{i}.self_attn.q_proj.weight"] = (2 * queries, size)
    if config["architectures"] == ["Gemma4DSparkModel"]:
        shapes |= gemma_shapes(config)
    if some:
        shapes["lm_head.weight"] = (some, size)
    more = {**config, **config.get("dflash_config", {})}
    if rank := more.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = (vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (some or vocab_size, rank)
        if more.get("markov_head_type") == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, size + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if more.get("markov_head_type") == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + size)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if taps := more.get("conv_kernel_size"):
        numbers = 2 * taps * size // more["conv_group_size"]
        for i in range(layers["num_hidden_layers"]):
            for part in ("attention_conv", "mlp_conv"):
                at = f"layers.{i}.{part}."
                shapes[at + "base_kernel"] = (2, taps, size)
                shapes[at + "kernel_projection.weight"] = (numbers, size)
        rank = more["selector_rank"]
        shapes["candidate_selector.predecessor_codebook"] = (vocab_size, rank)
        shapes["candidate_selector.successor_codebook"] = (vocab_size, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, size)
    if config.get("enable_confidence_head"):
        both = config.get("confidence_head_with_markov")
        width = size + (config["markov_rank"] if both else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    weights: dict[str, Any] = {}
    shapes = {name: shape for name, shape in shapes.items() if shape}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = rng.uniform(0.5, 1.5, shape)
        else:
            weights[name] = rng.normal(size=shape) * 2 * shape[-1] ** -0.5
    weights = {name: a.astype(np.float32) for name, a in weights.items()}
    if some:
        tokens = np.array(SOME_TOKENS if vocab_size == VOCAB else range(1, some + 1))
        weights["d2t"] = (tokens - np.arange(some)).astype(np.int64)
        weights["t2d"] = np.isin(np.arange(vocab_size), tokens)
    return weights


def gemma_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Arrays of a head of Gemma layers that others do not have, or not so."""
    size, head = config["hidden_size"], config["global_head_dim"]
    heads, keys = config["num_attention_heads"], config["num_global_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], size),
        "lm_head.weight": (config["vocab_size"], size),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {
            at + "pre_feedforward_layernorm.weight": (size,),
            at + "post_feedforward_layernorm.weight": (size,),
            at + "layer_scalar": (1,),
            at + "self_attn.q_proj.weight": (heads * head, size),
            at + "self_attn.k_proj.weight": (keys * head, size),
            at + "self_attn.v_proj.weight": (),
            at + "self_attn.o_proj.weight": (size, heads * head),
            at + "self_attn.q_norm.weight": (head,),
            at + "self_attn.k_norm.weight": (head,),
        }
    return shapes


def write_head(
    path: Path, config: dict[str, Any], seed: int = 0, prefix: str = ""
) -> dict[str, Array]:
    """Write a random head; its weights, by their published names."""
    path.mkdir(parents=True, exist_ok=True)
    made = assistant_weights if "text_config" in config else random_weights
    weights = made(config, seed)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    arrays = {prefix + name: mx.array(a) for name, a in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return weights


# -- the forwards, one row at a time -------------------------------------------


def norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return scaled


def turned(
    x: Array, positions: Array, *, pairs: bool = False, dims: int | None = None
) -> Array:
    """Rotary embedding of x (S, heads, d): halves of a head, or neighbours."""
    if dims is not None and dims < x.shape[-1]:
        first = turned(x[..., :dims], positions, pairs=pairs)
        return np.concatenate([first, x[..., dims:]], -1)
    d = x.shape[-1]
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = (
        (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : d // 2], x[..., d // 2 :])
    )
    out = np.empty_like(x)
    one, two = a * cos - b * sin, b * cos + a * sin
    if pairs:
        out[..., ::2], out[..., 1::2] = one, two
    else:
        out[..., : d // 2], out[..., d // 2 :] = one, two
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    sinks: Array | None = None,
    scale: float | None = None,
) -> Array:
    """q (S, H, d), k and v (T, h, d), visible (S, T); what is found, (S, H d)."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = np.einsum("shd,thd->hst", q, k)
    scores = scores * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    sink = np.zeros((1, 1, 1)) if sinks is None else np.exp(sinks[:, None, None] - most)
    scores = np.exp(scores - most)
    scores /= scores.sum(-1, keepdims=True) + sink
    found: Array = np.einsum("hst,thd->shd", scores, v)
    return found.reshape(len(q), -1)


def mlp(x: Array, w: dict[str, Array], at: str) -> Array:
    gate, up = x @ w[at + "mlp.gate_proj.weight"].T, x @ w[at + "mlp.up_proj.weight"].T
    out: Array = (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return out


def heads(
    x: Array, w: dict[str, Array], at: str, kind: str, positions: Array, **how: Any
) -> Array:
    """Queries or keys of x, normed and turned; values as they are."""
    out: Array = (x @ w[f"{at}self_attn.{kind}_proj.weight"].T).reshape(len(x), -1, 8)
    if f"{at}self_attn.{kind}_norm.weight" in w:
        out = norm(out, w[f"{at}self_attn.{kind}_norm.weight"])
    return out if kind == "v" else turned(out, positions, **how)


def convolved(y: Array, x: Array, w: dict[str, Array], at: str, side: int) -> Array:
    """The causal convolution of y (b, D), whose taps are made from x, slot by slot."""
    base = w[at + "base_kernel"][side]
    taps, size = base.shape
    numbers = x @ w[at + "kernel_projection.weight"].T
    numbers = numbers.reshape(len(x), 2, taps, -1)
    group = size // numbers.shape[-1]
    out = np.zeros_like(y)
    for i in range(len(y)):
        for t in range(min(taps, i + 1)):
            for channel in range(size):
                tap = base[t, channel] + numbers[i, side, t, channel // group]
                out[i, channel] += tap * y[i - t, channel]
    return out


def markov_bias(
    w: dict[str, Array], before: int, h: Array, state: Array | None
) -> tuple[Array, Array | None]:
    """The bias of a slot's logits, and the state for the next slot."""
    at = "markov_head."
    e = w[at + "markov_w1.weight"][before]
    if at + "gate_proj.weight" in w:
        gate = np.concatenate([h, e]) @ w[at + "gate_proj.weight"].T
        e = e / (1 + np.exp(-gate - w[at + "gate_proj.bias"]))
    if at + "joint_proj.weight" in w:
        s = np.zeros_like(e) if state is None else state
        z = np.concatenate([s, e, h]) @ w[at + "joint_proj.weight"].T
        gate, candidate, out = np.split(z + w[at + "joint_proj.bias"], 3)
        gate = 1 / (1 + np.exp(-gate))
        state, e = gate * s + (1 - gate) * np.tanh(candidate), np.tanh(out)
    bias: Array = e @ w[at + "markov_w2.weight"].T
    return bias, state


def selected(
    w: dict[str, Array], logits: Array, h: Array, before: int, count: int
) -> Array:
    """Logits of a slot's candidates; all other tokens have minus infinity."""
    at = "candidate_selector."
    out = np.full(len(logits), -np.inf)
    first = w[at + "predecessor_codebook"][before]
    first = first * (w[at + "hidden_projection.weight"] @ h)
    for c in np.argsort(-logits)[:count]:
        out[c] = logits[c] + first @ w[at + "successor_codebook"][c]
    return out


def walk(
    w: dict[str, Array], states: Array, logits: Array, anchor: int, chosen: Any
) -> list[Array]:
    """Logits of each slot of a row, given what is chosen.

    Args:
        logits: of the head's own tokens, shape (k, V).
        chosen: chooses a token from logits.
    """
    before, state, found = anchor, None, []
    for h, each in zip(states, logits, strict=True):
        if "markov_head.markov_w1.weight" in w:
            bias, state = markov_bias(w, before, h, state)
            each = each + bias
        if "candidate_selector.predecessor_codebook" in w:
            each = selected(w, each, h, before, SELECTS["selector_top_k"])
        if "d2t" in w:
            every = np.full(VOCAB, -np.inf)
            every[np.arange(len(each)) + w["d2t"]] = each
            each = every
        found.append(each)
        before = chosen(each)
    return found


def block_states(
    w: dict[str, Array],
    features: Array,
    block: Array,
    *,
    windows: Sequence[int | None] = (None, None),
    causal: Sequence[bool] = (False, False),
    pairs: bool = False,
    dims: int | None = None,
) -> Array:
    """States (b, D) of embedded block tokens (b, D) after features (n, F)."""
    w, gates = dict(w), {}
    for name, array in w.items():
        if name.endswith("q_proj.weight") and len(array) == 2 * 4 * 8:
            # Heads of a query and a gate each; gains are stored less 1.
            both = array.reshape(4, 2, 8, -1)
            w[name], gates[name] = (both[:, i].reshape(32, -1) for i in (0, 1))
    if gates:
        w |= {n: a + 1 for n, a in w.items() if n.endswith("norm.weight")}
    n, b = len(features), len(block)
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    before, here = np.arange(n), np.arange(n, n + b)
    x = block
    for i, (window, only_before) in enumerate(zip(windows, causal, strict=True)):
        at = f"layers.{i}."
        normed = own = norm(x, w[at + "input_layernorm.weight"])
        convolves = at + "attention_conv.base_kernel" in w
        if convolves:
            own = convolved(normed, normed, w, at + "attention_conv.", 0)
        q = heads(own, w, at, "q", here, pairs=pairs, dims=dims)
        k, v = (
            np.concatenate(
                [
                    heads(context, w, at, kind, before, pairs=pairs, dims=dims),
                    heads(own, w, at, kind, here, pairs=pairs, dims=dims),
                ]
            )
            for kind in "kv"
        )
        seen = np.ones((b, n + b), bool)
        if window is not None:
            seen[:, :n] = here[:, None] - before < window
        if only_before:
            seen[:, n:] = here <= here[:, None]
        mixed = attention(q, k, v, seen, w.get(at + "self_attn.attention_sink_bias"))
        if gates:
            gate = own @ gates[at + "self_attn.q_proj.weight"].T
            mixed = mixed / (1 + np.exp(-gate))
        mixed = mixed @ w[at + "self_attn.o_proj.weight"].T
        if convolves:
            mixed = convolved(mixed, normed, w, at + "attention_conv.", 1)
        x = x + mixed
        normed = own = norm(x, w[at + "post_attention_layernorm.weight"])
        if convolves:
            own = convolved(normed, normed, w, at + "mlp_conv.", 0)
        mixed = mlp(own, w, at)
        if convolves:
            mixed = convolved(mixed, normed, w, at + "mlp_conv.", 1)
        x = x + mixed
    return norm(x, w["norm.weight"])


def gemma_turned(x: Array, positions: Array, theta: float, share: float) -> Array:
    """Proportional rotary embedding of x (S, heads, d): the first pairs of halves."""
    d = x.shape[-1]
    half = d // 2
    turning = int(d * share) // 2
    angles = positions[:, None] * theta ** (-2 * np.arange(half) / d)
    angles[:, turning:] = 0
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gemma_mlp(x: Array, w: dict[str, Array], at: str) -> Array:
    gate, up = x @ w[at + "mlp.gate_proj.weight"].T, x @ w[at + "mlp.up_proj.weight"].T
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gate = 0.5 * gate * (1 + np.tanh(inner))
    out: Array = (gate * up) @ w[at + "mlp.down_proj.weight"].T
    return out


def gemma_layer(x: Array, mixed: Array, w: dict[str, Array], at: str) -> Array:
    """The rest of a Gemma layer, from what its attention finds on."""
    mixed = mixed @ w[at + "self_attn.o_proj.weight"].T
    h = x + norm(mixed, w[at + "post_attention_layernorm.weight"])
    mixed = gemma_mlp(norm(h, w[at + "pre_feedforward_layernorm.weight"]), w, at)
    h = h + norm(mixed, w[at + "post_feedforward_layernorm.weight"])
    out: Array = h * w[at + "layer_scalar"]
    return out


def gemma_states(w: dict[str, Array], features: Array, tokens: Sequence[int]) -> Array:
    """States (b, D) of a block of tokens after features (n, F)."""
    n, b, size = len(features), len(tokens), features.shape[1] // len(READS)
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][list(tokens)] * math.sqrt(size)
    positions = np.arange(n + b)
    for i in range(2):
        at = f"layers.{i}."
        own = norm(x, w[at + "input_layernorm.weight"])
        q = (own @ w[at + "self_attn.q_proj.weight"].T).reshape(b, -1, 16)
        k = np.concatenate([context, own]) @ w[at + "self_attn.k_proj.weight"].T
        k = k.reshape(n + b, -1, 16)
        v = norm(k, np.ones(16))
        q = norm(q, w[at + "self_attn.q_norm.weight"])
        k = norm(k, w[at + "self_attn.k_norm.weight"])
        q = gemma_turned(q, positions[n:], 1e6, 0.25)
        k = gemma_turned(k, positions, 1e6, 0.25)
        mixed = attention(q, k, v, np.ones((b, n + b), bool), scale=1.0)
        x = gemma_layer(x, mixed, w, at)
    return norm(x, w["norm.weight"])


def eagle_chain(
    w: dict[str, Array],
    features: Array,
    following: Array,
    embedding: Array,
    num_tokens: int,
    *,
    config: dict[str, Any],
) -> tuple[list[int], list[Array]]:
    """Greedy proposals after features (n, F), and the logits of each in the target's.

    Without any cache: every step computes all pairs again. P-EAGLE's pairs after the
    real ones are all the same.
    """
    masked, embedding = w.get("mask_hidden"), w.get("embed_tokens.weight", embedding)
    if masked is not None:
        more = np.repeat(masked.reshape(1, -1), num_tokens - 1, 0)
        features = np.concatenate([features, more])
        masks = np.full(num_tokens - 1, config["mask_token_id"])
        following = np.append(following, masks)
    if config.get("norm_before_fc"):
        features = norm(features, w["input_norm.weight"])
    if config.get("fc_norm"):
        parts = np.split(features, len(READS), -1)
        features = np.concatenate(
            [norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1
        )
    given = list(features @ w["fc.weight"].T)
    tokens = list(following)
    proposed: list[int] = []
    logits = []
    for step in range(num_tokens):
        h = eagle_outputs(w, np.array(given), embedding[np.array(tokens)], config)
        after = norm(h, w["norm.weight"])
        at = -1 if masked is None else len(given) - num_tokens + step
        own = after[at] @ w["lm_head.weight"].T
        found = np.full(VOCAB, -np.inf)
        found[np.arange(len(own)) + w.get("d2t", 0)] = own
        logits.append(found)
        proposed.append(int(found.argmax()))
        if masked is None:
            tokens.append(proposed[-1])
            given.append((after if config.get("norm_output") else h)[-1])
    return proposed, logits


def eagle_outputs(
    w: dict[str, Array], g: Array, e: Array, config: dict[str, Any]
) -> Array:
    """The layers' outputs (n, D) for features and embeddings of tokens, (n, D) each."""
    at = "midlayer." if "midlayer.input_layernorm.weight" in w else "layers.0."
    positions = np.arange(len(g))
    seen = positions <= positions[:, None]
    normed = norm(g, w[at + "hidden_norm.weight"])
    x = np.concatenate([norm(e, w[at + "input_layernorm.weight"]), normed], -1)
    h = normed if config.get("norm_before_residual") else g
    i = 0
    layers = config.get("transformer_layer_config", config)
    kinds = (
        layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
    )
    near = seen & (positions > positions[:, None] - (layers.get("sliding_window") or 0))
    while at + "input_layernorm.weight" in w:
        q, k, v = (heads(x, w, at, kind, positions) for kind in "qkv")
        mask = near if kinds[i] == "sliding_attention" else seen
        h = h + attention(q, k, v, mask) @ w[at + "self_attn.o_proj.weight"].T
        h = h + mlp(norm(h, w[at + "post_attention_layernorm.weight"]), w, at)
        i += 1
        at = f"layers.{i}."
        if at + "input_layernorm.weight" in w:
            x = norm(h, w[at + "input_layernorm.weight"])
    return h


def assistant_chain(
    w: dict[str, Array],
    config: dict[str, Any],
    embedded: Any,
    newest: int,
    state: Array,
    held: dict[str, tuple[Array, Array]],
    num_tokens: int,
) -> list[int]:
    """Greedy proposals of an assistant.

    Args:
        embedded: gives the target's embedding of a token, (H,).
        newest: the newest token.
        state: the target's state after its last norm at the token before it, (H,).
        held: keys and values (n, h, d) of all tokens but the newest, by kind of layer.
    """
    w = {name.removeprefix("model."): array for name, array in w.items()}
    text = config["text_config"]
    proposed: list[int] = []
    for _ in range(num_tokens):
        token = proposed[-1] if proposed else newest
        x = (
            np.concatenate([embedded(token), state])[None]
            @ w["pre_projection.weight"].T
        )
        for i, kind in enumerate(text["layer_types"]):
            at = f"layers.{i}."
            keys, values = held[kind]
            n, d = len(keys), keys.shape[-1]
            y = norm(x, w[at + "input_layernorm.weight"])
            q = (y @ w[at + "self_attn.q_proj.weight"].T).reshape(1, -1, d)
            q = norm(q, w[at + "self_attn.q_norm.weight"])
            here = np.array([n - 1])
            sliding = kind == "sliding_attention"
            q = gemma_turned(q, here, 1e4 if sliding else 1e6, 1 if sliding else 0.25)
            first = max(n - text["sliding_window"], 0) if sliding else 0
            seen = (np.arange(n) >= first)[None]
            x = gemma_layer(x, attention(q, keys, values, seen, scale=1.0), w, at)
        o = norm(x, w["norm.weight"])[0]
        logits = w["embed_tokens.weight"] @ o
        if "masked_embedding.centroids.weight" in w:
            best = np.argsort(-(w["masked_embedding.centroids.weight"] @ o))[:3]
            groups = w["masked_embedding.token_ordering"].reshape(12, -1)
            shown = np.isin(np.arange(len(logits)), groups[best])
            logits = np.where(shown, logits, -np.inf)
        proposed.append(int(logits.argmax()))
        state = w["post_projection.weight"] @ o
    return proposed
