"""Published heads compute what their papers say, rows of any lengths at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec.cache import CacheOptions, make_batch_caches
from specdec.cuda import fused_linear
from specdec.cuda.fused_linear import JoinedLinear, join_products
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models import LoadedModel, load_draft, loading, model_outline
from specdec.models.draft_heads import BlockConfig, BlockHead, EagleHead, load_head
from specdec.models.draft_heads.config import spread_layers
from specdec.models.draft_heads.kinds import head_config, is_head
from specdec.models.draft_heads.loading import make_head, read_head_config

from ..gguf_files import random_model, write_model
from . import published
from .published import LAYERS, READS, SELECTS, SOME_TOKENS, VOCAB, WIDTH, write_head

# Context entries of three rows, and how they come: chunk after chunk.
LENGTHS, CHUNK = (5, 1, 23), 8
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
}
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": (published.dflash_config(), {}),
    "sliding": (
        published.dflash_config(**SLIDING),
        {"windows": (7, None), "causal": (True, False)},
    ),
    "sliding both ways": (
        published.dflash_config(**SLIDING, is_causal=False),
        {"windows": (7, None)},
    ),
    "all causal": (
        published.dflash_config(dflash={"causal": True}),
        {"causal": (True, True)},
    ),
    "dspark": (published.dspark_config(), {}),
    "pairs": (published.dspark_config(rope_is_neox_style=False), {"pairs": True}),
    "speculators dflash": (published.speculators_config("dflash"), {}),
    "speculators sliding": (
        published.speculators_config(
            "dflash", layers=SLIDING, sliding_window_non_causal=True
        ),
        {"windows": (7, None)},
    ),
    "speculators dspark": (
        published.speculators_config("dspark", markov_rank=4, sample_from_anchor=True),
        {},
    ),
}
BLOCKS |= {
    "dspark gated": (published.dspark_config(markov_head_type="gated"), {}),
    "dspark rnn": (published.dspark_config(markov_head_type="rnn"), {}),
    "dspark of rank 0": (published.dspark_config(markov_rank=0), {}),
    "dflash2": (published.dflash2_config(), {}),
    "dflash2 sliding": (
        published.dflash2_config(**SLIDING), {"windows": (7, None)}
    ),
    "dflash2 of three taps": (
        published.dflash2_config(dflash={"conv_kernel_size": 3}), {}
    ),
    "speculators dflash2": (published.speculators_config("dflash2"), {}),
    "nemotron, anchored": (
        published.nemotron_config(), {"windows": (7, 7), "causal": (True, True)}
    ),
    "dspark of qwen3.5": (published.qwen35_config(), {"dims": 4}),
    "muse": (published.muse_config(), {"windows": (7, 7)}),
    "dspark of specforge": (
        published.dflash_config(
            architectures=["DSparkDraftModel"],
            dflash={
                "projector_type": "dspark", "markov_rank": 6,
                "markov_head_type": "gated",
            },
        ),
        {},
    ),
    "dspark of liquid, pairs": (
        published.dflash_config(
            architectures=["Lfm2DSparkDraftModel"], markov_rank=6,
            rope_is_neox_style=False,
        ),
        {"pairs": True},
    ),
    "dspark of gemma": (published.gemma_config(), {}),
}  # fmt: skip
EAGLES: dict[str, dict[str, Any]] = {
    "eagle3": published.eagle_config(),
    "eagle3.1": published.eagle_config(
        fc_norm=True, norm_output=True, norm_before_residual=True
    ),
    "deepseek": published.eagle_config(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        draft_vocab_size=None,
        num_target_layers=LAYERS,
        target_layer_ids=list(READS),
    ),
    "speculators": published.speculators_config("eagle3", norm_before_fc=True),
    "peagle": published.peagle_config(norm_before_residual=True),
    "speculators peagle": published.speculators_config(
        "peagle", norm_before_fc=True, fc_norm=True
    ),
    "speculators sliding": published.speculators_config("eagle3", layers=SLIDING),
    "speculators sliding peagle": published.speculators_config(
        "peagle", layers=SLIDING
    ),
}


@pytest.fixture(scope="module")
def lender(tiny_model: Callable[..., Any]) -> LoadedModel:
    """A target with an output head of its own."""
    model = tiny_model("qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=False)
    return LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]


def loaded(path: Path, config: dict[str, Any], target: LoadedModel) -> Any:
    """A head that was written, and what was."""
    weights = write_head(path, config)
    head_config = read_head_config(path)
    assert head_config is not None
    return load_head(path, head_config, "the draft", target).model, weights


Arrays = dict[str, mx.array]


def rewritten(
    path: Path,
    config: dict[str, Any],
    target: LoadedModel,
    change: Callable[[Arrays, dict[str, Any]], None],
) -> Any:
    """A head whose file is changed, and the weights of the head before."""
    weights = write_head(path, config)
    arrays = {name: mx.array(array) for name, array in weights.items()}
    change(arrays, weights)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return load_head(path, config, "the draft", target).model, weights


def features_of(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    made: np.ndarray = rng.normal(size=(n, WIDTH * len(READS))).astype(np.float32)
    return made


def after_context(head: Any, following: Any = None, **options: Any) -> tuple[Any, Any]:
    """Caches that hold the context of three rows, and what the last entries gave."""
    caches = make_batch_caches(head, 3, CacheOptions(max_write=CHUNK, **options))
    rows = [features_of(n) for n in LENGTHS]
    last: list[Any] = [None] * 3
    for first in range(0, max(LENGTHS), CHUNK):
        valid = [min(max(n - first, 0), CHUNK) for n in LENGTHS]
        chunk = np.zeros((3, CHUNK, WIDTH * len(READS)), np.float32)
        tokens = np.zeros((3, CHUNK), np.int32)
        for i, (row, n) in enumerate(zip(rows, valid, strict=True)):
            chunk[i, :n] = row[first : first + n]
            if following is not None:
                tokens[i, :n] = following[i][first : first + n]
        for cache in caches:
            cache.prepare(lengths=valid)
        given = head.absorb(mx.array(chunk), mx.array(tokens), caches)
        for cache in caches:
            cache.finalize()
        for i, n in enumerate(valid):
            if n and given is not None:
                last[i] = given[i, n - 1]
    assert caches[0].offset.tolist() == list(LENGTHS)
    return caches, last


def argmax(logits: Any) -> int:
    return int(logits.argmax())


def check_block(
    head: BlockHead,
    weights: dict[str, Any],
    how: dict[str, Any],
    target: LoadedModel,
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    mask_token: int | None = None,
) -> None:
    model: Any = target.model
    width = 5
    anchors = mx.array([[3], [50], [77]])
    mask = head.args.mask_token if mask_token is None else mask_token
    caches, _ = after_context(head)
    states = head.states(head.inputs(anchors, width), caches)
    after = head.walk(states, anchors)
    proposed, found = list[mx.array](), list[mx.array]()
    for _ in range(width):
        found.append(after(proposed))
        proposed.append(mx.argmax(found[-1], axis=-1))
    logits = np.array(mx.concatenate(found, axis=1))
    logits[logits < -1000] = -np.inf
    embedding = np.array(model.model.embed_tokens.weight)
    assert caches[0].offset.tolist() == [n + width for n in LENGTHS]
    for i, n in enumerate(LENGTHS):
        tokens = [int(anchors[i, 0]), *[mask] * (width - 1)]
        if "embed_tokens.weight" in weights:
            expected = published.gemma_states(weights, features_of(n), tokens)
        else:
            expected = published.block_states(
                weights, features_of(n), embedding[tokens], **how
            )
        assert np.allclose(np.array(states[i]), expected, atol=2e-4)
        own = weights.get("lm_head.weight", np.array(model.lm_head.weight))
        dflash = {**config, **config.get("dflash_config", {})}
        plain = (expected @ own.T) * dflash.get("output_multiplier", 1.0)
        if cap := dflash.get("final_logit_softcapping"):
            plain = cap * np.tanh(plain / cap)
        wanted = published.walk(weights, expected, plain, int(anchors[i, 0]), argmax)
        assert np.allclose(logits[i], np.array(wanted), atol=1e-3)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, lender: LoadedModel, tmp_path: Path) -> None:
    """Each part of the forward, masks and positions of rows of different lengths."""
    config, how = BLOCKS[name]
    head, weights = loaded(tmp_path, config, lender)
    check_block(head, weights, how, lender, config=config)
    anchored = "dspark" in name or name == "pairs"
    assert head.args.from_anchor == anchored
    assert head.args.target_layers == READS
    assert head.args.max_draft_tokens == head.args.block_size - (not anchored)


def test_products_of_a_head_are_joined(lender: LoadedModel, tmp_path: Path) -> None:
    """Keys and values are, without queries, which a context lacks; gate and up are.

    With queries among them, a context would compute a part that nobody takes, and the
    product would soon be joined no more.
    """
    config, how = BLOCKS["dspark"]
    head, weights = loaded(tmp_path, config, lender)
    join_products(head)
    for _ in range(3):
        check_block(head, weights, how, lender)
    joined = [n for n, m in head.named_modules() if isinstance(m, JoinedLinear)]
    names = {"k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.rpartition(".")[2] for name in joined} == names


@pytest.mark.parametrize("name", BLOCKS)
def test_a_context_has_one_product(
    name: str, lender: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of all layers, also once weights of a layer were replaced."""
    config, how = BLOCKS[name]
    head, weights = loaded(tmp_path, config, lender)
    alone, _ = loaded(tmp_path, config, lender)
    join_products(head)
    head.eval()
    computed = list[bool]()
    usual = fused_linear.Stacked.__call__

    def called(self: Any, x: mx.array) -> Any:
        product = usual(self, x)
        computed.append(product is not None)
        return product

    monkeypatch.setattr(fused_linear.Stacked, "__call__", called)
    check_block(head, weights, how, lender, config=config)
    assert bool(computed) == ("gemma" not in name)  # its values are normed, too
    assert all(computed)
    last = head.layers[-1].self_attn
    for part in ("k_norm", "v_proj"):
        if part in last:
            weight = 2 * last[part].weight
            last[part].weight = alone.layers[-1].self_attn[part].weight = weight
        both = [after_context(each)[0] for each in (head, alone)]
        for one, other in zip(*both, strict=True):
            for ours, theirs in zip(one.arrays, other.arrays, strict=True):
                assert mx.allclose(ours, theirs, atol=1e-5)
    assert not any(computed[-1:])


