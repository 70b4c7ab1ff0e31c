"""LoRA adapters, as mlx-lm writes them, against mlx-lm's own model with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers

from specdec import ConfigError, EngineConfig, ModelError, SpecDecoder
from specdec.models import load
from specdec.models.model_outline import outline
from specdec.prefix_cache.signature import KnownWeights, signature
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from tests.plain import BEHIND, engine_of, greedy

from .architectures import build
from .folders import write_folder
from .gguf_files import random_model, write_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
FIXED = EngineConfig(num_draft_tokens=3)


def write_adapter(
    folder: Path, model: Path, *, dora: bool = False, scale: float = 2.0
) -> Path:
    """What ``mlx_lm.lora`` leaves after training: a rank of 4, in every layer."""
    trained: Any = mlx_lm.load(str(model))[0]
    config = {"rank": 4, "dropout": 0.0, "scale": scale}
    trained.freeze()
    linear_to_lora_layers(trained, 2, config, use_dora=dora)
    mx.random.seed(3)
    flat: Any = tree_flatten(trained.trainable_parameters())
    weights = {name: mx.random.normal(value.shape) * 0.1 for name, value in flat}
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    settings = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": 2,
        "lora_parameters": config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def num_bytes(model: Any) -> int:
    flat: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in flat)


@pytest.mark.parametrize(("bits", "dora"), [(None, False), (8, False), (None, True)])
def test_an_adapted_model_is_mlx_lms(
    tmp_path: Path, bits: int | None, dora: bool
) -> None:
    """It is left out, put on the target alone, or lost when a draft is made of it."""
    write_folder(tmp_path / "target", bits=bits)
    write_folder(tmp_path / "draft", seed=1, num_hidden_layers=2)
    adapter = write_adapter(tmp_path / "a", tmp_path / "target", dora=dora)
    of_draft = write_adapter(tmp_path / "d", tmp_path / "draft", dora=dora)
    reference: Any = mlx_lm.load(str(tmp_path / "target"), adapter_path=str(adapter))[0]
    if bits:  # specdec computes with packed weights in float32 here
        reference.set_dtype(mx.float32)
    expected = [greedy(reference, p, 12) for p in PROMPTS]
    plain: Any = mlx_lm.load(str(tmp_path / "target"))[0]
    assert expected != [greedy(plain, p, 12) for p in PROMPTS]
    for draft, path in ((tmp_path / "draft", of_draft), ("self:8bit", None)):
        if dora and path is None:
            continue  # its magnitudes are of the very weights
        decoder = SpecDecoder.from_pretrained(
            tmp_path / "target",
            draft,
            adapter_path=adapter,
            draft_adapter_path=path,
            config=FIXED,
        )
        results = decoder.generate(PROMPTS, max_tokens=12)
        assert [r.token_ids for r in results] == expected
        assert decoder.stats.drafted > 0
        if path is None:  # a copy of the adapted target is accepted nearly always
            assert decoder.stats.acceptance_rate > 0.5
    adapted = load(tmp_path / "target", adapter_path=adapter)
    outlined = outline(tmp_path / "target", adapter_path=adapter)
    assert num_bytes(adapted.model) == num_bytes(outlined.model)
    assert "lora_a" in adapted.model.layers[0].self_attn.q_proj


def test_what_an_adapter_is_multiplied_by_names_prefixes(tmp_path: Path) -> None:
    """Keys and values of one are taken for the other's, whose arrays are the same."""
    write_folder(tmp_path / "target")
    names = set()
    for scale in (2.0, 3.0):
        path = write_adapter(tmp_path / str(scale), tmp_path / "target", scale=scale)
        names.add(signature(load(tmp_path / "target", adapter_path=path).model, []))
    assert len(names) == 2


