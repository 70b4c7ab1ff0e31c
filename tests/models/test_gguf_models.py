"""A GGUF file gives the logits of the mlx-lm model that it was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec import EngineConfig, SpecDecoder
from specdec.models import load
from specdec.models.gguf import config as gguf_config
from specdec.models.gguf import load_gguf
from specdec.models.gguf.config import build_config, is_tied
from specdec.models.gguf.header import read_header
from specdec.models.gguf.tensors import read_float
from specdec.models.gguf.weights import packing_note
from tests.plain import greedy

from .gguf_files import (
    MORE,
    VOCAB,
    file_tensors,
    metadata,
    random_model,
    write_gguf,
    write_model,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
TOKENS = mx.array([[7, 300, 12, 44, 5, 91, 200, 7, 3, 18, 250, 33, 2]])
KIND = gguf.GGMLQuantizationType
FIXED = EngineConfig(num_draft_tokens=3)


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    a: Any = dict(tree_flatten(left.parameters()))
    b: Any = dict(tree_flatten(right.parameters()))
    return a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]).item() for k in a)


def difference(left: mx.array, right: mx.array) -> float:
    """The largest one."""
    return float(np.abs(np.array(left) - np.array(right)).max())


def close(left: mx.array, right: mx.array) -> bool:
    return np.allclose(np.array(left), np.array(right), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_logits_are_exact(arch: str, tmp_path: Path) -> None:
    model = random_model(arch)
    loaded = load(str(write_model(tmp_path / "m.gguf", arch, model)))
    assert same_weights(loaded.model, model)
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


def test_llama_undoes_the_permutation(tmp_path: Path) -> None:
    """The file interleaves q and k; the model was written with halves."""
    model = random_model("llama", rope_traditional=False)
    loaded = load(str(write_model(tmp_path / "m.gguf", "llama", model)))
    assert loaded.config["rope_traditional"] is True
    logits = model(TOKENS)
    assert close(loaded.model(TOKENS), logits)
    # The comparison sees a wrong RoPE: the same weights with halves do differ.
    wrong = random_model("llama", rope_traditional=False)
    wrong.update(loaded.model.parameters())
    assert not close(wrong(TOKENS), logits)


def test_llama_weights_are_exact(tmp_path: Path) -> None:
    """Against mlx-lm's own interleaved RoPE there is no difference at all."""
    model = random_model("llama", rope_traditional=True)
    args: Any = model.args
    stored = file_tensors("qwen2", model)  # qwen2: as they are
    values = metadata("llama", vars(args))
    path = write_gguf(tmp_path / "m.gguf", "llama", stored, values)
    raw = load(str(path))
    assert same_weights(raw.model, model)
    assert mx.array_equal(raw.model(TOKENS), model(TOKENS))


def test_gemma3_takes_the_one_off_its_norms(tmp_path: Path) -> None:
    model = random_model("gemma3")
    loaded = load(str(write_model(tmp_path / "m.gguf", "gemma3", model)))
    # (1 + w) - 1 rounds w to a multiple of 2 ** -23; the rest is exact.
    ours: Any = dict(tree_flatten(loaded.model.parameters()))
    theirs: Any = dict(tree_flatten(model.parameters()))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        tolerance = 2**-22 if "norm" in name else 0
        assert difference(ours[name], value) <= tolerance, name
    model.update(loaded.model.parameters())
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("pattern", "period"),
    [(3, 3), ([True, True, False, True, True, False, True], 3), ([True] * 7, 8)],
)
def test_gemma3_pattern_of_the_file(
    tmp_path: Path, pattern: int | list[bool], period: int
) -> None:
    values = {"gemma3.attention.sliding_window_pattern": pattern}
    path = write_model(
        tmp_path / "m.gguf", "gemma3", random_model("gemma3"), values=values
    )
    assert build_config(read_header(path))["sliding_window_pattern"] == period