Fault = Callable[[Any], object]


def other(**changes: Any) -> Fault:
    """A fault: other arguments of a head."""
    return lambda head: setattr(head, "args", replace(head.args, **changes))


def in_layers(change: Callable[[Any], object]) -> Fault:
    """A fault in each layer."""
    return lambda head: [change(layer) for layer in head.layers]


def in_attention(**changes: Any) -> Fault:
    """A fault: other attributes of each attention; what is ``None`` goes."""

    def change(layer: Any) -> None:
        for name, value in changes.items():
            if value is None:
                layer.self_attn.pop(name)
            else:
                setattr(layer.self_attn, name, value)

    return in_layers(change)


def swapped(part: str, one: str, two: str) -> Callable[[Any], None]:
    """A fault in a module: two of a part's members change places."""

    def change(module: Any) -> None:
        holder = module[part]
        holder[one], holder[two] = holder[two], holder[one]

    return change


def norm_first(head: Any) -> None:
    head.context = lambda hidden: head.fc(mx.fast.rms_norm(hidden, None, 1e-6))


def other_groups(layer: Any) -> None:
    for part in (layer.attention_conv, layer.mlp_conv):
        w = part.kernel_projection.weight
        w = w.reshape(2, -1, SELECTS["conv_group_size"], 2, WIDTH)
        part.kernel_projection.weight = w.swapaxes(2, 3).reshape(-1, WIDTH)


