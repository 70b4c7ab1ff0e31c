"""Hidden states that a drafter asks for are those of a plain forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec import UnsupportedModelError
from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.models.runner import ModelRunner
from specdec.spec_decode import ChainDrafter, Drafter, Round
from specdec.spec_decode.commit import Accepted
from tests.models import architectures
from tests.plain import AT_ONCE, BEHIND, drafts_of, exact, greedy
from tests.spec_decode.by_hand import build, layer_outputs
from tests.spec_decode.repetitive import Knowing, KnowingRows, make_prompts

WANTED = (1, -1, 0)


class Listening(Knowing):
    """Proposes what the target will choose, but for every third token, and listens.

    ``heard[prompt]`` maps positions to the hidden state of the token there.
    """

    def __init__(
        self, whole: dict[tuple[int, ...], list[int]], layers: tuple[int, ...] = WANTED
    ):
        super().__init__(whole, lambda at, t: t if at % 3 else (t + 1) % 97)
        self.hidden_layers = layers
        self.heard: dict[tuple[int, ...], dict[int, Any]] = {}

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> ListeningRows:
        return ListeningRows(self, [tuple(p) for p in prompts])


class ListeningRows(KnowingRows):
    def __init__(self, drafter: Listening, prompts: list[tuple[int, ...]]):
        super().__init__(drafter, prompts)
        self.drafter = drafter
        self.seen = [0] * len(prompts)
        for prompt in prompts:
            drafter.heard[prompt] = {}

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        assert self.drafter.hidden_layers
        states, after = np.array(hidden), np.array(following)
        for i, n in enumerate(lengths):
            heard = self.drafter.heard[self.prompts[i]]
            if n:
                tokens = self.drafter.whole[self.prompts[i]]
                first = self.seen[i] + 1
                assert after[i, :n].tolist() == tokens[first : first + n]
            heard.update(
                zip(range(self.seen[i], self.seen[i] + n), states[i], strict=False)
            )
            self.seen[i] += n

    def commit(self, round_: Round, accepted: Accepted) -> None:
        if not self.drafter.hidden_layers:
            assert accepted.hidden is None
            return
        assert accepted.hidden is not None
        arrays: list[Any] = [round_.lengths, accepted.kept]
        for i, (n, kept) in enumerate(zip(*(a.tolist() for a in arrays), strict=True)):
            # The inputs: the last committed token, then what was accepted.
            states = np.array(accepted.hidden[i])[:kept]
            self.drafter.heard[self.prompts[i]].update(
                zip(range(n - 1, n - 1 + kept), states, strict=True)
            )


def outputs_of(model: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): [*p, *greedy(model, p, 14)] for p in make_prompts()}


def run(model: Any, backend: BackendDefaults, drafter: Drafter) -> None:
    prompts = make_prompts()
    rows = exact(
        model, None, prompts, 14, batch_size=3, backend=backend, drafter=drafter
    )
    drafted, accepted = drafts_of(rows)
    assert 0 < accepted < drafted


def six_layers(model: Any, tokens: mx.array) -> list[mx.array]:
    return layer_outputs(model, range(6), tokens)


def hybrid_layers(model: Any, tokens: mx.array) -> list[mx.array]:
    """What the layers of a qwen3_5 put out, by hand."""
    trunk, outputs = model.language_model.model, []
    h = trunk.embed_tokens(tokens)
    for layer in trunk.layers:
        h = layer(h, None if layer.is_linear else "causal", None)
        outputs.append(h)
    return outputs


def check(
    model: Any,
    drafter: Listening,
    outputs_of_layers: Callable[[Any, mx.array], list[mx.array]] = six_layers,
) -> None:
    """Every position but the last, which was never fed."""
    for prompt, heard in drafter.heard.items():
        tokens = drafter.whole[prompt]
        assert set(range(len(tokens) - 1)) <= set(heard)
        outputs = outputs_of_layers(model, mx.array([tokens]))
        wanted = [outputs[i] for i in drafter.hidden_layers]
        expected = np.array(mx.concatenate(wanted, axis=-1)[0])
        for position in range(len(tokens) - 1):
            assert np.allclose(heard[position], expected[position], atol=1e-3), position


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", AT_ONCE),
        ("llama-sliding", BEHIND),
        ("qwen2", BEHIND),
        ("qwen3", AT_ONCE),
        ("gemma3", AT_ONCE),
        ("gemma3", BEHIND),
    ],
)
def test_states_of_prompts_and_rounds_equal_a_plain_forward(
    name: str, backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    """For rows that join too."""
    model = build(tiny_model, name)
    drafter = Listening(outputs_of(model))
    run(model, backend, drafter)
    check(model, drafter)


def test_states_of_a_hybrid_equal_a_plain_forward() -> None:
    """Layers of a twin that keeps rows are listened to, not the model's own."""
    model = architectures.build("qwen3_5", vocab_size=97)
    drafter = Listening(outputs_of(model), (0, -1))
    run(model, AT_ONCE, drafter)
    check(model, drafter, hybrid_layers)


@pytest.mark.parametrize(
    ("layers", "backend"),
    [
        (((2, -1), (0,)), AT_ONCE),
        (((0,), (0, 1)), BEHIND),
        (((1,), ()), BEHIND),
        (((), (-2, 3)), AT_ONCE),
    ],
)
def test_in_a_chain_each_is_shown_its_own_layers(
    layers: tuple[tuple[int, ...], tuple[int, ...]],
    backend: BackendDefaults,
    tiny_model: Callable[..., Any],
) -> None:
    """Prompts and rounds; who asked for none gets none."""
    model = build(tiny_model, "llama")
    whole = outputs_of(model)
    both = [Listening(whole, each) for each in layers]
    run(model, backend, ChainDrafter(*both))
    for drafter in both:
        if drafter.hidden_layers:
            check(model, drafter)


def test_the_models_own_layers_stay(tiny_model: Callable[..., Any]) -> None:
    model = build(tiny_model, "llama")
    layers = list(model.layers)
    runner = ModelRunner(model, "target", EngineConfig(), AT_ONCE)
    assert runner.recording(()) is runner
    recording = runner.recording((0,))
    assert list(model.layers) == layers
    assert runner.recorder is None
    assert recording.vocab_size == runner.vocab_size
    with pytest.raises(
        UnsupportedModelError, match=r"has 6 layers: .* asks for layers 6"
    ):
        runner.recording((6,))


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("afm7", "mine: reading hidden states of afm7 models is not supported"),
        ("gemma3n", "mine: layer 0 does not put out one state for each token"),
    ],
)
def test_layers_that_cannot_be_listened_to_are_refused(arch: str, message: str) -> None:
    """Before any work: their states would be of other layers, or of other shapes."""
    model = architectures.build(arch)
    runner = ModelRunner(model, "mine", EngineConfig(), AT_ONCE)
    with pytest.raises(UnsupportedModelError, match=message):
        runner.recording((0,))