def test_missing_optional_metadata_takes_its_default(tmp_path: Path) -> None:
    model = random_model("llama", num_key_value_heads=4, rope_theta=10_000.0)
    args: Any = model.args
    values = metadata("llama", vars(args))
    for key in ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count"):
        del values[f"llama.{key}"]
    stored = file_tensors("llama", model)
    path = write_gguf(tmp_path / "m.gguf", "llama", stored, values)
    assert close(load(str(path)).model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
        ),
        (  # without the length of before, it is that of the model
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "yarn"}, None),
        ({"rope.scale_linear": 0.0}, None),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_rope_scaling(
    tmp_path: Path, values: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    model = random_model("qwen2", rope_scaling=scaling)
    added = {f"qwen2.{key}": value for key, value in values.items()}
    path = write_model(tmp_path / "m.gguf", "qwen2", model, values=added)
    loaded = load(str(path))
    assert loaded.config.get("rope_scaling") == scaling
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))
    if scaling:
        assert not close(random_model("qwen2")(TOKENS), model(TOKENS))


def test_llama3_scaling_is_read_from_its_factors(tmp_path: Path) -> None:
    """The file holds a factor per frequency instead of the parameters."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = 500_000.0
    model = random_model("llama", rope_scaling=scaling, rope_theta=theta)
    layer: Any = model.layers[0]
    plain = theta ** (np.arange(0, 16, 2) / 16)
    factors = (np.array(layer.self_attn.rope._freqs) / plain).astype(np.float32)
    assert factors.min() == pytest.approx(1.0)
    assert factors.max() == pytest.approx(8.0)
    path = write_model(
        tmp_path / "m.gguf", "llama", model, tensors={"rope_freqs.weight": factors}
    )
    loaded = load(str(path))
    assert loaded.config["rope_scaling"] == scaling
    assert close(loaded.model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("kind", [KIND.F32, KIND.Q8_0])
def test_an_output_matrix_with_two_rows_of_its_own_is_kept(
    kind: KIND, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after teaching a model one more token; no sample of the rows sees it."""
    monkeypatch.setattr(gguf_config, "_COMPARED_BYTES", 2000)  # many parts
    model = random_model("qwen2", tie_word_embeddings=False)
    head = np.array(model.model.embed_tokens.weight)
    head[[77, 319]] *= 2
    model.lm_head.weight = mx.array(head)
    path = write_model(tmp_path / "m.gguf", "qwen2", model, kinds=lambda name: kind)
    loaded = load(str(path), dtype="float32")
    assert loaded.config["tie_word_embeddings"] is False
    if kind == KIND.F32:
        assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))
    rows = loaded.model.lm_head.weight != loaded.model.model.embed_tokens.weight
    assert np.flatnonzero(np.array(rows.any(axis=1))).tolist() == [77, 319]


@pytest.mark.parametrize("kind", [KIND.F32, KIND.Q4_0])
def test_one_matrix_written_twice_is_tied(kind: KIND, tmp_path: Path) -> None:
    model = random_model("qwen2")
    tensors = {"output.weight": np.array(model.model.embed_tokens.weight)}
    path = write_model(
        tmp_path / "m.gguf", "qwen2", model, tensors=tensors, kinds=lambda name: kind
    )
    loaded = load(str(path), dtype="float32")
    assert loaded.config["tie_word_embeddings"] is True
    assert "lm_head" not in loaded.model


def test_equal_bytes_of_two_types_are_two_matrices(tmp_path: Path) -> None:
    """A head in bfloat16 is read as an embedding in float16."""
    model = random_model("qwen2")
    weight = np.array(model.model.embed_tokens.weight)
    kinds = {"token_embd.weight": KIND.F16, "output.weight": KIND.BF16}
    path = write_model(
        tmp_path / "m.gguf",
        "qwen2",
        model,
        tensors={"token_embd.weight": 0 * weight, "output.weight": 0 * weight},
        kinds=lambda name: kinds.get(name, KIND.F32),
    )
    assert not is_tied(read_header(path))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_one_matrix_quantized_twice_is_two(arch: str, tmp_path: Path) -> None:
    """Each reads its own, as llama.cpp does."""
    model = random_model(arch)
    weight = np.array(model.model.embed_tokens.weight)
    kinds = {"token_embd.weight": KIND.Q4_0, "output.weight": KIND.Q8_0}
    path = write_model(
        tmp_path / "m.gguf",
        arch,
        model,
        tensors={"output.weight": weight},
        kinds=lambda name: kinds.get(name, KIND.F32),
    )
    loaded = load(str(path), dtype="float32")
    assert loaded.config["tie_word_embeddings"] is False
    file = read_header(path)
    for name, layer in (
        ("token_embd.weight", loaded.model.model.embed_tokens),
        ("output.weight", loaded.model.lm_head),
    ):
        expected = read_float(file, file.tensors[name], mx.float32)
        assert mx.array_equal(layer.weight, expected), name


