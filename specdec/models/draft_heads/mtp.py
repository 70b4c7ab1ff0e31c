"""MTP heads: layers of a target's own kind that predict the token after next.

They lie in the target's checkpoint, in a file beside it, or in a folder of their own;
mlx-lm's models drop them. mlx-lm's code builds the layer and renames its weights. Like
EAGLE-3, a head reads pairs of a hidden state and the token after it:

    x = fc([norm_e(embed(token)), norm_h(state)])        output = norm(layer(x))

The state is the target's last one after its last norm; then the head's own output,
after its last norm too. vLLM, SGLang and mlx-vlm do the same for every family here.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import quoted
from ..folder import explained, read_arrays, weight_files
from ..layers import TargetEnds, architecture_of
from ..loaded import Described
from .config import HeadConfig, LayerSizes
from .head import DraftHead
from .weights import fill, rehearse

log = logging.getLogger("specdec.models")

# Names of the parts around the layer -> names here.
_PARTS = {
    "fc": "fc", "eh_proj": "fc", "input_proj": "fc",
    "pre_fc_norm_embedding": "token_norm", "enorm": "token_norm",
    "enorm.m": "token_norm", "token_layernorm": "token_norm",
    "pre_fc_norm_hidden": "state_norm", "hnorm": "state_norm",
    "hnorm.m": "state_norm", "hidden_layernorm": "state_norm",
    "final_layernorm": "norm", "shared_head.norm": "norm", "shared_head_norm": "norm",
    "embed_tokens": "embed_tokens", "shared_head.head": "lm_head", "lm_head": "lm_head",
}  # fmt: skip
# What comes before names: of the model, of the head in it, and of its layer.
_MODEL = re.compile(r"^((language_model|model|backbone)\.)+")
_HEAD = re.compile(r"^(mtp|mtp_block)\.")
_NUMBERED = re.compile(r"^(?:layers|mtp_layers)\.(\d+)\.")
_LAYER = re.compile(r"^(transformer_layer|mtp_block|layer)\.")
_EXPERT = re.compile(r"(.*\b)experts\.(\d+)\.(\w+)\.(\w+)")
# Tokens of the shorter output head. Byte-pair vocabularies are sorted by frequency.
FREQUENT = 65_536
# Files beside a target's weights.
_SIDECARS = ("mtp.safetensors", "mtp/*.safetensors", "model-mtp*.safetensors")


class NoHeadError(ModelError):
    """A target has no MTP head."""


@dataclass(frozen=True)
class _Family:
    """How the MTP heads of an architecture differ from those of others.

    Args:
        make: makes a layer from the target's ends and configuration.
        state_first: whether ``fc`` reads the state before the token.
        numbers_blocks: whether numbers in names count blocks of one layer.
        gains_less_one: whether gains of norms may be stored as w - 1.
        owns_ends: whether a copy of embedding and output head in the target's
            checkpoint differs from the target's.
        latent: whether attention is latent; such attention needs an array as mask.
        indexed: whether the layer's cache also holds an indexer's keys.
    """

    make: Callable[[TargetEnds, Mapping[str, Any]], nn.Module]
    state_first: bool = False
    numbers_blocks: bool = False
    gains_less_one: bool = False
    owns_ends: bool = False
    latent: bool = False
    indexed: bool = False


def _like(ends: TargetEnds, place: int) -> Any:
    """A layer of the class of the target's layer at ``place``."""
    kind: Any = type(ends.trunk["layers"][place])
    return kind(ends.args, place)


def _full_attention(ends: TargetEnds, _: Mapping[str, Any]) -> nn.Module:
    layer: nn.Module = _like(ends, ends.args.full_attention_interval - 1)
    return layer


def _last(ends: TargetEnds, _: Mapping[str, Any]) -> nn.Module:
    layer: nn.Module = _like(ends, ends.num_layers - 1)
    return layer