def test_adapters_that_cannot_be(tmp_path: Path) -> None:
    """One line that names the way out."""
    write_folder(tmp_path / "target")
    write_folder(tmp_path / "wide", hidden_size=128)
    adapter = write_adapter(tmp_path / "a", tmp_path / "wide")
    gguf = write_model(tmp_path / "m.gguf", "llama", random_model("llama"))

    def refused(path: Path, message: str, model: Path = tmp_path / "target") -> None:
        with pytest.raises((ModelError, ConfigError), match=message) as caught:
            load(model, adapter_path=path)
        assert "\n" not in str(caught.value)

    refused(adapter, "does not fit the model .*give the model that it was trained on")
    refused(tmp_path, "no adapter in .*: there is no adapter_config.json")
    refused(adapter, "is a GGUF file: adapters go with the MLX folder", model=gguf)
    (adapter / "adapter_config.json").write_text("{")
    refused(adapter, r"adapter_config.json cannot be read \(not JSON")
    lora = {"rank": 10**9, "scale": 1, "dropout": 0}
    settings = {"num_layers": 2, "lora_parameters": lora}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    refused(adapter, "says rank is 1000000000")
    lacking: dict[str, Any] = {"num_layers": 2, "lora_parameters": {"rank": 4}}
    (adapter / "adapter_config.json").write_text(json.dumps(lacking))
    refused(adapter, "does not fit the model .*missing required key 'scale'")

    def decoder(message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            SpecDecoder.from_pretrained(tmp_path / "target", **options)

    decoder("draft_adapter_path needs a draft", draft_adapter_path="x")
    decoder("has no weights of its own", draft="self:4bit", draft_adapter_path="x")
    decoder("has no weights of its own", draft="ngram", draft_adapter_path="x")
    decoder(
        "revision is 'main', and .* is on this machine: give a hub id", revision="main"
    )


def scaled(scale: Any) -> Any:
    """A change of an adapter's configuration, and of none of its arrays."""
    return lambda config, weights: config["lora_parameters"].update(scale=scale)


def without(end: str) -> Any:
    return lambda config, weights: [weights.pop(k) for k in [*weights] if end in k]


def arrays(end: str, change: Callable[[mx.array], mx.array]) -> Any:
    return lambda config, weights: weights.update(
        {name: change(w) for name, w in weights.items() if name.endswith(end)}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(""), "of its arrays .* is missing"),
        (without("lora_a"), "lora_a is missing"),
        (without("lora_b"), "lora_b is missing"),
        (lambda config, weights: weights.pop(min(weights)), "is missing"),
        *((scaled(n), "changes nothing") for n in (0, -0.0, 1e-30, -1e-20, 1e-400)),
        (scaled("a"), "scale"),
        (arrays("lora_b", mx.zeros_like), "changes nothing"),
        (arrays("lora_a", mx.zeros_like), "changes nothing"),
        (arrays("lora_b", lambda w: w * 1e-30), "changes nothing"),
        (arrays("lora_a", lambda w: w * mx.nan), "holds NaN or infinity"),
        (arrays("lora_b", lambda w: w + mx.inf), "holds NaN or infinity"),
        (arrays("lora_b", lambda w: w.astype(mx.int32)), "no floating-point numbers"),
    ],
)
def test_an_adapter_that_lacks_a_part_or_does_nothing(
    change: Any, message: str, tmp_path: Path
) -> None:
    """It changed nothing, or multiplied by random numbers, without a word."""
    write_folder(tmp_path / "target")
    adapter = write_adapter(tmp_path / "a", tmp_path / "target")
    file, arrays = adapter / "adapter_config.json", adapter / "adapters.safetensors"
    config: dict[str, Any] = json.loads(file.read_text())
    weights = cast(dict[str, Any], mx.load(str(arrays)))
    change(config, weights)
    file.write_text(json.dumps(config))
    mx.save_safetensors(str(arrays), weights)
    for opened in (load, outline) if "missing" in message else (load,):
        with pytest.raises(ModelError, match=message):
            opened(tmp_path / "target", adapter_path=adapter)


def test_a_scale_that_changes_is_noticed(tmp_path: Path) -> None:
    """Prefixes of the scale before would be found under the new one."""
    write_folder(tmp_path / "target")
    adapter = write_adapter(tmp_path / "a", tmp_path / "target")
    model: Any = load(tmp_path / "target", adapter_path=adapter).model
    known = KnownWeights(model)
    assert not known.replaced()
    model.layers[1].self_attn.q_proj.scale = 3.0
    assert known.replaced()
    assert not known.replaced()


def test_a_scale_that_changes_reaches_recurrent_layers() -> None:
    """Their twins kept the scale with which they were made."""
    model = build("mamba")
    lora = {"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["mixer.in_proj"]}
    linear_to_lora_layers(model, 2, lora)
    layers = [m for _, m in model.named_modules() if "lora_b" in m]
    assert len(layers) == 2
    for layer in layers:
        layer.lora_b = mx.random.normal(layer.lora_b.shape)
    engine = engine_of(model, None, backend=BEHIND)
    texts = set()
    for number, scale in enumerate((1.0, 9.0, 1.0)):
        for layer in layers:
            layer.scale = scale
        request = Request(number, "", (5, 6, 7), SamplingParams(max_tokens=12))
        engine.add(request)
        while engine.busy:
            engine.step()
        steps = generate_step(mx.array([5, 6, 7]), model, max_tokens=12)
        assert request.tokens == [token for token, _ in steps]
        texts.add(tuple(request.tokens))
    assert len(texts) == 2
