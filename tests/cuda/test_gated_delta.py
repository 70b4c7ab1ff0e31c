"""Gated delta layers by one kernel: its source, run on the CPU, and its reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_update

from specdec.cuda import gated_delta, gated_delta_source, kernels
from specdec.cuda.gated_delta import Form, Inputs, Log, Results
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant
from tests.models.test_chunked_delta import loop

PLAIN = Form(
    dtype=mx.float32,
    key_heads=2,
    repeats=2,
    key_size=32,
    value_size=32,
    kernel_size=4,
    eps=1e-6,
    grouped=False,
    types=(mx.float32, mx.float32, mx.float32),
)
HALF = replace(
    PLAIN,
    dtype=mx.bfloat16,
    grouped=True,
    key_size=96,
    repeats=3,
    kernel_size=3,
    types=(mx.float32, mx.bfloat16, mx.bfloat16),
)
# Tokens of a round, and those that each row keeps of it.
Rounds = tuple[tuple[int, list[int]], ...]
ROUNDS: Rounds = ((1, [0, 1]), (5, [2, 5]), (1, [1, 0]), (9, [9, 0]), (16, [15, 3]))


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, gated_delta._kernel, kernels.cuda_kernel)


def agrees(form: Form, rounds: Rounds) -> bool:
    """Whether the kernel comes to what the reference does, round by round."""
    rows = len(rounds[0][1])
    weights, _, window, state = gated_delta.drawn(form, rows, 1)
    past: list[mx.array | Log] = [window] * 2
    before, kept = [state] * 2, None
    for i, (tokens, keeps) in enumerate((*rounds, (2, rounds[0][1]))):
        inputs = gated_delta.drawn(form, rows, tokens, seed=i)[1]
        found: list[Results] = [
            how(form, weights, inputs, past[n], before[n], kept)
            for n, how in enumerate((gated_delta.scan, gated_delta.reference))
        ]
        if not gated_delta.alike(form, *found):
            return False
        past[:], before = [f.log for f in found], [f.before for f in found]
        kept = mx.array(keeps)
    return True


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", [PLAIN, HALF])
def test_rounds_by_the_kernel(form: Form) -> None:
    """Of one token and of more than a tile, of which rows keep all, some, or none."""
    assert agrees(form, ROUNDS)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
def test_a_token_has_the_same_bits_whatever_is_computed_with_it() -> None:
    """Alone, after others of its round, and after tokens that are done again."""
    weights, inputs, window, state = gated_delta.drawn(HALF, 2, 7)

    def part(start: int, stop: int, row: int | None = None) -> Inputs:
        rows = slice(None) if row is None else slice(row, row + 1)
        return Inputs(*(a[rows, start:stop] for a in inputs))

    first = gated_delta.scan(HALF, weights, part(0, 5), window, state)
    kept = [2, 4]
    for row, count in enumerate(kept):
        past, held, each = window[row : row + 1], state[row : row + 1], []
        for i in (*range(count), 5, 6):
            found = gated_delta.scan(HALF, weights, part(i, i + 1, row), past, held)
            past, held = found.log.joined[:, 1:], found.after
            each.append(found.y)
        alone = mx.concatenate(each, axis=1)
        ours = gated_delta.scan(
            HALF, weights, part(5, 7), first.log, state, mx.array(kept)
        )
        assert mx.array_equal(first.y[row, :count], alone[0, :count])
        assert mx.array_equal(ours.y[row], alone[0, count:])
        assert mx.array_equal(ours.after[row], held[0])


#: Lengths of prompts around the kernel's tiles.
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
def test_a_prompt_has_the_same_bits_in_any_parts() -> None:
    """Rows of any length beside each other, in one launch or in steps of 7 and 64.

    The bits of a row depend neither on the step, nor on the rows beside it, nor on
    where a stored prefix ends.
    """
    tokens, rows = max(LENGTHS), len(LENGTHS)
    form = replace(PLAIN, key_heads=1)
    weights, inputs, window, state = gated_delta.drawn(form, rows, tokens)
    whole = gated_delta.scan(
        form, weights, inputs, window, state, None, mx.array(LENGTHS)
    )
    for row, length in enumerate(LENGTHS):
        assert not mx.any(whole.y[row, length:]).item()
        past, held, each = window[row : row + 1], state[row : row + 1], []
        step = 7 if row % 2 else 64
        for begin in range(0, length, step):
            stop = min(length, begin + step)
            part = Inputs(*(a[row : row + 1, begin:stop] for a in inputs))
            found = gated_delta.scan(form, weights, part, past, held)
            past, held = found.log.joined[:, stop - begin :], found.after
            each.append(found.y)
        joined = whole.log.joined[row, length : length + form.kernel_size - 1]
        assert mx.array_equal(mx.concatenate(each, axis=1)[0], whole.y[row, :length])
        assert mx.array_equal(past[0], joined)
        assert mx.array_equal(held[0], whole.after[row])


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", [PLAIN, HALF])
def test_prompts_by_the_kernel(form: Form) -> None:
    """Of more than two tiles, with rows that are shorter, and one without tokens."""
    weights, inputs, window, state = gated_delta.drawn(form, 4, 37)
    given = form, weights, inputs, window, state, None, mx.array([37, 16, 0, 21])
    found, wanted = gated_delta.scan(*given), gated_delta.reference(*given)
    assert gated_delta.alike(form, found, wanted, log=False)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("alike", [0.0, 0.8, 0.99, 1.0])
def test_a_prompt_is_the_rule_in_float64(alike: float) -> None:
    """With keys as alike as in real text, gates 0 and 1 among others, and beta to 1."""
    weights, inputs, window, state = gated_delta.drawn(PLAIN, 2, 129)
    first = inputs.x[:, :1]
    a = mx.where(mx.random.uniform(shape=inputs.a.shape) < 0.2, 1e4, inputs.a)
    a = mx.where(mx.random.uniform(shape=a.shape) < 0.2, -1e4, a)
    inputs = inputs._replace(x=alike * first + (1 - alike) * inputs.x, a=a)
    given = PLAIN, weights, inputs, window, state
    q, k, v = gated_delta._convolved(
        PLAIN, weights, mx.concatenate([window, inputs.x], axis=1)
    )
    decay = compute_g(weights.a_log, a, weights.dt_bias)
    assert mx.any(decay == 0).item()
    assert mx.any(decay == 1).item()
    rule = q, k, v, decay, mx.sigmoid(inputs.b), state
    y, after = loop(*(np.array(each, dtype=float) for each in rule))

    def exact(*_: mx.array) -> tuple[mx.array, mx.array]:
        return mx.array(y.astype(np.float32)), mx.array(after.astype(np.float32))

    wanted = gated_delta.reference(*given, rule=exact)
    assert gated_delta.alike(PLAIN, gated_delta.scan(*given), wanted)


SYNC = "__syncthreads();\n"
PADDED = {
    "another row's length": ("OWN", "lengths[row *", "lengths[0 *"),
    "padding counts": ("SOURCE", "kept + own_tokens;", "kept + S;"),
    "padding is left": ("SOURCE", "i < S * Dv", "i < 0"),
    "padding of another head": ("SOURCE", "head) * Dv + i %", "group) * Dv + i %"),
    "the state is not carried": ("SOURCE", "write(after);", "if (S < 9) write(after);"),
    "decays in another order": ("SOURCE", "decays[thr", "decays[count - 1 - thr"),
}  # fmt: skip


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", [PLAIN, HALF])
def test_the_proof_holds(form: Form) -> None:
    """A proof that no kernel passes leaves every prompt to the loop."""
    assert gated_delta._agrees(form)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", PADDED)
def test_faults_with_padding_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what proves the kernel before it is used, too."""
    plant(monkeypatch, gated_delta_source, *PADDED[name])
    with suppress(KernelFault):
        assert not gated_delta._agrees(PLAIN)


