"""What every rank of the tests runs, under a launcher.

Rank 0 prints a line for each check that holds, and the error that ends the run: the
last act plants a fault into the other rank.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from specdec import (
    ConfigError,
    EngineConfig,
    GenerationResult,
    RankError,
    Ranks,
    SamplingParams,
    SpecDecoder,
    UnsupportedModelError,
    backend,
)
from specdec.engine.led import follow
from specdec.engine.session import Session
from specdec.models import LoadedModel
from specdec.models.compiled import CompiledForwards
from specdec.models.loading import take_shard
from specdec.models.sharding import SummedLinear
from specdec.parallel import Follower, Leader
from specdec.request import Request
from specdec.spec_decode import Drafter, DraftRows, Proposals, Round
from specdec.spec_decode.commit import Accepted
from tests.byte_tokenizer import byte_tokenizer
from tests.models.architectures import build
from tests.plain import BEHIND

VOCABULARY = 280
PROMPTS = [[(7 * i + (j % 6) ** 2) % 250 for j in range(4 + 8 * i)] for i in range(5)]
#: Greedy and sampled, short and long: rows come and go at different times.
PARAMS = [
    SamplingParams(max_tokens=5 + 6 * (i % 3), temperature=0.8 * (i % 2), seed=i)
    for i in range(5)
]


def model_of(arch: str, **changes: Any) -> nn.Module:
    """A small random model; mlx-lm shards a hybrid's head, if it has one."""
    tied = arch != "qwen3_5"
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    return build(arch, **sizes, tie_word_embeddings=tied, **changes)


def near(arch: str, noise: float, **changes: Any) -> LoadedModel:
    """A model that often proposes what the target chooses; the whole on every rank."""
    model: Any = model_of(arch, **changes)
    part = model.language_model if "language_model" in model else model
    embedding = part.model.embed_tokens
    drawn = mx.random.normal(embedding.weight.shape, key=mx.random.key(1))
    embedding.weight = embedding.weight + noise * drawn
    return loaded(model, "near")


def loaded(model: nn.Module, name: str, ranks: Ranks | None = None) -> LoadedModel:
    config = {"max_position_embeddings": 4096, "num_attention_heads": 4}
    return LoadedModel(model, byte_tokenizer(), config, name, ranks)


class Reading(Drafter):
    """Proposes what the target's head would make of its last layer's output."""

    def __init__(self, table: mx.array):
        self.hidden_layers = (-1,)
        self.table = table

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> ReadingRows:
        return ReadingRows(self.table, len(prompts))


class ReadingRows(DraftRows):
    def __init__(self, table: mx.array, num_rows: int):
        self.table = table
        self.hidden = mx.zeros((num_rows, table.shape[1]))

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        self._take(hidden, mx.array(list(lengths)))

    def commit(self, round_: Round, accepted: Accepted) -> None:
        assert accepted.hidden is not None
        self._take(accepted.hidden, accepted.kept)

    def _take(self, hidden: mx.array, count: mx.array) -> None:
        at = mx.maximum(count - 1, 0)[:, None, None]
        last = mx.take_along_axis(hidden, at, axis=1)[:, 0]
        self.hidden = mx.where((count > 0)[:, None], last, self.hidden)

    def propose(self, round_: Round) -> Proposals:
        token = mx.argmax(self.hidden @ self.table.T, axis=-1)[:, None]
        shape = (token.shape[0], round_.num_draft_tokens)
        return Proposals(mx.broadcast_to(token, shape).astype(mx.int32))

    def filter(self, rows: Sequence[int]) -> None:
        self.hidden = self.hidden[mx.array(list(rows))]

    def extend(self, other: ReadingRows) -> None:
        self.hidden = mx.concatenate([self.hidden, other.hidden])