def taps_of_the_output(layer: Any) -> None:
    layer.mlp_conv.base_kernel = layer.mlp_conv.base_kernel[::-1]


def sees_the_next_slot(layer: Any) -> None:
    part = layer.attention_conv
    part.base_kernel = part.base_kernel[:, ::-1]


def fewer_candidates(head: Any) -> None:
    head.candidate_selector._count = 3


def swapped_gate_inputs(head: Any) -> None:
    (part,) = (
        head.markov_head[n]
        for n in ("gate_proj", "joint_proj")
        if n in head.markov_head
    )
    part.weight = mx.roll(part.weight, 6, 1)


def forgets(head: Any) -> None:
    usual = head.markov_head._mixed
    head.markov_head._mixed = lambda e, h, carried: usual(e, h, None)


def no_value_norm(layer: Any) -> None:
    part = layer.self_attn
    part.keys_values = lambda x, offset: (
        type(part).keys_values(part, x, offset)[0],
        part._heads(part.k_proj(x), part.n_kv_heads),
    )


def no_output_norm(layer: Any) -> None:
    layer.post_attention_layernorm = nn.Identity()


FAULTS: dict[str, tuple[Fault, ...]] = {
    "dspark of qwen3.5": (
        in_attention(rope=nn.RoPE(8)),
        in_layers(swapped("self_attn", "q_proj", "g_proj")),
    ),
    "nemotron, anchored": (in_attention(attention_sink_bias=None),),
    "dspark of gemma": (
        in_layers(no_value_norm), other(embedding_scale=float(WIDTH)),
        in_attention(scale=16**-0.5), in_layers(no_output_norm), other(logit_cap=0.0),
    ),
    "dflash": (
        in_attention(rope=nn.RoPE(8, traditional=True)), other(mask_token=95),
        norm_first, other(causal=(True, True)), in_attention(k_norm=None),
    ),
    "dflash2": (
        in_layers(other_groups), in_layers(taps_of_the_output),
        in_layers(sees_the_next_slot), other(logit_cap=0.0), fewer_candidates,
        swapped("candidate_selector", "predecessor_codebook", "successor_codebook"),
    ),
    "dspark gated": (swapped_gate_inputs,),
    "dspark rnn": (swapped_gate_inputs, forgets),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fault"), [(name, f) for name, each in FAULTS.items() for f in each]
)
def test_what_is_wrong_is_seen(
    name: str, fault: Fault, lender: LoadedModel, tmp_path: Path
) -> None:
    """The comparison above notices each of these."""
    config, how = BLOCKS[name]
    head, weights = loaded(tmp_path, config, lender)
    mask = head.args.mask_token
    fault(head)
    with pytest.raises(AssertionError):
        check_block(head, weights, how, lender, config=config, mask_token=mask)


