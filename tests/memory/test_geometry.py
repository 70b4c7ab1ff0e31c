"""What is computed from shapes is what the caches allocate, for every kind of cache."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec import backend
from specdec.backend import BackendDefaults
from specdec.cache import CacheOptions
from specdec.config import EngineConfig
from specdec.memory import MemoryPlan, RowNeeds
from specdec.memory.plan import UNDER_WAY
from specdec.memory.planning import geometry_of
from specdec.models.runner import ModelRows, ModelRunner, cache_options
from specdec.sampling_params import SamplingParams
from specdec.tools.bench.models import undrawn_model

from ..cache.small_models import MODELS, ChunkedModel
from ..models.architectures import build as architecture

TinyModel = Callable[..., nn.Module]
CPU = backend._DEFAULTS["cpu"]
GPU = backend.BackendDefaults("cuda", read_bucket=256, static_shapes=True)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}

# Names that small_models.MODELS does not have, with their models.
CHUNKED = "chunked"
PACKABLE = ("full", "sliding", "gemma3", "mistral", CHUNKED)


def build(tiny_model: TinyModel, name: str, head_dim: int = 8) -> nn.Module:
    if name == CHUNKED:
        return ChunkedModel(head_dim=head_dim)
    arch, arguments = MODELS[name]
    if head_dim != 8:
        arguments = {**arguments, "head_dim": head_dim}
    return tiny_model(arch, **arguments)


def test_which_models_are_written_in_place() -> None:
    """Others may copy their caches, which plans count."""
    found = {}
    for arch, options in (("llama", {}), ("llama", {"kv_bits": 8}), ("gemma2", {})):
        model = architecture(arch, head_dim=64)
        model.set_dtype(mx.bfloat16)
        config = {"head_dim": 64, "num_attention_heads": 4, "hidden_size": 256}
        cache = CacheOptions(max_write=2, kv_bits=options.get("kv_bits"))
        for kernels in (False, True):
            geometry = geometry_of(model, config, "it", cache, kernels=kernels)
            found[arch, bool(options), kernels] = geometry.in_place
    assert [key for key, in_place in found.items() if in_place] == [
        ("llama", False, True)
    ]


def check_run(
    model: nn.Module,
    config: EngineConfig,
    backend_: BackendDefaults,
    lengths: list[int],
    rounds: int,
) -> None:
    """Follow a run, comparing bytes after every forward."""
    geometry = geometry_of(model, HEADS, "it", cache_options(config, backend_))
    runner = ModelRunner(model, "it", config, backend_)
    written, max_length = 3, max(lengths) + rounds * 3
    rows = runner.rows(
        [[5] * n for n in lengths], max_round=written, max_length=max_length
    )
    # The bound that the runner gives its caches; padding of prefill may pass it.
    limit = runner._bound(max(max_length, *(runner._padded(n) for n in lengths)))
    step, done = config.prefill_step_size, 0

    def expect(length: int, max_write: int) -> None:
        sizes = geometry.layer_bytes(
            len(lengths), length, max_length=limit, max_write=max_write
        )
        assert nbytes(rows) == sum(sizes)

    for _ in rows.prefill():
        done += runner.chunk(max(lengths) - done)
        expect(done, max(step, written))
    longest = max(lengths)
    for _ in range(rounds):
        rows.forward(mx.full((len(lengths), written), 7))
        longest += written
        # Linear capacity stays once it is there, for padding too.
        expect(max(longest, done), written)


def nbytes(rows: ModelRows) -> int:
    mx.eval([c.state for c in rows._caches])
    return rows.nbytes


@pytest.mark.parametrize("lengths", [[70], [300, 11, 257]], ids=str)
@pytest.mark.parametrize("backend_", [CPU, GPU], ids=["bucket-1", "bucket-256"])
@pytest.mark.parametrize("name", [*MODELS, CHUNKED])
def test_dense_caches(
    tiny_model: TinyModel, name: str, backend_: BackendDefaults, lengths: list[int]
) -> None:
    """A layer, a head, a window or an edge counted wrong, for any kind of layer."""
    config = EngineConfig(prefill_step_size=64)
    check_run(build(tiny_model, name), config, backend_, lengths, rounds=6)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
@pytest.mark.parametrize("name", PACKABLE)
def test_quantized_caches(
    tiny_model: TinyModel, name: str, bits: int, group_size: int
) -> None:
    """Packed caches, full, in windows and in chunks, grown past 256 slots."""
    config = EngineConfig(prefill_step_size=64, kv_bits=bits, kv_group_size=group_size)
    check_run(build(tiny_model, name, 64), config, CPU, [250, 3], rounds=4)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_caches_of_a_bounded_size(tiny_model: TinyModel, kv_bits: int | None) -> None:
    """``max_kv_size``: a ring in place of a full cache, its sinks included."""
    config = EngineConfig(prefill_step_size=32, max_kv_size=40, kv_bits=kv_bits)
    check_run(build(tiny_model, "full", 64), config, CPU, [100, 90], rounds=5)


@pytest.mark.parametrize("start", [100, 10_000])
def test_caches_that_are_quantized_later(tiny_model: TinyModel, start: int) -> None:
    """Dense before, packed after: each is known."""
    model = build(tiny_model, "full", 64)
    config = EngineConfig(prefill_step_size=64, kv_bits=8, quantized_kv_start=start)
    geometry = geometry_of(model, HEADS, "it", cache_options(config, CPU))
    runner = ModelRunner(model, "it", config, CPU)
    rows = runner.rows([[5] * 128], max_round=1, max_length=140)
    for done, _ in enumerate(rows.prefill(), 1):
        sizes = geometry.layer_bytes(
            1, 64 * done, max_length=140, dense=64 * done < start
        )
        assert nbytes(rows) == sum(sizes)


def test_nothing_is_computed(tiny_model: TinyModel) -> None:
    """Reading a geometry must not evaluate a model's weights."""
    mx.synchronize()
    before = mx.get_active_memory()
    from mlx_lm.models import llama

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=8192,
            num_hidden_layers=80,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            vocab_size=128256,
            tie_word_embeddings=False,
        )
    )
    found = geometry_of(model, {"num_attention_heads": 64, "hidden_size": 8192}, "70B")
    assert found.num_parameters == 70_553_706_496
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.parametrize("layers", [2, 12])
def test_what_is_unpacked_for_attention(tiny_model: TinyModel, layers: int) -> None:
    """Dense keys and values, of as many layers as may be under way."""
    model = tiny_model("llama", head_dim=32, num_hidden_layers=layers)
    packed, unpacking = (
        geometry_of(
            model,
            HEADS,
            "it",
            CacheOptions(max_write=4, kv_bits=8, kv_group_size=32, unpacks=unpacks),
        )
        for unpacks in (False, True)
    )
    dense = geometry_of(model, HEADS, "it", CacheOptions(max_write=4)).caches[0]
    assert packed.column_bytes == packed.caches[0].slot_bytes
    few = unpacking.workspace_bytes(3, 2, 50, 1) - packed.workspace_bytes(3, 2, 50, 1)
    assert few == 3 * 50 * dense.slot_bytes
    more = unpacking.workspace_bytes(3, 2, 50) - packed.workspace_bytes(3, 2, 50)
    assert more == 3 * 50 * min(layers, UNDER_WAY) * dense.slot_bytes