class Shown:
    """What rank 0 has found out, line by line."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def __call__(self, what: str, *, holds: bool = True) -> None:
        if self.ranks.leads:
            print(f"{what}: {'holds' if holds else 'FAILS'}", flush=True)


def tokens(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def bitwise(model: nn.Module, ranks: Ranks) -> bool:
    """Whether a forward's logits have the same bits on all ranks."""
    logits = model(mx.array([PROMPTS[3]]), cache=make_prompt_cache(model))
    each = mx.distributed.all_gather(logits, group=ranks.group)
    return bool(mx.all(each[:1].view(mx.uint32) == each.view(mx.uint32)).item())


def collectives(model: nn.Module) -> int:
    """How many collectives a forward has."""
    with (
        patch.object(mx.distributed, "all_sum", wraps=mx.distributed.all_sum) as sums,
        patch.object(mx.distributed, "all_gather") as gathers,
    ):
        mx.eval(model(mx.array([PROMPTS[3]]), cache=make_prompt_cache(model)))
    return int(sums.call_count + gathers.call_count)


def head_shape(model: Any) -> Any:
    """Of what a draft may be lent."""
    head = model.get("language_model", model).get("lm_head")
    return head and head.weight.shape


def compare(
    shown: Shown,
    arch: str,
    what: str,
    config: EngineConfig,
    *,
    draft: Any,
    twice: bool = False,
    **changes: Any,
) -> None:
    """A sharded run, and on rank 0 that of the whole model."""
    ranks = shown.ranks
    whole, mine = (model_of(arch, **changes) for _ in range(2))
    take_shard(mine.eval(), {}, ranks, arch)
    training = [path for path, part in mine.named_modules() if part.training]
    shown(f"{arch} trains nowhere", holds=not training)
    shown(f"{arch} logits of all ranks", holds=bitwise(mine, ranks))
    layers = len(make_prompt_cache(mine))
    shown(f"{arch} sums twice a layer", holds=collectives(mine) == 2 * layers)
    shown(f"{arch} head", holds=head_shape(mine) == head_shape(whole))
    made: dict[str, Any] = {}
    if isinstance(draft, str):
        made["drafter"] = draft
    elif isinstance(draft, LoadedModel):
        made["draft"] = draft
    else:
        embed: Any = whole["model"]["embed_tokens"]
        made["drafter"] = lambda context: Reading(embed.weight)
    decoder = SpecDecoder(loaded(mine, arch, ranks), config=config, **made)
    if decoder.follow():
        return
    for again in (False, True)[: 1 + twice]:
        results = decoder.generate(PROMPTS, PARAMS)
        single = SpecDecoder(loaded(whole, arch), config=config, **made)
        wanted = single.generate(PROMPTS, PARAMS)
        shown(f"{arch} {what}", holds=tokens(results) == tokens(wanted))
        if again:
            reused = sum(result.prefix_tokens for result in results)
            shown(f"{arch} prefixes", holds=reused > 0)
    drafted = sum(result.drafted for result in results)
    accepted = sum(result.accepted for result in results)
    shown(f"{arch} drafted", holds=drafted > 0)
    shown(f"{arch} accepted", holds=draft == "ngram" or accepted > 0)
    plans = [d._preflight and d._preflight.plan for d in (decoder, single)]
    if None not in plans:
        mine_bytes, all_bytes = (p.target.weight_bytes for p in plans if p)
        shown(f"{arch} bytes of a rank", holds=mine_bytes < 0.8 * all_bytes)
    ranks.release()


def loading(shown: Shown, folder: Path) -> None:
    """A rank never holds the whole: tensors are read one after the other."""
    model, config = load_model(folder / "wide", lazy=True)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    take_shard(model, config, shown.ranks, "wide")
    held = mx.get_peak_memory() - before
    size = (folder / "wide" / "model.safetensors").stat().st_size
    shown("loading a shard", holds=held < 0.8 * size)