def check_chain(
    head: EagleHead, weights: dict[str, Any], config: Any, target: LoadedModel
) -> None:
    model: Any = target.model
    embedding = np.array(model.model.embed_tokens.weight)
    following = [
        np.random.default_rng(9 + n).integers(0, VOCAB, size=n) for n in LENGTHS
    ]
    caches, last = after_context(head, following)
    state, found, logits = mx.stack(last)[:, None], [], []
    if head.at_once:
        state = mx.concatenate([state, head.states(head.masks(3, 2), caches)], axis=1)
        logits = list(np.array(head.as_target(head.predict(state))).swapaxes(0, 1))
        found = [each.argmax(-1) for each in logits]
    for _ in range(3 - len(found)):
        logits.append(np.array(head.as_target(head.predict(state)))[:, 0])
        found.append(logits[-1].argmax(-1))
        state = head.step(mx.array(found[-1])[:, None], state, caches)
    for i, n in enumerate(LENGTHS):
        tokens, expected = published.eagle_chain(
            weights, features_of(n), following[i], embedding, 3, config=config
        )
        assert [int(each[i]) for each in found] == tokens
        for got, wanted in zip(logits, expected, strict=True):
            assert np.allclose(got[i], wanted, atol=1e-3)


def swapped_pair(head: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        part = head.layers[0].self_attn[name]
        part.weight = mx.roll(part.weight, WIDTH, 1)


def no_learned_state(head: Any) -> None:
    head.mask_hidden = mx.zeros_like(head.mask_hidden)


def other_residual(head: Any) -> None:
    other(norm_before_residual=not head.args.norm_before_residual)(head)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("eagle3", swapped_pair),
        ("eagle3", other_residual),
        ("peagle", other_residual),
        ("peagle", other(mask_token=95)),
        ("peagle", no_learned_state),
    ],
)
def test_what_is_wrong_in_a_chain_is_seen(
    name: str, fault: Fault, lender: LoadedModel, tmp_path: Path
) -> None:
    """The comparison below notices each of these."""
    head, weights = loaded(tmp_path, EAGLES[name], lender)
    fault(head)
    with pytest.raises(AssertionError):
        check_chain(head, weights, EAGLES[name], lender)


@pytest.mark.parametrize("name", EAGLES)
def test_chains(name: str, lender: LoadedModel, tmp_path: Path) -> None:
    """Steps through caches are those of all pairs computed again each time."""
    config = EAGLES[name]
    head, weights = loaded(tmp_path, config, lender)
    assert isinstance(head, EagleHead)
    check_chain(head, weights, config, lender)
    # Where nobody says which layers, the target's depth does.
    assert head.args.target_layers == (
        READS if name[:1] in "sd" else (1, 2, LAYERS - 4)
    )


MUSE = {"fc.weight": "encoder.fc", "hidden_norm.weight": "encoder.output_norm_enc"}


@pytest.mark.parametrize(
    ("config", "name_of", "how"),
    [
        # Meta's file has other names for the projection of features and its norm.
        (published.muse_config(), lambda n: f"{MUSE[n]}.weight" if n in MUSE else n,
         {"windows": (7, 7)}),
        # Some checkpoints put ``model.`` before each name.
        (published.dflash_config(), lambda n: f"model.{n}", {}),
    ],
)  # fmt: skip
def test_other_names(
    config: dict[str, Any], name_of: Any, how: Any, lender: LoadedModel, tmp_path: Path
) -> None:
    """An array is unknown, or missing."""

    def rename(arrays: Arrays, _: object) -> None:
        for name in [*arrays]:
            arrays[name_of(name)] = arrays.pop(name)

    head, weights = rewritten(tmp_path, config, lender, rename)
    check_block(head, weights, how, lender)


def test_a_parallel_head_may_be_named_eagle(
    lender: LoadedModel, tmp_path: Path
) -> None:
    """Without its learned state it would draft one good token in a round.

    Some name the mask's token as PARD does.
    """
    config = published.peagle_config() | {"mask_token_id": None, "pard_token": 5}
    weights = write_head(tmp_path, config)
    named = config | {"architectures": ["LlamaForCausalLMEagle3"]}
    head: Any = load_head(tmp_path, named, "the draft", lender).model
    assert head.args.kind == "P-EAGLE"
    assert head.args.mask_token == 5
    assert np.allclose(head.mask_hidden, weights["mask_hidden"].reshape(-1))
    with pytest.raises(ModelError, match="mask_token_id is missing"):
        load_head(tmp_path, named | {"pard_token": None}, "the draft", lender)


def test_a_mask_may_have_an_embedding_of_its_own(
    lender: LoadedModel, tmp_path: Path
) -> None:
    """The target's embedding of the mask's token was never learnt."""
    model: Any = lender.model
    own = model.model.embed_tokens.weight[95:96]  # another token's
    head, weights = rewritten(
        tmp_path, published.dflash_config(), lender,
        lambda arrays, _: arrays.update(mask_embedding=own),
    )  # fmt: skip
    check_block(head, weights, {}, lender, mask_token=95)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"mask_embedding.pt, .* can hold code"):
        read_head_config(tmp_path)


