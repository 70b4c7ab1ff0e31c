"""The prefix cache from the Python API: options, counts, mlx-lm's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from specdec import CacheError, EngineConfig, SamplingParams, SpecDecoder
from tests.cache.small_models import MODELS
from tests.plain import greedy
from tests.test_decoder import loaded

from .harness import NEW_TOKENS, TinyModel
from .test_engine import STEM, other

PARAMS = SamplingParams(max_tokens=NEW_TOKENS)
# Blocks are of 256 tokens here.
LONG = [(3 * i + i * i * i) % 97 for i in range(600)]


def decoder_of(target: Any, draft: Any = None, **options: Any) -> SpecDecoder:
    config = EngineConfig(prefill_step_size=128, **options)
    return SpecDecoder(
        loaded(target), None if draft is None else loaded(draft), config=config
    )


def test_a_second_run_finds_what_the_first_has_stored(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    target, draft = tiny_model(), tiny_model(seed=1)
    prompts = [LONG, LONG[:300] + other(20, 1), LONG[:20]]
    wanted = [greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    # Loaded again, from the user's folder.
    for expected in ([0, 0, 0], [599, 319, 0]):
        decoder = decoder_of(target, draft, prefix_cache=tmp_path / "cache")
        assert decoder.prefix_store is not None
        results = decoder.generate(prompts, PARAMS)
        assert [r.token_ids for r in results] == wanted
        assert [r.prefix_tokens for r in results] == expected
        assert results[0].to_dict()["prefix_tokens"] == expected[0]
        assert decoder.stats.prefix_tokens == sum(expected)
        assert decoder.stats.prompt_tokens == sum(map(len, prompts))
        decoder.prefix_store.close()


def test_memory_alone_and_nothing_at_all(tiny_model: TinyModel) -> None:
    decoder = decoder_of(tiny_model(), prefix_cache_memory=10**8)
    for expected in (0, 299):
        (result,) = decoder.generate([LONG[:300]], PARAMS)
        assert result.prefix_tokens == expected
    assert decoder_of(tiny_model()).prefix_store is None
    assert decoder_of(tiny_model(), prefix_cache_memory=0).prefix_store is None


def test_only_room_for_little(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A budget below one entry, in memory and on disk."""
    target = tiny_model()
    options = {"prefix_cache": tmp_path, "prefix_cache_size": 10}
    decoder = decoder_of(target, prefix_cache_memory=10, **options)
    for _ in range(2):
        (result,) = decoder.generate([LONG[:300]], PARAMS)
        assert result.token_ids == greedy(target, LONG[:300], NEW_TOKENS)
        assert result.prefix_tokens == 0
    assert not list(tmp_path.iterdir())


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {},
    "list": {},
    "8-bit": {"kv_bits": 8, "kv_group_size": 32},
}


def of_kind(name: str, tiny_model: TinyModel) -> Any:
    if name == "8-bit":
        return tiny_model("llama", head_dim=32)
    arch, arguments = MODELS[name]
    return tiny_model(arch, **arguments)