def refusals(shown: Shown, folder: Path) -> None:
    """What cannot be sharded is refused by name, and nothing of it is loaded."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were loaded")

    cases: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
        ("no-shard", UnsupportedModelError, "cannot shard gemma3_text models", {}),
        (
            "odd-heads",
            UnsupportedModelError,
            "6 attention heads and 3 key-value heads",
            {},
        ),
        ("llama", ConfigError, "adapter_path does not", {"adapter_path": "x"}),
        (
            "llama",
            ConfigError,
            "prefix_cache does not",
            {"config": EngineConfig(prefix_cache=str(folder / "kept"))},
        ),
    ]
    for name, kind, text, options in cases:
        try:
            with patch("specdec.decoder.load", never):
                SpecDecoder.from_pretrained(
                    folder / name, draft="none", ranks=shown.ranks, **options
                )
        except kind as error:
            named = kind is ConfigError or name in str(error)
            shown(f"refusal: {text}", holds=named and text in str(error))


def conversation(shown: Shown, folder: Path) -> None:
    """A server, cancels and time limits: what comes from outside reaches all ranks."""
    decoder = SpecDecoder.from_pretrained(
        folder / "llama",
        folder / "llama",
        config=EngineConfig(batch_size=2, num_draft_tokens="auto"),
        ranks=shown.ranks,
    )
    if decoder.follow():
        return
    whole = SpecDecoder.from_pretrained(folder / "llama", draft="none")

    async def talk() -> None:
        async with decoder.serve() as server:
            long = SamplingParams(max_tokens=300, stop_token_ids=())
            short = SamplingParams(max_tokens=9)
            cut, *answers = await asyncio.gather(
                server.generate("Hello", long, timeout=0.3),
                *(server.generate(text, short) for text in ("a", "b", "c")),
            )
            shown("a cut", holds=cut.finish_reason in ("cancelled", "length", "stop"))
            wanted = whole.generate(["a", "b", "c"], short)
            shown("a server", holds=tokens(answers) == tokens(wanted))

    asyncio.run(talk())
    session = decoder.session()
    first = session.add("Hello", SamplingParams(max_tokens=50))
    drawn = SamplingParams(max_tokens=7, min_tokens=7, temperature=1.0)
    second = session.add("abc", drawn)
    done: dict[int, GenerationResult] = {}
    steps = 0
    while session.busy:
        for event in session.step():
            if event.result is not None:
                done[event.index] = event.result
        steps += 1
        if steps == 4:
            session.cancel(first)
    shown("a cancel", holds=done[first].finish_reason == "cancelled")
    shown("a random seed", holds=len(done[second].token_ids) == 7)
    shown.ranks.release()


# -- faults -------------------------------------------------------------------------


class Faulty:
    """Sessions of rank 1, each with the next of the faults."""

    def __init__(
        self, decoder: SpecDecoder, faults: Sequence[Callable[[Session], None]]
    ):
        self.decoder, self.faults = decoder, iter(faults)

    def __call__(self) -> Session:
        session = Session(*self.decoder._parts())
        next(self.faults)(session)
        return session


def _drops_a_token(session: Session) -> None:
    step = session._engine.step

    def stepped() -> Any:
        outputs = step()
        for output in outputs:
            if output.request.index == 1 and len(output.request.tokens) == 3:
                output.token_ids.pop()
        return outputs

    session._engine.step = stepped  # type: ignore[method-assign]


def _draws_otherwise(session: Session) -> None:
    add = session.add_encoded

    def added(prompt: Any, params: SamplingParams, *more: Any, **options: Any) -> int:
        return add(prompt, params.updated({"seed": 99}), *more, **options)

    session.add_encoded = added  # type: ignore[method-assign]


def _sees_another_order(session: Session) -> None:
    admit = session._engine._scheduler.admit

    def admitted(running: Any) -> list[Request]:
        return admit(running)[::-1]

    session._engine._scheduler.admit = admitted  # type: ignore[method-assign]


FAULTS: list[Callable[[Session], None]] = [
    _drops_a_token,
    _draws_otherwise,
    _sees_another_order,
]


def faults(shown: Shown) -> None:
    """Each fault is found, with the place; the last one mixes up a shard's sums."""
    ranks = shown.ranks
    config = EngineConfig(batch_size=2)
    # Whole on each rank: what has parted can go on, for the next fault.
    model = model_of("llama")
    decoder = SpecDecoder(loaded(model, "llama", ranks), config=config)
    if isinstance(ranks, Follower):
        follow(ranks, Faulty(decoder, FAULTS), decoder.bounds)
    else:
        assert isinstance(ranks, Leader)
        find(decoder, ranks)
    try:
        take_shard(model_of("llama"), {"rank": ranks.rank}, ranks, "llama")
    except RankError as error:
        print(f"found: {error}", flush=True)
        assert isinstance(ranks, Leader)
        forgive(ranks)
    take_shard(model, {}, ranks, "llama")
    decoder = SpecDecoder(loaded(model, "llama", ranks), config=config)
    if isinstance(ranks, Follower):
        follow(ranks, Faulty(decoder, [_draws_otherwise]), decoder.bounds)
        return
    try:
        decoder.generate([PROMPTS[2]], SamplingParams(temperature=1.0, seed=0))
    except RankError as error:
        print(f"ended: {error}", flush=True)