def test_packed_rings_and_buckets(lender: LoadedModel, tmp_path: Path) -> None:
    """Additive masks, as on a GPU, of columns that no row has."""
    head, _ = loaded(tmp_path, BLOCKS["sliding both ways"][0], lender)
    options = {"read_bucket": 16, "additive_mask": True}
    caches, _ = after_context(head, **options)
    tokens = head.inputs(mx.array([[3], [50], [77]]), 4)
    usual, _ = after_context(head)
    assert np.allclose(
        head.states(tokens, caches), head.states(tokens, usual), atol=1e-5
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "depth": (
        published.dflash_config(num_target_layers=36),
        "made for a target of 36 layers, and the target has 6",
    ),
    "layer": (
        published.dflash_config(dflash={"target_layer_ids": [1, 3, 6]}),
        "made for a target with a layer 6, and the target has 6 layers",
    ),
    "embedding": (
        published.dspark_config(target_layer_ids=[-1, 1, 3]),
        r"reads the target's embedding \(layer -1\), which is not supported",
    ),
    "jetspec": (
        published.dflash_config(architectures=["JetSpecSpeculator"]),
        "it proposes trees of tokens",
    ),
    "noise": (
        published.dspark_config(log_snr_conditioning=True),
        r"embedding of noise to its slots \(log_snr_conditioning\)",
    ),
    "width": (published.dflash_config(target_hidden_size=64), "target of width 64"),
    "lent width": (
        published.dflash_config(hidden_size=64, target_hidden_size=published.WIDTH),
        "target of width 64",
    ),
    "vocabulary": (published.dflash_config(vocab_size=98), "a target of 98 logits"),
    "mask": (
        published.dflash_config(dflash={"mask_token_id": 97}),
        "whose token 97 masks, and the target has 97 tokens",
    ),
    "another kind": (
        published.dflash_config(architectures=["DominoDraftModel"]),
        "kind 'DominoDraftModel', which is not supported: a recurrent network",
    ),
    "stages of its target": (
        published.dspark_config(architectures=["DeepseekV4DSparkModel"]),
        "mlx-lm runs none of the targets that it is part of",
    ),
    "another speculator": (
        {**published.speculators_config("dflash"), "speculators_model_type": "hydra"},
        "kind 'hydra', which is not supported",
    ),
    "markov": (
        published.dspark_config(markov_head_type="odd"),
        "Markov head of kind 'odd'",
    ),
    "activation": (published.dflash_config(hidden_act="gelu"), "activation 'gelu'"),
    "rope": (
        published.dflash_config(rope_scaling={"type": "odd", "factor": 2}),
        "rotary embedding .* is not supported",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(
    name: str, lender: LoadedModel, tmp_path: Path
) -> None:
    """By one line that says what was wanted and what there is."""
    config, message = WRONG[name]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        loaded(tmp_path, config, lender)
    assert "\n" not in str(caught.value)


def test_a_model_type_names_a_head() -> None:
    """mlx-vlm's heads have no architecture; taken for a model, it would be unknown."""
    config = {"model_type": "deepseek_v4_dspark", "block_size": 5}
    assert is_head(config)
    with pytest.raises(UnsupportedModelError, match="mlx-lm runs none of the targets"):
        head_config(config, (), "the draft")
    assert not is_head({"model_type": "llama"})


@pytest.mark.parametrize("original", [16, None])
def test_yarn(original: int | None, lender: LoadedModel, tmp_path: Path) -> None:
    """As transformers has it, from which these heads were trained (Peng et al. 2023).

    Without it acceptance falls with each token, and without the factor of queries and
    keys from the first on.
    """
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    if original is not None:
        rope["original_max_position_embeddings"] = original
    config = published.dflash_config(
        architectures=["DSparkDraftModel"],
        rope_theta=None,
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    head, _ = loaded(tmp_path, config, lender)
    x = np.random.default_rng(0).normal(size=(1, 1, 9, 8)).astype(np.float32)
    found = head.layers[0].self_attn.rope(mx.array(x), offset=40)
    plain = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    low, high = (
        8 * np.log((original or 64) / (turns * 2 * np.pi)) / (2 * np.log(10000.0))
        for turns in (32, 1)
    )
    low, high = max(np.floor(low), 0), min(np.ceil(high), 7)
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    frequencies = plain / 4 * ramp + plain * (1 - ramp)
    angles = np.arange(40, 49)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[0, 0, :, :4], x[0, 0, :, 4:]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    turned *= 0.1 * np.log(4.0) + 1
    assert np.allclose(np.array(found[0, 0]), turned, atol=1e-4)


def test_a_selector_of_nothing_is_dflash(lender: LoadedModel, tmp_path: Path) -> None:
    """Zero codebooks and convolutions that pass their input on change nothing.

    Training begins like this: a head that differs from DFlash then reads other inputs.
    """
    config = published.dflash2_config()
    weights = write_head(tmp_path / "2", config)
    for name, array in weights.items():
        if name.endswith(("codebook", "kernel_projection.weight")):
            array[:] = 0
        if name.endswith("base_kernel"):
            array[:] = 0
            array[:, 0] = 1
    new = ("candidate_selector", ".attention_conv.", ".mlp_conv.")
    plain = {n: a for n, a in weights.items() if not any(part in n for part in new)}
    config_1 = published.dflash_config(dflash=config["dflash_config"], is_causal=False)
    logits = []
    for path, arrays, described in (
        (tmp_path / "2", weights, config),
        (tmp_path / "1", plain, config_1 | {"block_size": None}),
    ):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(described), "utf-8")
        stored = {name: mx.array(array) for name, array in arrays.items()}
        mx.save_safetensors(str(path / "model.safetensors"), stored)
        head: Any = load_head(path, described, "the draft", lender).model
        caches, _ = after_context(head)
        states = head.states(head.inputs(mx.array([[3], [50], [77]]), 5), caches)
        logits.append(np.array(head.logits(states)))
        walked = head.walk(states, mx.array([[3], [50], [77]]))([])
        assert (np.array(walked)[:, 0].argmax(-1) == logits[0][:, 0].argmax(-1)).all()
    assert (logits[0] == logits[1]).all()


def test_only_candidates_have_a_chance(lender: LoadedModel, tmp_path: Path) -> None:
    """Probabilities of others are exactly 0, unless a grammar forbids all candidates.

    Then the likeliest other token is proposed; a row of nothing but minus infinity
    would have no probabilities, and its round would be lost.
    """
    head, _ = loaded(tmp_path, published.dflash2_config(), lender)
    caches, _ = after_context(head)
    anchors = mx.array([[3], [50], [77]])
    states = head.states(head.inputs(anchors, 3), caches)
    logits = head.walk(states, anchors)([])
    plain = np.array(head.logits(states)[:, 0])
    chances = np.array(mx.softmax(logits[:, 0], axis=-1))
    assert ((chances > 0).sum(-1) == SELECTS["selector_top_k"]).all()
    masked = mx.where(mx.array(chances > 0)[:, None], -mx.inf, logits)
    plain[chances > 0] = -np.inf
    assert (np.array(mx.argmax(masked[:, 0], axis=-1)) == plain.argmax(-1)).all()
    assert np.allclose(mx.softmax(masked, axis=-1).sum(axis=-1), 1, atol=1e-5)


def test_the_rows_of_an_embedding_are_read_as_they_are(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """DFlash 2 has a factor of its own in place of Gemma's; DFlash takes Gemma's.

    With both factors hardly anything is accepted.
    """
    model = tiny_model("gemma2", num_hidden_layers=LAYERS)
    target = LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]
    scale = {"input_embedding_scale": 3.0}
    tokens = mx.array([[3, 96, 96]] * 3)
    stored, inputs = model.model.embed_tokens.weight[tokens], list[mx.array]()

    def noted(x: mx.array, attend: Any) -> mx.array:
        inputs.append(x)
        return x

    for i, config in enumerate(
        (published.dflash2_config(dflash=scale), published.dflash_config(dflash=scale))
    ):
        head, _ = loaded(tmp_path / str(i), config, target)
        head.layers[0].around = noted
        head.states(tokens, after_context(head)[0])
    assert mx.allclose(inputs[0], stored * 3)
    assert mx.allclose(inputs[1], stored * 3 * WIDTH**0.5)


def test_what_is_damaged_is_named(lender: LoadedModel, tmp_path: Path) -> None:
    config = published.dflash_config()
    cases = {
        "mask_token_id is missing": published.dflash_config(
            dflash={"mask_token_id": None}
        ),
        "block_size is .*, not": published.dflash_config(block_size="six"),
        "block_size is 1: it must": published.dflash_config(block_size=1),
        "num_attention_heads is 0": published.dflash_config(num_attention_heads=0),
        "3, which does not divide": published.dflash_config(num_key_value_heads=3),
        "conv_group_size is 5": published.dflash2_config(dflash={"conv_group_size": 5}),
        "selector_top_k is 98": published.dflash2_config(dflash={"selector_top_k": 98}),
        "selector_rank is missing": published.dflash2_config(
            dflash={"selector_rank": None}
        ),
        "hidden_size is missing": {"architectures": ["DFlashDraftModel"]},
        "layers.1.*is not known": {
            **config, "num_hidden_layers": 1, "layer_types": None,
        },
        "layers.2.*is missing": {
            **config, "num_hidden_layers": 3, "layer_types": None,
        },
        r"mlp.*is of shape \(32, 48\), not \(32, 50\)": {
            **config, "intermediate_size": 50,
        },
    }  # fmt: skip
    write_head(tmp_path, config)
    for message, broken in cases.items():
        with pytest.raises(ModelError, match=message):
            load_head(tmp_path, broken, "the draft", lender)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no .safetensors file, .* can hold code"):
        read_head_config(tmp_path)
    # A model's own folder is none of a head.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_head_config(tmp_path) is None


def _set(name: str, change: Callable[[mx.array], mx.array]) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: change(arrays[name])})