FAULTS = {
    "another row's count": ("KEPT", "kept_of[row *", "kept_of[0 *"),
    "gates of another head": ("NOTED", "HV + head", "HV + group"),
    "the state too late": ("MIDDLE", "begin + t == kept", "begin + t + 1 == total"),
    "an input too late": ("SOURCE", "at - kept - WINDOW;", "at - kept - K;"),
    "no window": ("SOURCE", "token > 0 ? j == WINDOW : token == 0", "j == WINDOW"),
    "values of another head": ("SOURCE", "V_STEP + of * Dv + d\n", "V_STEP + d\n"),
    "a rate of another head": ("SOURCE", "a_log[head *", "a_log[group *"),
    "half a row": ("SOURCE", "known = sum_of_row(sum,", "known = sum_of_row(key[0],"),
    "tiles too soon": ("SOURCE", f"- begin);\n    {SYNC}", "- begin);\n"),
    "norms too soon": ("SOURCE", f"{SYNC}\n    for (int i", "for (int i"),
    "the rule too soon": ("SOURCE", f"{SYNC}\n    // The delta rule", "// The rule"),
    "results too soon": ("SOURCE", f"{SYNC}\n    // The gated norm", "// The norm"),
}  # fmt: skip


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_kernel_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows that keep different numbers of tokens, in more than a tile."""
    weights, first, window, state = gated_delta.drawn(PLAIN, 2, 9)
    second, kept = gated_delta.drawn(PLAIN, 2, 20, seed=1)[1], mx.array([9, 3])
    began = gated_delta.reference(PLAIN, weights, first, window, state)
    given = PLAIN, weights, second, began.log, state, kept
    plant(monkeypatch, gated_delta_source, *FAULTS[name])
    with suppress(KernelFault):
        found = gated_delta.scan(*given)
        assert not gated_delta.alike(PLAIN, found, gated_delta.reference(*given))


def test_the_reference_is_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row as if it were alone, and had only ever been given what it kept."""
    weights, first, window, state = gated_delta.drawn(PLAIN, 6, 5)
    second = gated_delta.drawn(PLAIN, 6, 2, seed=1)[1]
    kept = mx.arange(6)
    began = gated_delta.reference(PLAIN, weights, first, window, state)
    found = gated_delta.reference(PLAIN, weights, second, began.log, state, kept)
    monkeypatch.setattr(gated_delta, "scan", gated_delta.reference)
    through = gated_delta.again(PLAIN, weights, began.log, state, kept)
    for row in range(6):
        own = [
            mx.concatenate([a[row : row + 1, :row], b[row : row + 1]], axis=1)
            for a, b in zip(first, second, strict=True)
        ]
        joined = mx.concatenate([window[row : row + 1], own[0]], axis=1)
        q, k, v = gated_delta._convolved(PLAIN, weights, joined)
        gates = own[3], own[2], weights.a_log, weights.dt_bias
        held = state[row : row + 1]
        y, after = gated_delta_update(q, k, v, *gates, held, use_kernel=False)
        z = own[1].reshape(y.shape)
        normed = mx.fast.rms_norm(y, weights.norm, PLAIN.eps)
        wanted = (z * mx.sigmoid(z) * normed)[:, row:].reshape(1, 2, -1)
        assert mx.allclose(found.y[row], wanted[0], rtol=1e-6, atol=1e-7)
        assert mx.array_equal(found.after[row], after[0])
        assert mx.array_equal(found.log.joined[row], joined[0, row:])
        if row:
            q, k, v = (a[:, :row] for a in (q, k, v))
            gates = own[3][:, :row], own[2][:, :row], *gates[2:]
            _, held = gated_delta_update(q, k, v, *gates, held, use_kernel=False)
        assert mx.array_equal(through[1][row], held[0])
        assert mx.array_equal(through[0][row], joined[0, row : row + 3])