def _mimo(ends: TargetEnds, _: Mapping[str, Any]) -> nn.Module:
    kind: Any = type(ends.trunk["layers"][0])
    layer: nn.Module = kind(ends.args)
    return layer


class _Blocks(nn.Module):
    """Blocks of Nemotron-H, one of which is attention."""

    def __init__(self, ends: TargetEnds, config: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        names = {"attention": "*", "moe": "E", "mlp": "-"}
        listed = config.get("mtp_layers_block_type") or ()
        pattern = config.get("mtp_hybrid_override_pattern") or "*E"
        pattern = "".join(names.get(str(name), "?") for name in listed) or pattern
        if not isinstance(pattern, str) or not re.fullmatch(r"[E-]*\*[E-]*", pattern):
            raise UnsupportedModelError(
                f"MTP heads with the blocks {quoted(pattern)} are not supported (one "
                "of attention and others of experts are)"
            )
        kind: Any = type(ends.trunk["layers"][0])
        self.blocks = [kind(ends.args, letter) for letter in pattern]

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self.blocks:
            x = block(x, mask, cache)
        return x


class _LongcatLayer(nn.Module):
    """A plain layer of LongCat's attention and dense MLP; the target's are double."""

    def __init__(self, ends: TargetEnds, _: Mapping[str, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        like: Any = ends.trunk["layers"][0]
        size, eps = ends.args.hidden_size, ends.args.rms_norm_eps
        self.self_attn = type(like.self_attn[0])(ends.args)
        self.mlp = type(like.mlps[0])(ends.args)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


#: By the target's architecture (mlx-lm's module names).
FAMILIES = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_next"),
        _Family(_full_attention, gains_less_one=True),
    ),
    "glm4_moe": _Family(_last),
    "glm4_moe_lite": _Family(_last, latent=True, owns_ends=True),
    "deepseek_v3": _Family(_last, latent=True),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"), _Family(_last, latent=True, indexed=True)
    ),
    "mimo": _Family(_mimo, state_first=True),
    "nemotron_h": _Family(_Blocks, numbers_blocks=True),
    "longcat_flash": _Family(_LongcatLayer, latent=True),
}  # fmt: skip


# Targets whose published heads are not supported, and why not.
_REFUSED = {
    "hunyuan": "published heads are for HY 3 and 4, which mlx-lm does not have",
    "deepseek_v41": "it has stages of DSpark instead, and mlx-lm runs no published one",
    "mimo_v2_flash": "their three heads could not be compared with a reference",
    "step3p5": "their three heads could not be compared with a reference",
}


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """MTP heads.

    Args:
        num_heads: heads that take turns: step i of a round is of head i modulo this.
        state_first, latent, indexed: see :class:`_Family`.
    """

    num_heads: int
    state_first: bool
    latent: bool
    indexed: bool