ODD_ARRAYS: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "d2t of NaN": (
        _set("d2t", lambda a: a.astype(mx.float32) * mx.nan), "d2t does not say which",
    ),
    "d2t of floats": (_set("d2t", lambda a: a.astype(mx.float32)), "d2t does not say"),
    "d2t too short": (_set("d2t", lambda a: a[1:]), "its d2t does not say which"),
    "d2t below": (_set("d2t", lambda a: a.at[0].add(-99)), "tokens beyond the 97"),
    "d2t above": (
        _set("d2t", lambda a: a.at[-1].add(VOCAB - SOME_TOKENS[-1])), "tokens beyond",
    ),
    "d2t wraps": (
        _set("d2t", lambda a: mx.full(a.shape, 2**63 - 1, mx.int64)), "tokens beyond",
    ),
    "numbers for weights": (
        _set("norm.weight", lambda a: a.astype(mx.int32)), "norm.weight is of type",
    ),
    "no numbers at all": (_set("fc.weight", lambda a: a[:0]), "is of shape"),
    "scales alone": (
        lambda arrays: arrays.update({"fc.scales": mx.zeros((32, 3))}),
        "fc.scales is not known",
    ),
    "scales of no packing": (
        lambda arrays: arrays.update(
            {"fc.weight": mx.zeros((32, 7), mx.uint32), "fc.scales": mx.zeros((32, 3))}
        ),
        "fc.*",
    ),
    "scales without columns": (
        lambda arrays: arrays.update({"fc.scales": mx.array(1.0)}), "fc.scales is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_odd_arrays(name: str, lender: LoadedModel, tmp_path: Path) -> None:
    """An array of another type or shape ends in our error, before anything runs."""
    change, message = ODD_ARRAYS[name]
    with pytest.raises(ModelError, match=message):
        rewritten(
            tmp_path, published.eagle_config(), lender, lambda arrays, _: change(arrays)
        )


def test_the_last_tokens_of_d2t(lender: LoadedModel, tmp_path: Path) -> None:
    """The first and the last id of the target are in range."""
    ids = np.array([0, *SOME_TOKENS[1:-1], VOCAB - 1])
    d2t = mx.array(ids - np.arange(len(ids)))
    head, _ = rewritten(
        tmp_path, published.eagle_config(), lender,
        lambda arrays, _: arrays.update(d2t=d2t),
    )  # fmt: skip
    logits = head.as_target(mx.zeros((1, len(ids))))[0].tolist()
    assert [i for i, each in enumerate(logits) if each == 0] == ids.tolist()


ODD_CONFIGS: dict[str, dict[str, Any]] = {
    "null layers": {"transformer_layer_config": None},
    "a kind that is a number": {"speculators_model_type": 7},
    "mrope without sections": {
        "rope_scaling": {"type": "mrope", "mrope_section": []},
    },
    "an odd head": {"head_dim": 7},
    "rope of words": {"rope_parameters": {"rope_theta": "a"}},
    "packing of words": {"quantization": {"bits": "four", "group_size": None}},
    "packing is a list": {"quantization": [4, 64]},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_odd_configurations(name: str, lender: LoadedModel, tmp_path: Path) -> None:
    """A value of another kind ends in our error, or is not needed."""
    config = published.dflash_config(**ODD_CONFIGS[name])
    write_head(tmp_path, published.dflash_config())
    with contextlib.suppress(ModelError):
        load_head(tmp_path, config, "the draft", lender)


def test_headers_that_are_no_text(lender: LoadedModel, tmp_path: Path) -> None:
    """MLX raises a UnicodeDecodeError, not a RuntimeError, for these."""
    config = published.dflash_config()
    write_head(tmp_path, config)
    header = b"\xff\xfe{}".ljust(16)
    data = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="the draft cannot be loaded"):
        load_head(tmp_path, config, "the draft", lender)


@pytest.mark.parametrize(
    "packing", [(32, 4, "affine"), (32, 4, "mxfp4"), (16, 4, "nvfp4"), (32, 8, "mxfp8")]
)
def test_packed_layers_are_known_by_their_shapes(
    packing: tuple[int, int, str], lender: LoadedModel, tmp_path: Path
) -> None:
    """No configuration says so, and others stay as they are."""
    group_size, bits, mode = packing
    how: Any = {"group_size": group_size, "bits": bits, "mode": mode}

    def pack(arrays: Arrays, weights: dict[str, Any]) -> None:
        for name in ("fc", "layers.1.self_attn.q_proj"):
            packed = mx.quantize(arrays[f"{name}.weight"], **how)
            parts = zip(("weight", "scales", "biases"), packed, strict=False)
            arrays.update({f"{name}.{part}": array for part, array in parts})
            plain = mx.dequantize(*packed, **how)
            weights[f"{name}.weight"] = np.array(plain.astype(mx.float32))

    head, weights = rewritten(tmp_path, published.dflash_config(), lender, pack)
    assert isinstance(head.layers[0].self_attn.q_proj, nn.Linear)
    check_block(head, weights, {}, lender)


def test_a_stray_file_is_no_part_of_a_head(lender: LoadedModel, tmp_path: Path) -> None:
    """An older file beside the newer one took its place, by the order of names."""
    config = published.dflash_config()
    weights = write_head(tmp_path, config)
    arrays = {"fc.weight": mx.array(weights["fc.weight"])}
    mx.save_safetensors(str(tmp_path / "model_old.safetensors"), arrays)
    with pytest.raises(ModelError, match=r"fc.weight in two files, .*model_old"):
        load_head(tmp_path, config, "the draft", lender)


def test_layers_that_nobody_names() -> None:
    """As z-lab spreads them over 36 layers."""
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 1) == (14,)