@pytest.mark.parametrize(
    ("arch", "tied"),
    [*((arch, True) for arch in ARCHITECTURES), ("llama", False), ("qwen3", False)],
)
def test_packed_weights_stay_packed(arch: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(arch, tie_word_embeddings=tied)
    path = write_model(
        tmp_path / "m.gguf",
        arch,
        model,
        kinds=lambda name: KIND.Q8_0 if "ffn" in name or "emb" in name else KIND.Q4_0,
    )
    loaded = load(str(path))
    inner = loaded.model.model
    assert isinstance(inner.embed_tokens, nn.QuantizedEmbedding)
    assert (inner.embed_tokens.bits, inner.embed_tokens.group_size) == (8, 32)
    query = inner.layers[0].self_attn.q_proj
    assert isinstance(query, nn.QuantizedLinear)
    assert (query.bits, query.group_size) == (4, 32)
    if not tied:
        assert loaded.model.lm_head.bits == 4
    entry = loaded.config["quantization"]
    assert entry["bits"] == 4
    assert entry["group_size"] == 32
    assert entry["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert "model.layers.0.self_attn.q_proj" not in entry
    # Dequantized while reading, it is the same model.
    exact = load(str(path), dtype="float32")
    assert "quantization" not in exact.config
    logits = exact.model(TOKENS)
    size = difference(logits, mx.zeros_like(logits))
    # Scales are float16 in the file; bfloat16 keeps three bits fewer of them.
    tolerance = 1e-3 if arch == "llama" else 1e-2
    assert difference(loaded.model(TOKENS), logits) < tolerance * size


def test_the_cpu_runs_the_weights_of_other_backends(tmp_path: Path) -> None:
    """In float32, but with scales as rounded as theirs."""
    path = write_model(
        tmp_path / "m.gguf", "qwen2", random_model("qwen2"), kinds=lambda _: KIND.Q8_0
    )
    elsewhere, _, _ = load_gguf(path)
    theirs: Any = dict(tree_flatten(elsewhere.parameters()))
    ours: Any = dict(tree_flatten(load(str(path)).model.parameters()))
    assert theirs["model.embed_tokens.scales"].dtype == mx.bfloat16
    for name, value in ours.items():
        assert mx.array_equal(value, theirs[name].astype(value.dtype)), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KIND.F32, dict.fromkeys(ARCHITECTURES, mx.float32)),
        (KIND.BF16, dict.fromkeys(ARCHITECTURES, mx.bfloat16)),
        (KIND.F16, {**dict.fromkeys(ARCHITECTURES, mx.bfloat16), "llama": mx.float16}),
    ],
)
def test_float_type_of_the_weights(
    arch: str, kind: KIND, expected: dict[str, mx.Dtype], tmp_path: Path
) -> None:
    path = write_model(
        tmp_path / "m.gguf", arch, random_model(arch), kinds=lambda name: kind
    )
    loaded = load(str(path))
    flat: Any = tree_flatten(loaded.model.parameters())
    assert {value.dtype for _, value in flat} == {expected[arch]}
    assert loaded.model(TOKENS[:, :2]).shape == (1, 2, VOCAB)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_dequantizes(dtype: str, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        "llama",
        random_model("llama"),
        kinds=lambda name: KIND.Q4_1,
    )
    loaded = load(str(path), dtype=dtype)
    flat: Any = tree_flatten(loaded.model.parameters())
    assert {value.dtype for _, value in flat} == {getattr(mx, dtype)}
    packed = load(str(path)).model.model.embed_tokens
    scales, biases = packed.scales.astype(mx.float32), packed.biases.astype(mx.float32)
    expected = mx.dequantize(packed.weight, scales, biases, 32, 4)
    got = loaded.model.model.embed_tokens.weight
    assert mx.array_equal(got, expected.astype(getattr(mx, dtype)))


OTHERS = ("smollm3", "granite", "mixtral", "phi3", "olmo2", "olmoe", "qwen2moe",
          "qwen3moe", "gemma", "gemma2")  # fmt: skip
# Every matrix is wide enough for blocks of 256.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
}


