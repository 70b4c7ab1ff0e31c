"""Block heads that are trained: what is learnt, how, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from specdec import SpecDecoder
from specdec.cache import CacheOptions, make_batch_caches
from specdec.config import EngineConfig
from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models import LoadedModel, load, load_draft
from specdec.models.layers import TargetEnds, layers_of
from specdec.models.model_outline import outline, outline_draft
from specdec.sampling_params import SamplingParams
from specdec.tools.distill import job
from specdec.tools.distill.block_student import (
    BlockStudent,
    draw_anchors,
    make_block_student,
)
from specdec.tools.distill.blocks import Block
from specdec.tools.distill.loss import ChunkedLoss
from specdec.tools.distill.options import DistillOptions
from specdec.tools.distill.student import head_of, make_student
from specdec.tools.distill.train import Trainer
from tests.models.architectures import build
from tests.models.draft_heads import published
from tests.models.gguf_files import arguments, random_model

from .harness import QUESTIONS, longer, options, run, same, write_target

SIZE, HARD = 4, 0.3
FORMS = pytest.mark.parametrize("form", ["dspark", "dflash", "dflash2"])
# What the numpy forward of the published heads takes for granted.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 97,
}


def small_target(arch: str = "llama") -> LoadedModel:
    model = random_model(arch, **SIZES)
    config = arguments(arch, **SIZES)
    return LoadedModel(model, None, config, arch)  # type: ignore[arg-type]


def two_rows() -> Block:
    """A prompt and an answer that ends early; an answer up to the end."""
    rng = np.random.default_rng(5)
    weights = np.zeros((2, 16), np.float32)
    weights[0, 2:5], weights[0, 5:11], weights[1, 7:] = 0.2, 1.0, 1.0
    positions = np.flatnonzero(weights).astype(np.int32)
    padded = np.concatenate([positions, [0, 0]]).astype(np.int32)
    chosen = np.concatenate([weights.reshape(-1)[positions], [0, 0]])
    tokens = rng.integers(0, 90, (2, 16)).astype(np.int32)
    return Block(tokens, padded, chosen.astype(np.float32), 27)


def student_of(target: LoadedModel, form: str) -> BlockStudent:
    """With weights that are not those of a beginning, and unlike norms."""
    student = make_block_student(target, (0, 5), form=form, block_size=SIZE, seed=3)
    rng = np.random.default_rng(1)
    flat: Any = tree_flatten(student.parameters)
    drawn = [(n, a + rng.normal(0, 0.1, a.shape).astype(np.float32)) for n, a in flat]
    student.load(tree_unflatten(drawn))
    return student


def test_anchors_are_drawn_where_there_is_something_to_learn() -> None:
    """Never in padding or before what weighs anything; prompts a fifth as often."""
    block = two_rows()
    seen = np.zeros((2, 16))
    for seed in range(400):
        rng = np.random.default_rng(seed)
        anchors, positions, weights = draw_anchors(block, 4, 3, rng)
        at = positions.reshape(2, 4, 3) - 16 * np.arange(2)[:, None, None]
        weights = weights.reshape(2, 4, 3)
        assert (np.diff(anchors, axis=1) > 0).all()
        meant = anchors[:, :, None] + np.arange(3)
        ends = np.array([11, 16])[:, None, None]
        np.testing.assert_array_equal(weights, meant < ends)
        np.testing.assert_array_equal(at, np.minimum(meant, 15))
        for row, drawn in enumerate(anchors):
            seen[row, drawn] += 1
    assert not seen[0, :2].any()
    assert not seen[0, 11:].any()
    assert not seen[1, :7].any()
    assert seen[0, 2:5].max() < 0.5 * seen[0, 5:11].min()
    # Of a row with less than that, some weigh nothing.
    _, _, weights = draw_anchors(block, 12, 3, np.random.default_rng(0))
    assert (weights.reshape(2, 12, 3)[:, :, 0].sum(axis=1) == [9, 9]).all()


class Defined:
    """The loss by its definition: numpy, an anchor at a time, from the weights alone.

    Args:
        target: whose text model computes features and labels.
        made: the draft, for its sizes.
        block: the text.
    """

    def __init__(self, target: LoadedModel, student: BlockStudent, block: Block):
        self.made, self.block = student, block
        model: Any = target.model
        self.embedding = np.array(model.model.embed_tokens.weight, np.float64)
        head = np.array(head_of(target), np.float64)
        self.head = head
        seen = np.array(student.see(block), np.float64)
        self.features, after = seen[..., :-32], seen[..., -32:]
        self.log_p = self.log_softmax(after @ head.T)
        rng = np.random.default_rng((0, 7))
        self.anchors, _, weights = draw_anchors(block, 4, student.slots, rng)
        self.weights = weights.reshape(2, 4, student.slots)
        self.paces: list[np.ndarray] = []

    @staticmethod
    def log_softmax(z: np.ndarray) -> np.ndarray:
        z = z - z.max(-1, keepdims=True)
        scores: np.ndarray = z - np.log(np.exp(z).sum(-1, keepdims=True))
        return scores

    def logits(self, w: dict[str, np.ndarray], row: int, anchor: int) -> np.ndarray:
        args = self.made.head.args
        tokens = self.block.tokens[row]
        masks = [args.mask_token] * (SIZE - 1)
        block = self.embedding[[tokens[anchor], *masks]]
        before = self.features[row, :anchor]
        states = published.block_states(w, before, block)[SIZE - self.made.slots :]
        scores: np.ndarray = states @ self.head.T
        # What comes after the row's end weighs nothing.
        known = tokens[np.minimum(anchor + np.arange(self.made.slots), 15)]
        at = "candidate_selector."
        if at + "predecessor_codebook" in w:
            first = states @ w[at + "hidden_projection.weight"].T
            first = first * w[at + "predecessor_codebook"][known]
            scores = scores + first @ w[at + "successor_codebook"].T
        if args.markov_rank:
            first = w["markov_head.markov_w1.weight"][known]
            scores = scores + first @ w["markov_head.markov_w2.weight"].T
        return scores

    def loss(self, w: dict[str, np.ndarray], *, frozen: bool) -> float:
        """Weights by slots are those of the first call where they are ``frozen``."""
        sums, number = 0.0, 0
        for row, anchors in enumerate(self.anchors):
            for i, anchor in enumerate(anchors):
                counts = int(self.weights[row, i].sum())
                log_q = self.log_softmax(self.logits(w, row, anchor))[:counts]
                log_p = self.log_p[row, anchor : anchor + counts]
                p, best = np.exp(log_p), log_p.argmax(-1)
                surprise = -log_q[np.arange(counts), best]
                each = (1 - HARD) * (p * (log_p - log_q)).sum(-1) + HARD * surprise
                if not frozen:
                    c = 0.5 * np.exp(-surprise) + 0.5
                    self.paces.append(
                        np.array(
                            [
                                sum(np.prod(c[: m + 1]) for m in range(j, counts))
                                for j in range(counts)
                            ]
                        )
                    )
                sums += float((self.paces[number] * each).sum())
                number += 1
        return sums / float(self.weights.sum())


@FORMS
def test_gradients_are_those_of_the_definition(form: str) -> None:
    """A mask, a position, a label or a weight that is off by one gives others.

    Finite differences of the published forward, one block at a time, in float64.
    """
    target = small_target()
    student = student_of(target, form)
    block = two_rows()
    defined = Defined(target, student, block)
    flat: Any = tree_flatten(student.parameters)
    w = {name: np.array(array, np.float64) for name, array in flat}
    value = defined.loss(w, frozen=False)
    loss = ChunkedLoss(head_of(target), hard=HARD, chunk=10, slots=student.slots)
    trainer: Any = SimpleNamespace(student=student, _loss=loss, _dtype=mx.float32)
    trainer.parameters = student.parameters
    lesson = student.lesson(block, student.see(block), np.random.default_rng((0, 7)))
    divergence, gradients = Trainer._divergence(trainer, lesson, None)
    np.testing.assert_allclose(float(divergence.loss), value, rtol=1e-4)
    leaves: Any = tree_flatten(gradients)
    assert {name for name, _ in leaves} == w.keys()
    rng = np.random.default_rng(2)
    for name, gradient in leaves:
        direction = rng.normal(size=gradient.shape)
        step = 1e-5
        near = [
            defined.loss(w | {name: w[name] + s * direction}, frozen=True)
            for s in (step, -step)
        ]
        np.testing.assert_allclose(
            float((np.array(gradient) * direction).sum()),
            (near[0] - near[1]) / (2 * step),
            rtol=2e-3,
            atol=2e-5,
            err_msg=name,
        )


@FORMS
def test_training_computes_what_drafting_does(form: str) -> None:
    """The same states after an anchor, from caches that hold what is before it."""
    target = small_target("qwen3")
    student = student_of(target, form)
    block, head = two_rows(), student.head
    seen = student.see(block)
    lesson = student.lesson(block, seen, np.random.default_rng(0))
    states = np.array(lesson.states())[:, :32].reshape(2, -1, student.slots, 32)
    anchors, _, _ = draw_anchors(block, 4, student.slots, np.random.default_rng(0))
    head.bind(TargetEnds(target.model, target.name))
    for i in range(anchors.shape[1]):
        caches = make_batch_caches(head, 2, CacheOptions(max_write=16))
        at = anchors[:, i]
        for cache in caches:
            cache.prepare(lengths=at.tolist())
        head.absorb(seen[..., :-32], mx.array(block.tokens), caches)
        for cache in caches:
            cache.finalize()
        tokens = mx.array(block.tokens[np.arange(2), at])[:, None]
        wanted = head.states(head.inputs(tokens, SIZE), caches)
        np.testing.assert_allclose(
            states[:, i], np.array(wanted)[:, SIZE - student.slots :], atol=1e-5
        )


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_5"])
def test_every_architecture_begins(arch: str) -> None:
    """As its layers where those are of the kind that published heads have."""
    target = small_target(arch)
    student = make_block_student(target, (0, 5), widen=2, block_size=SIZE)
    again = make_block_student(target, (0, 5), widen=2, block_size=SIZE)
    assert same(student.parameters, again.parameters)
    q = layers_of(target.model)[5].get("self_attn", {}).get("q_proj", {}).get("weight")
    weight = student.head.layers[1].self_attn.q_proj.weight
    is_copied = q is not None and bool(mx.array_equal(weight, q))
    assert is_copied is (arch in ("llama", "qwen2", "qwen3"))
    block = two_rows()
    lesson = student.lesson(block, student.see(block), np.random.default_rng(0))
    assert bool(mx.isfinite(lesson.states()).all())


@pytest.mark.parametrize(
    "arch",
    ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "granitemoehybrid", "mamba"],
)
def test_any_target_that_takes_heads(arch: str) -> None:
    """Parts by the names that other models have; logits that its code scales."""
    model = build(arch, vocab_size=97, logits_scaling=4.0, lm_head_multiplier=0.5)
    target = LoadedModel(model, None, {}, arch)  # type: ignore[arg-type]
    student = make_block_student(target, (0, 1), block_size=SIZE)
    assert student.layers == ()
    block = two_rows()
    seen = student.see(block)
    logits = target.model(mx.array(block.tokens))
    np.testing.assert_allclose(seen[..., -32:] @ head_of(target).T, logits, atol=1e-4)
    lesson = student.lesson(block, seen, np.random.default_rng(0))
    assert bool(mx.isfinite(lesson.states()).all())
    with pytest.raises(UnsupportedModelError, match="make a block head"):
        make_student(target, (0,))


def test_a_head_with_a_norm_is_refused() -> None:
    """What is learnt would be normed twice where it drafts."""
    target = LoadedModel(build("plamo2"), None, {}, "plamo2")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="plamo2: distilling a draft of"):
        make_block_student(target, (0, 1), block_size=SIZE)


# -- whole runs --------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block") / "target"
    return write_target(folder, num_hidden_layers=6)


def block_options(target: Path, out: Path, **changes: Any) -> DistillOptions:
    """A run whose answers are there once they are written."""
    known = target.with_name("data")
    return options(target, out, kind="block", block_size=SIZE, data=known, **changes)


def test_a_run_learns_stops_goes_on_and_drafts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what a run in one piece gives; what comes out drafts."""
    wanted = block_options(target, tmp_path / "whole", bits=4)
    wanted = longer(wanted, 1800)
    card = run(wanted)
    history = card["training"]["history"]
    assert history[-1]["kl"] < 0.7 * history[0]["kl"]
    parts = replace(wanted, out=tmp_path / "parts", resume=True)
    usual: Callable[[Trainer], None] = Trainer.step

    def stopping(self: Trainer) -> None:
        if self.progress.step == 4:
            raise KeyboardInterrupt
        usual(self)

    monkeypatch.setattr(Trainer, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(parts)
    monkeypatch.undo()
    # Another head's checkpoint is refused.
    with pytest.raises(Exception, match="was made with form dspark, not dflash"):
        run(replace(parts, form="dflash"))
    assert run(parts)["training"]["steps"] == card["training"]["steps"] > 8
    files = [
        mx.load(str(tmp_path / n / "model.safetensors")) for n in ("whole", "parts")
    ]
    assert same(*files)
    assert "layers.0.mlp.gate_proj.scales" in files[0]
    check_drafts(target, wanted.folder)


def test_a_dflash_head_is_stored_and_measured(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On texts that are held out, and in rounds of the engine."""
    monkeypatch.setattr(job, "HOLDOUT_TOKENS", 16)
    holdout = tmp_path / "rivers.txt"
    holdout.write_text("Name a river.\n", "utf-8")
    wanted = block_options(
        target, tmp_path / "out", form="dflash", holdout=(str(holdout),), rounds=1
    )
    card = run(longer(wanted, 300))
    assert 0 <= card["agreement"]["rivers"]["agreement"] <= 1
    assert card["agreement"]["rivers"]["positions"] > SIZE
    assert [r["num_draft_tokens"] for r in card["rounds"]] == [4, 4]
    assert all(r["drafted"] > 0 for r in card["rounds"])
    config = json.loads((wanted.folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert "A DFlash head, which drafts" in (wanted.folder / "README.md").read_text()


def check_drafts(target: Path, folder: Path) -> None:
    """Its output is the target's, and much of what it drafts is accepted."""
    loaded = load(str(target), dtype="float32")
    draft = load_draft(str(folder), loaded, dtype="float32")
    head: Any = draft.model
    assert head.args.kind == "DSpark"
    assert draft.tokenizer is loaded.tokenizer
    # It is planned as what it is, not as layers, whose embedding is the target's too.
    sketch: Any = outline_draft(str(folder), outline(str(target), dtype="float32"))
    assert sketch.model.args.kind == "DSpark"
    prompts = [*QUESTIONS.splitlines()[:5], "Why?"]
    outputs = []
    for each in (None, draft):
        config = EngineConfig(num_draft_tokens=3 if each else 0)
        decoder = SpecDecoder(loaded, each, config=config)
        results = decoder.generate(prompts, SamplingParams(max_tokens=24))
        outputs.append([list(result.token_ids) for result in results])
    assert outputs[0] == outputs[1]
    assert decoder.stats.acceptance_rate > 0.15  # of a random head hardly any


def test_what_makes_no_sense_is_refused(target: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"kind": "head"}, "kind"),
        ({"form": "eagle"}, "form"),
        ({"block_size": 1}, "block_size"),
    ):
        with pytest.raises(ConfigError, match=message):
            options(target, tmp_path / "out", **changes)