@pytest.mark.parametrize(
    ("said", "width", "anchored"),
    [(None, None, False), (None, 6, True), (None, 5, False), (False, 6, False)],
)
def test_a_speculators_anchor(
    said: bool | None, width: int | None, anchored: bool
) -> None:
    """What is said decides, and else how many tokens a block proposes.

    One slot off, 1.4 tokens a round were accepted in place of 3.4.
    """
    config = published.speculators_config("dspark", sample_from_anchor=said)
    if width is not None:
        method = {"proposal_type": "greedy", "speculative_tokens": width}
        config["speculators_config"] = {"proposal_methods": [method]}
    found = head_config(config, (), "the draft")
    assert isinstance(found, BlockConfig)
    assert found.from_anchor == anchored


def test_layers_are_counted_in_two_ways() -> None:
    """A layer more or less is not noticed but by the acceptance rate.

    SpecForge's configurations name layers by what they put out, vLLM's by what they are
    given; both have them at the top or in a part of their own.
    """
    for ids, read in (
        (list(READS), READS),
        ([i + 1 for i in READS], READS),
        ([24, 30, 36], (23, 29, 35)),
    ):
        key = {"eagle_aux_hidden_state_layer_ids": ids}
        for given in (key, {"eagle_config": {**key, "use_aux_hidden_state": True}}):
            config = head_config(published.eagle_config(**given), (), "the draft")
            assert config.target_layers == read


