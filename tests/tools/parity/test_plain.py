"""The reference is plain decoding, whatever shape it scores in."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx.core as mx
import pytest

import specdec.tools.parity
from specdec import ConfigError, SamplingParams
from specdec.sampling.noise import gumbel_noise
from specdec.tools.parity.plain import PlainTarget, scores
from tests.models import architectures
from tests.plain import greedy, plainly

from .harness import TinyModel, make_prompts


def test_it_decodes_as_mlx_lm_does(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    plain = PlainTarget(model)
    for prompt in make_prompts(4):
        tokens = plain.decode(prompt, max_tokens=12, ends=frozenset()).tokens
        assert list(tokens) == greedy(model, prompt, 12)


def test_it_draws_with_the_noise_of_seed_and_position(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=-3)
    plain = PlainTarget(model)
    for prompt in make_prompts(4):
        decoded = plain.decode(
            prompt, max_tokens=12, ends=frozenset(), temperature=0.8, seed=-3
        )
        assert list(decoded.tokens) == plainly(model, prompt, params).tokens


def test_it_stops_after_a_token_that_ends_a_row(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    plain = PlainTarget(model)
    whole = plain.decode([5], max_tokens=12, ends=frozenset()).tokens
    ends = frozenset(whole[4:5])
    decoded = plain.decode([5], max_tokens=12, ends=ends)
    assert decoded.tokens == whole[: whole.index(whole[4]) + 1]
    assert len(decoded.logprobs) == len(decoded.tokens)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("batch_size", "width"), [(1, 1), (3, 4), (2, 5), (1, 2)])
def test_every_shape_scores_the_same_prefix(
    tiny_model: TinyModel, arch: str, batch_size: int, width: int
) -> None:
    """Against one forward of the whole prefix: a wrong query would be far off."""
    more = {"sliding_window": 8, "sliding_window_pattern": 2} if "gemma" in arch else {}
    model = tiny_model(arch, **more)
    plain = PlainTarget(model)
    prompt, tokens = make_prompts(4)[3], [3, 1, 4, 1, 5, 9, 2, 6]
    for n in range(len(tokens) + 1):
        whole = model(mx.array([[*prompt, *tokens[:n]]]))[0, -1]
        logits = plain.logits(
            prompt, tokens[:n], batch_size=batch_size, width=width, prefill_step_size=7
        )
        assert logits.dtype == mx.float32
        assert mx.abs(logits - whole).max().item() < 1e-4  # type: ignore[operator]


def test_the_noise_is_the_engines() -> None:
    """Written down twice, so that one can be compared with the other."""
    seed, position = 7, 12
    drawn = scores(mx.zeros(50), temperature=1.0, seed=seed, position=position)
    engine = gumbel_noise(mx.array([seed], mx.uint32), mx.array([[position]]), 50)
    assert mx.array_equal(drawn, engine[0, 0])


def test_kv_bits_that_mlx_lm_does_not_have(tiny_model: TinyModel) -> None:
    model = tiny_model("gemma3_text", sliding_window=8, sliding_window_pattern=2)
    with pytest.raises(ConfigError, match="mlx-lm cannot quantize all of its caches"):
        PlainTarget(model, kv_bits=8)


def test_packed_keys_for_code_that_takes_none() -> None:
    """The reference would fail where the engine unpacks them for latent attention."""
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
    model = architectures.build("deepseek_v3", **latent)
    reference = PlainTarget(model, kv_bits=4, kv_group_size=architectures.GROUP_SIZE)
    for prompt in architectures.PROMPTS:
        wanted = architectures.plain(model, prompt, kv_bits=4)
        decoded = reference.decode(prompt, max_tokens=len(wanted), ends=frozenset())
        assert list(decoded.tokens) == wanted


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("plain", {"errors", "mlx", "mlx_lm"}),
        ("compare", set()),
        ("statistics", {"numpy", "math"}),
    ],
)
def test_the_reference_is_independent(name: str, allowed: set[str]) -> None:
    """It takes nothing of the engine; what classifies takes no models either."""
    file = Path(specdec.tools.parity.__file__).with_name(f"{name}.py")
    imported = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
    standard = {"__future__", "collections", "dataclasses", "typing"}
    assert imported - standard <= allowed