class MTPModule(nn.Module):
    """One MTP head: norms and a projection of a pair, a layer, and a last norm."""

    def __init__(self, size: int, eps: float, layer: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.token_norm = nn.RMSNorm(size, eps=eps)
        self.state_norm = nn.RMSNorm(size, eps=eps)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(
        self, embedded: mx.array, state: mx.array, cache: Any, config: MTPConfig
    ) -> mx.array:
        """Normed outputs (B, S, D) for pairs, which are written to the cache."""
        pair = [self.token_norm(embedded), self.state_norm(state)]
        if config.state_first:
            pair.reverse()
        x = self.fc(mx.concatenate(pair, axis=-1))
        of_mask = cache[0] if config.indexed else cache
        mask = create_attention_mask(x, of_mask, return_array=config.latent)
        normed: mx.array = self.norm(self.layer(x, mask, cache))
        return normed


class MTPHead(DraftHead):
    """A target's own MTP heads.

    Every pair is written to the caches of all heads, so that each knows the whole row.

    Args:
        config: the heads' configuration.
        eps: of their norms.
        make: makes a layer of weights of any values.
    """

    args: MTPConfig
    reads_following = True

    def __init__(self, config: MTPConfig, eps: float, make: Callable[[], nn.Module]):
        super().__init__(config)
        size = config.sizes.hidden_size
        self.heads = [MTPModule(size, eps, make()) for _ in range(config.num_heads)]
        for turn in range(1, config.num_heads):
            vars(self)[self.step_name(turn)] = partial(self._step, turn)

    def step_name(self, number: int) -> str:
        """The method that takes step ``number`` of a round, counted from 0."""
        turn = number % self.args.num_heads
        return f"step_{turn}" if turn else "step"

    def make_cache(self) -> list[Any]:
        """A cache for each head."""
        indexed = self.args.indexed
        return [
            CacheList(KVCache(), KVCache()) if indexed else KVCache()
            for _ in self.heads
        ]

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write pairs of the target's states and the tokens after them."""
        return self.step(following, self.ends.norm(hidden), caches)

    def step(self, tokens: mx.array, state: mx.array, caches: list[Any]) -> mx.array:
        """Write pairs and return the states of the next pairs, (B, S, D)."""
        return self._step(0, tokens, state, caches)

    def _step(
        self, turn: int, tokens: mx.array, state: mx.array, caches: list[Any]
    ) -> mx.array:
        embedded = self.embed(tokens)
        each = zip(self.heads, caches, strict=True)
        return [head(embedded, state, c, self.args) for head, c in each][turn]

    def predict(self, h: mx.array) -> mx.array:
        """Logits from the output of :meth:`step`."""
        return self.logits(h)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) with zero states, to plan and check it like a model."""
        size = self.args.sizes.hidden_size
        state = mx.zeros((*inputs.shape, size), self.heads[0].norm.weight.dtype)
        return self.predict(self.step(inputs, state, cache))


def open_mtp(folder: Path, target: Described) -> DraftHead:
    """The MTP head of a target, with weights that are not computed yet.

    Args:
        folder: the target's folder: a file beside its weights comes before the weights.

    Raises:
        UnsupportedModelError: MTP heads of the target's architecture are not supported.
        NoHeadError: there is no MTP head.
        ModelError: it is damaged.
    """
    with explained(f"the MTP head of {target.name}"):
        ends = _ends(target)
        for files, where in _places(folder, target.config):
            arrays = {
                name: array
                for name, array in read_arrays(files, target.name).items()
                if where is not None or _is_of_head(name, ends.num_layers)
            }
            if arrays:
                place = where or f"the checkpoint of {target.name}"
                log.info("mtp: the head is in %s", place)
                source = f"the MTP head of {target.name}"
                return _made(arrays, ends, target, source, whole=_is_mlx(files))
    raise NoHeadError(
        f"{target.name} has no MTP head, nor has a file beside it (conversions by "
        "mlx-lm leave it out): name a repository of the head (--draft OWNER/NAME), "
        "take the original checkpoint as the target, or another draft"
    )


def open_mtp_folder(folder: Path, source: str, target: Described) -> DraftHead:
    """An MTP head from a folder of its own.

    Args:
        source: for messages.

    Raises:
        UnsupportedModelError, ModelError: see :func:`open_mtp`.
    """
    with explained(source):
        files = sorted(folder.glob("*.safetensors"))
        arrays = read_arrays(files, source)
        whole = _is_mlx(files)
        ends = _ends(target)
        return _made(arrays, ends, target, source, apart=True, whole=whole)


def _ends(target: Described) -> TargetEnds:
    architecture = architecture_of(target.model)
    if architecture not in FAMILIES:
        why = _REFUSED.get(architecture, f"{', '.join(FAMILIES)} are")
        raise UnsupportedModelError(
            f"{target.name}: MTP heads of {architecture} models are not supported "
            f"({why}); take another draft"
        )
    return TargetEnds(target.model, target.name)


def _places(
    folder: Path, config: Mapping[str, Any]
) -> Iterator[tuple[list[Path], str | None]]:
    """Where a target's head may lie: files, and their name if they are the head's own.

    Configurations may name the file (``mlx_lm_extra_tensors.mtp_file``).
    """
    extra = config.get("mlx_lm_extra_tensors")
    named = extra.get("mtp_file") if isinstance(extra, Mapping) else None
    plain = isinstance(named, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", named)
    if plain and (folder / str(named)).is_file():
        yield [folder / str(named)], str(named)
    for pattern in _SIDECARS:
        if files := sorted(file for file in folder.glob(pattern) if file.is_file()):
            yield files, str(files[0].relative_to(folder))
    if files := weight_files(folder):
        yield files, None


def _is_of_head(name: str, depth: int) -> bool:
    """Whether an array in a target's checkpoint is an MTP head's."""
    rest = _MODEL.sub("", name)
    numbered = re.match(r"layers\.(\d+)\.", rest)
    later = numbered is not None and int(numbered[1]) >= depth
    return later or rest.startswith(("mtp.", "mtp_layers."))


def _is_mlx(files: list[Path]) -> bool:
    """Whether a converter for MLX wrote files; it stores gains as they are."""
    loaded: Any = mx.load(str(files[0]), return_metadata=True)
    return bool(loaded[1].get("format") == "mlx")


def _made(
    arrays: Mapping[str, mx.array],
    ends: TargetEnds,
    target: Described,
    source: str,
    *,
    apart: bool = False,
    whole: bool,
) -> DraftHead:
    """The head with these arrays.

    Args:
        apart: whether they come from a folder of their own.
        whole: whether their file says that gains are stored as they are.
    """
    family = FAMILIES[architecture_of(target.model)]
    weights = _named(arrays, ends, family)
    if family.gains_less_one:
        prefixed = any("mtp." in name for name in arrays)
        _complete_gains(weights, prefixed and not whole, source)
    for end in ("embed_tokens", "lm_head"):
        if not (apart or family.owns_ends):
            weights = {n: a for n, a in weights.items() if not n.startswith(end)}
    final: Any = ends.norm
    config, args = target.config, ends.args
    size = int(final.weight.shape[0])
    vocab_size = ends.logits(mx.zeros((1, 1, size))).shape[-1]
    heads = args.num_attention_heads
    numbers = [int(name.split(".")[1]) for name in weights if name.startswith("heads.")]
    head = MTPHead(
        MTPConfig(
            kind="MTP",
            sizes=LayerSizes(
                hidden_size=size,
                intermediate_size=getattr(args, "intermediate_size", None) or size,
                num_layers=1,
                num_heads=heads,
                num_kv_heads=getattr(args, "num_key_value_heads", None) or heads,
                head_dim=getattr(args, "head_dim", None) or size // heads,
                rms_norm_eps=final.eps,
            ),
            target_layers=(ends.num_layers - 1,),
            target_size=size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            owns_embedding="embed_tokens.weight" in weights,
            owns_head="lm_head.weight" in weights,
            num_heads=1 + min(max(numbers, default=0), len(numbers)),
            state_first=family.state_first,
            latent=family.latent,
            indexed=family.indexed,
        ),
        final.eps,
        lambda: family.make(ends, config),
    )
    head.bind(ends)
    fill(head, weights, source)
    if not head.args.owns_head and vocab_size >= 2 * FREQUENT:
        head.num_frequent = FREQUENT
        vars(head)["frequent"] = ends.of_first(FREQUENT)
    head.eval()
    rehearse(head)
    return head


def _named(
    arrays: Mapping[str, mx.array], ends: TargetEnds, family: _Family
) -> dict[str, mx.array]:
    """Arrays under their names here; mlx-lm's own code renames the layers' arrays."""
    weights: dict[str, mx.array] = {}
    layers: dict[int, dict[str, mx.array]] = defaultdict(dict)
    for name, array in arrays.items():
        rest = _HEAD.sub("", _MODEL.sub("", name))
        number, block = 0, ""
        numbered = _NUMBERED.match(rest)
        if numbered is not None:
            rest = rest[numbered.end() :]
            number = int(numbered[1])
            if number >= ends.num_layers:
                number -= ends.num_layers
            if family.numbers_blocks:
                number, block = 0, f"blocks.{number}."
        rest = _LAYER.sub("", rest)
        stem, _, kind = rest.rpartition(".")
        part = _PARTS.get(stem)
        if part is None and stem == "norm" and numbered is None:
            part = "norm"
        if part in ("embed_tokens", "lm_head"):
            weights[f"{part}.{kind}"] = array
        elif part is not None:
            weights[f"heads.{number}.{part}.{kind}"] = array
        elif "rotary_emb.inv_freq" not in rest:
            layers[number][block + rest] = array
    around = [name for name in weights if name.startswith("heads.0.")]
    for number, layer in layers.items():
        for name in around:  # heads may share what is around the layer
            copied = name.replace("heads.0.", f"heads.{number}.", 1)
            weights.setdefault(copied, weights[name])
        for name, array in _renamed(layer, ends, family).items():
            weights[f"heads.{number}.layer.{name}"] = array
    return weights


def _renamed(
    layer: Mapping[str, mx.array], ends: TargetEnds, family: _Family
) -> dict[str, mx.array]:
    """A layer's arrays under the names of mlx-lm's class, by its model's own code.

    Norms have their names already, and that code may add 1 to their gains.
    """
    renamed = {name: array for name, array in layer.items() if "norm" in name}
    others = {name: array for name, array in layer.items() if "norm" not in name}
    if family.numbers_blocks:
        renamed |= others
    else:
        # The target's attention may be one of two in a layer.
        double = family.make is _LongcatLayer
        place = 0 if double else ends.num_layers - 1
        before, outer = f"model.layers.{place}.", "self_attn."
        inner = f"{outer}0." if double else outer
        stored = {before + n.replace(outer, inner, 1): a for n, a in others.items()}
        model: Any = ends.model
        for name, array in model.sanitize(stored).items():
            short = name.rpartition(f"layers.{place}.")[2]
            renamed[short.replace(inner, outer, 1)] = array
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    names = {"up_proj": "fc1", "down_proj": "fc2"} if family.numbers_blocks else {}
    for name in list(renamed):
        if expert := _EXPERT.fullmatch(name):
            before, number, part, kind = expert.groups()
            joined = f"{before}switch_mlp.{names.get(part, part)}.{kind}"
            experts[joined][int(number)] = renamed.pop(name)
    for name, each in experts.items():
        renamed[name] = mx.stack([each[i] for i in range(len(each))])
    return renamed


def _complete_gains(weights: dict[str, mx.array], expected: bool, source: str) -> None:
    """Add 1 to gains that are stored as w - 1.

    Gains are hardly ever negative, and those that are stored less one are so in many
    places. Where values do not say, ``expected`` decides.

    Args:
        expected: whether they are stored less one, by the names and files.

    Raises:
        ModelError: parts of the head contradict each other.
    """
    gains = [name for name, a in weights.items() if a.ndim == 1 and "norm" in name]

    def clear(*parts: str) -> set[bool]:
        """What the values of these norms say: whether they are stored less one."""
        shifted = set[bool]()
        for name in gains:
            if name.split(".")[-2] in parts:
                array = weights[name].astype(mx.float32)
                if bool(mx.mean(array < 0) > 0.01):
                    shifted.add(True)
                elif bool((mx.min(array) > 0) & (mx.mean(array) > 0.7)):
                    shifted.add(False)
        return shifted

    around = clear("token_norm", "state_norm")
    inside = clear("input_layernorm", "post_attention_layernorm")
    if len(around) == len(inside) == 1 and around != inside:
        raise ModelError(
            f"{source}: norms of its layer are stored in another way than those before "
            "it (as w and as w - 1): convert the original checkpoint again"
        )
    if True in around | inside or (expected and not around | inside):
        for name in gains:
            weights[name] = weights[name] + 1.0