@pytest.mark.parametrize("name", ["sample_from_anchor", "query_zero_predicts_next"])
def test_what_the_anchor_predicts_has_two_names(name: str) -> None:
    """In two places each: with slots off by one, hardly anything is accepted."""
    for changes in ({name: True}, {"dflash": {name: True}}):
        config = head_config(published.dflash_config(**changes), (), "the draft")
        assert isinstance(config, BlockConfig)
        assert (config.from_anchor, config.max_draft_tokens) == (True, 6)


def test_logits_are_capped_once(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    """By the target's code where it does that: a second cap flattens the draft's."""
    model = tiny_model("gemma2", num_hidden_layers=LAYERS, final_logit_softcapping=3.0)
    target = LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]
    config = published.dflash_config(final_logit_softcapping=3.0)
    head, _ = loaded(tmp_path, config, target)
    h = mx.random.normal((1, 2, WIDTH), key=mx.random.key(0)) * 9
    whole = model.model.embed_tokens.as_linear(h)
    assert mx.abs(whole).max() > 3
    assert mx.allclose(head.logits(h), mx.tanh(whole / 3) * 3, atol=1e-5)


def test_heads_are_made_without_weights(lender: LoadedModel, tmp_path: Path) -> None:
    """For training: the arrays of a published one but the confidence head's."""
    head, weights = loaded(tmp_path, published.dspark_config(), lender)
    made: Any = make_head(head.args)
    leaves: Any = tree_flatten(made.parameters())
    shapes = {name: a.shape for name, a in leaves}
    used = [name for name in weights if not name.startswith("confidence_head")]
    assert shapes == {name: weights[name].shape for name in used}


def test_names_that_are_known_are_no_folders(
    lender: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default target as a draft is a file; the hub is not asked for it."""
    file = write_model(tmp_path / "m.gguf", "llama", random_model("llama"))
    for module in (loading, model_outline):
        monkeypatch.setattr(module, "locate_target", {"known": str(file)}.get)
    assert load_draft("known", lender).model.layers
    outlined: Any = model_outline.outline_draft("known", lender)  # type: ignore[arg-type]
    assert outlined.model.layers