def continued(target: Any, caches: Any, rest: list[int], **options: Any) -> list[int]:
    """mlx-lm's own decoding after a prompt cache."""
    steps = generate_step(
        mx.array(rest), target, max_tokens=NEW_TOKENS, prompt_cache=caches, **options
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_for_mlx_lm(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """mlx-lm reads what was exported, and goes on as from its own prefill."""
    target, prompt = of_kind(name, tiny_model), LONG[:300]
    decoder = decoder_of(target, prefix_cache_memory=10**9, **KINDS[name])
    (result,) = decoder.generate([prompt], PARAMS)
    file = tmp_path / "exported.safetensors"
    length = decoder.export_prompt_cache(prompt, file)
    assert length == 299
    caches = mlx_lm_cache.load_prompt_cache(str(file))
    assert continued(target, caches, prompt[length:]) == result.token_ids


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_mlx_lm(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """What mlx-lm has prefilled need not be computed; nor may it be another's."""
    target, prompt = of_kind(name, tiny_model), LONG[:300]
    caches: Any = mlx_lm_cache.make_prompt_cache(target)
    quantized = name == "8-bit"
    if quantized:
        caches = [mlx_lm_cache.QuantizedKVCache(group_size=32, bits=8) for _ in caches]
    for start in range(0, 290, 145):
        target(mx.array([prompt[start : start + 145]]), cache=caches)
    file = tmp_path / "theirs.safetensors"
    mlx_lm_cache.save_prompt_cache(str(file), caches)
    decoder = decoder_of(
        target, prefix_cache=tmp_path, prefix_cache_memory=0, **KINDS[name]
    )
    assert decoder.import_prompt_cache(file, prompt) == 290
    assert decoder.prefix_store is not None
    decoder.prefix_store.flush()
    (result,) = decoder.generate([prompt], PARAMS)
    assert result.prefix_tokens == 290
    plain = decoder_of(target, **KINDS[name]).generate([prompt], PARAMS)
    assert result.token_ids == plain[0].token_ids
    with pytest.raises(CacheError, match=r"holds 290 tokens and the prompt has 100"):
        decoder.import_prompt_cache(file, prompt[:100])
    for other_model, message in (
        (tiny_model(num_hidden_layers=3), "it is of another model"),
        (tiny_model("llama", head_dim=64), "layer 0: "),
    ):
        with pytest.raises(CacheError, match=message):
            decoder_of(other_model, prefix_cache_memory=9).import_prompt_cache(
                file, prompt
            )


def test_files_that_cannot_be_used(tiny_model: TinyModel, tmp_path: Path) -> None:
    decoder = decoder_of(tiny_model(), prefix_cache_memory=10**8)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(CacheError, match=r"text.safetensors cannot be read as a prom"):
        decoder.import_prompt_cache(tmp_path / "text.safetensors", STEM)
    for name in ("missing.safetensors", "missing"):
        with pytest.raises(CacheError, match=f"{name}: no such file"):
            decoder.import_prompt_cache(tmp_path / name, STEM)
    with pytest.raises(CacheError, match="nothing is stored of this prompt"):
        decoder.export_prompt_cache(LONG, tmp_path / "out.safetensors")
    decoder.generate([LONG, LONG[1:33], LONG[2:35]], PARAMS)
    short = r"the prompt has 32 tokens, and prefixes of fewer than 32 are not looked up"
    with pytest.raises(CacheError, match=short):
        decoder.export_prompt_cache(LONG[1:33], tmp_path / "out.safetensors")
    file = tmp_path / "32.safetensors"
    assert decoder.export_prompt_cache(LONG[2:35], file) == 32
    with pytest.raises(CacheError, match="cannot be written"):
        decoder.export_prompt_cache(LONG, tmp_path / "no" / "out.safetensors")
    with pytest.raises(CacheError, match="there is no prefix store"):
        decoder_of(tiny_model()).export_prompt_cache(LONG, tmp_path / "x.safetensors")


def test_files_of_a_model_with_layers_that_store_nothing(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """mlx-lm has caches for them too, empty ones, which the engine does not keep."""
    linear = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
    attending = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
    target = tiny_model("nemotron-nas", block_configs=[linear, attending])
    decoder = decoder_of(target, prefix_cache_memory=10**8)
    prompt, file = LONG[:300], tmp_path / "cache.safetensors"
    wanted = [r.token_ids for r in decoder.generate([prompt], PARAMS)]
    assert decoder.export_prompt_cache(prompt, file) == 299
    caches = mlx_lm_cache.load_prompt_cache(str(file))
    assert [c.offset for c in caches] == [0, 299]
    rest = mx.array(prompt[299:])
    steps = generate_step(rest, target, max_tokens=NEW_TOKENS, prompt_cache=caches)
    assert [[int(token) for token, _ in steps]] == wanted
    other_one = decoder_of(target, prefix_cache_memory=10**8)
    assert other_one.import_prompt_cache(file, prompt) == 299
    (result,) = other_one.generate([prompt], PARAMS)
    assert (result.prefix_tokens, [result.token_ids]) == (299, wanted)