def find(decoder: SpecDecoder, ranks: Leader) -> None:
    params = [SamplingParams(max_tokens=8, temperature=1.0, seed=i) for i in range(2)]
    for _ in FAULTS:
        try:
            decoder.generate([PROMPTS[2], PROMPTS[1]], params)
        except RankError as error:
            print(f"found: {error}", flush=True)
        else:
            print("nothing was found", flush=True)
        forgive(ranks)
    ranks.release()


def forgive(leader: Leader) -> None:
    """Go on after a failure, which nobody but a test does."""
    with leader._changed:
        assert leader._changed.wait_for(
            lambda: not any(peer.mine for peer in leader._peers), 10
        )
        leader.failure, leader.broken = None, False
        leader._heard.clear()


@contextmanager
def rounds_ahead(shown: Shown, what: str) -> Iterator[None]:
    """Compiled forwards, handed over ahead and rehearsed, as on a GPU."""
    graphs: list[nn.Module] = []
    make = CompiledForwards._make

    def making(forwards: CompiledForwards, *arguments: Any) -> Any:
        modules: Any = forwards._model.modules()
        graphs.extend(m for m in modules if isinstance(m, SummedLinear))
        return make(forwards, *arguments)

    as_on_a_gpu = replace(BEHIND, new_shape_seconds=0.01)
    with (
        patch("specdec.backend.defaults", lambda: as_on_a_gpu),
        patch.object(CompiledForwards, "_make", making),
    ):
        yield
    shown(f"{what} is compiled", holds=bool(graphs))


def main(folder: Path) -> None:
    ranks = Ranks.join()
    assert ranks is not None
    shown = Shown(ranks)
    config = EngineConfig(batch_size=3, prefill_step_size=16, num_draft_tokens=3)
    compare(shown, "llama", "with a draft", config, draft=near("llama", 0.1))
    with rounds_ahead(shown, "qwen3"):
        compare(shown, "qwen3", "compiled, with hidden states", config, draft=True)
    with rounds_ahead(shown, "qwen3_5"):
        near_hybrid = near("qwen3_5", 0.1)
        compare(shown, "qwen3_5", "compiled hybrid", config, draft=near_hybrid)
    with rounds_ahead(shown, "qwen3_moe"):
        compare(shown, "qwen3_moe", "compiled", config, draft="self:4bit", head_dim=32)
    short = replace(config, max_kv_size=24)
    compare(shown, "qwen3_moe", "with n-grams", short, draft="ngram")
    compare(shown, "qwen3_5", "hybrid", config, draft=near("qwen3_5", 0.1))
    packed = replace(
        config, kv_bits=8, kv_group_size=32, prefix_cache_memory=10**7, batch_size=4
    )
    compare(
        shown, "llama", "packed", packed, draft="self:4bit", twice=True, head_dim=32
    )
    mine = backend.memory_size() or 0
    shown("memory of one host is shared", holds=ranks.memory_size == mine // 2)
    loading(shown, folder)
    refusals(shown, folder)
    conversation(shown, folder)
    faults(shown)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