#: GB beside weights at the fullest moment of prefills, and of that the caches, by rows
#: and padded tokens: the most of those in benchmarks/results/prefill-h100.md and
#: benchmarks/results/prefill-h200.md.
MEASURED = {
    "qwen3.5-4b": {
        (1, 256): (0.608, 0.060),
        (8, 256): (1.430, 0.479),
        (32, 256): (3.686, 1.917),
        (1, 2048): (1.204, 0.119),
        (8, 1024): (2.660, 0.681),
        (8, 8192): (3.620, 2.560),
    },
    "8b": {
        (1, 256): (1.439, 0.034),
        (8, 256): (2.248, 0.268),
        (32, 256): (5.469, 1.074),
        (1, 2048): (2.085, 0.268),
        (8, 1024): (3.439, 1.074),
        (8, 8192): (3.775, 8.590),
    },
    "qwen3.5-35b-a3b": {
        (1, 64): (0.066, 0.070),
        (8, 64): (0.489, 0.557),
        (32, 64): (1.297, 2.228),
        (1, 2048): (0.478, 0.106),
        (8, 1024): (1.540, 0.683),
        (32, 1024): (2.986, 2.732),
        (8, 8192): (2.491, 1.857),
    },
}


@pytest.mark.parametrize("shape", MEASURED)
def test_prefill_on_a_gpu_holds_what_is_planned(shape: str) -> None:
    """Unpacked matrices that are left out pass a limit; ten layers of them fill it."""
    model, config = undrawn_model(shape, packing=(64, 4))
    model.set_dtype(mx.bfloat16)
    cuda = backend.defaults("cuda")
    options = cache_options(EngineConfig(), cuda)
    target = geometry_of(model, config, shape, options, kernels=True)
    plan = MemoryPlan(target=target, prefill_step_size=512, backend=cuda)
    for (rows, tokens), (activations, caches) in MEASURED[shape].items():
        _, prefill, _ = plan.moments(
            [RowNeeds(tokens, SamplingParams(max_tokens=64))] * rows
        )
        planned = (prefill.total - plan.weight_bytes) / 1e9
        assert activations + caches < planned < 2.2 * (activations + caches) + 0.1