def wide(arch: str) -> dict[str, int]:
    known = {**MORE.get(arch, {}), "hidden_size": 0, "intermediate_size": 0,
             "head_dim": 0}  # fmt: skip
    return {name: size for name, size in WIDE.items() if name in known}


@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures(arch: str, tmp_path: Path) -> None:
    """A name, a permutation, a scale or a norm's 1 is wrong."""
    tied = arch in ("gemma", "gemma2")
    model = random_model(arch, tie_word_embeddings=tied)
    loaded = load(str(write_model(tmp_path / "m.gguf", arch, model)))
    logits = model(TOKENS)
    assert close(loaded.model(TOKENS), logits)
    # In batches, rows of their own lengths: the engine's whole path.
    decoder = SpecDecoder(loaded, drafter="ngram", config=FIXED)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 5, 9, 10]]
    for prompt, result in zip(
        prompts, decoder.generate(prompts, max_tokens=8), strict=True
    ):
        expected = greedy(loaded.model, prompt, 8)
        ended = result.finish_reason == "stop"
        assert result.token_ids == expected[: len(result.token_ids)]
        assert ended or len(result.token_ids) == 8


@pytest.mark.parametrize("arch", [*OTHERS, "llama", "qwen3"])
def test_k_quants_stay_packed(arch: str, tmp_path: Path) -> None:
    """A part of some architecture is inflated to floats, or put in wrong order."""
    tied = arch in ("gemma", "gemma2")
    model = random_model(arch, tie_word_embeddings=tied, **wide(arch))
    parts = {"attn": KIND.Q4_K, "down": KIND.Q6_K, "up": KIND.Q5_K, "ffn": KIND.Q5_0}

    def kind_of(name: str) -> KIND:
        return next((k for part, k in parts.items() if part in name), KIND.Q8_0)

    path = write_model(tmp_path / "m.gguf", arch, model, kinds=kind_of)
    loaded = load(str(path))
    flat: Any = dict(tree_flatten(loaded.model.parameters()))
    routers = ("mlp.gate.weight", "expert_gate.weight", "sparse_moe.gate.weight")
    for name, value in flat.items():
        matrix = name.endswith(".weight") and value.ndim > 1
        packed = value.dtype == mx.uint32
        assert packed == (matrix and not name.endswith(routers)), name
    exact = load(str(path), dtype="float32")
    logits = np.array(exact.model(TOKENS))
    errors = np.abs(np.array(loaded.model(TOKENS)) - logits).max(axis=-1)[0]
    # Of one token or another, rounding may choose another expert.
    assert np.median(errors) < 2e-2 * np.abs(logits).max()


def test_phi3_factors(tmp_path: Path) -> None:
    """RoPE over a part of the head, and factors for long contexts."""
    factors = {
        "long_factor": [1.0, 1.25, 2.0, 4.0, 8.0, 16.0],
        "short_factor": [1.0, 1.0, 1.0, 1.5, 2.0, 2.0],
    }
    model = random_model(
        "phi3",
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", **factors},
        original_max_position_embeddings=64,
    )
    path = write_model(
        tmp_path / "m.gguf",
        "phi3",
        model,
        values={
            "phi3.rope.dimension_count": 12,
            "phi3.rope.scaling.original_context_length": 64,
        },
        tensors={
            f"rope_factors_{length}.weight": np.array(
                factors[f"{length}_factor"], np.float32
            )
            for length in ("long", "short")
        },
    )
    assert close(load(str(path)).model(TOKENS), model(TOKENS))
    assert not close(random_model("phi3")(TOKENS), model(TOKENS))


def test_a_line_says_what_became_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that are not the file's own look like them."""
    model = random_model("qwen3", **wide("qwen3"))
    path = tmp_path / "m.gguf"
    write_model(path, "qwen3", model, kinds=lambda name: KIND.Q8_0)
    with caplog.at_level("INFO", logger="specdec"):
        load(str(path))
    assert not caplog.records
    file = read_header(path)
    name = "blk.0.ffn_up.weight"
    file.tensors[name] = replace(file.tensors[name], type_id=int(KIND.Q6_K))
    file.tensors["token_embd.weight"] = replace(
        file.tensors["token_embd.weight"], type_id=int(KIND.TQ2_0)
    )
    assert packing_note(file) == (
        "Q6_K is packed in 8 bits; TQ2_0 becomes floats; as in the file: Q8_0"
    )
