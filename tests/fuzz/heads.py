"""Folders of draft heads, and of drafts with other vocabularies."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

from specdec.models import LoadedModel, load, load_draft, map_vocabulary
from tests.conftest import _tiny_model
from tests.models.draft_heads import published
from tests.models.draft_heads.mtp_checkpoints import (
    head_arrays,
    make_model,
    make_parts,
    write_apart,
    write_target,
)
from tests.models.folders import tokenizer_of
from tests.models.gguf_files import VOCAB

from .case import Case, World, check_error, fail, kind, specdec, specdec_works
from .folders import sound_folder, spoil_sizes, spoil_weights
from .gguf_files import ASK, SIZES, sound_gguf, text_alone
from .odd import NUMBERS, TEXTS, plant, spoil_text, spoil_tree, to_json

# Keys that a head's loader heeds, beside those that are there.
KEYS = (
    "quantization", "quantization_config", "dflash_config", "eagle_config",
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window",
    "transformer_layer_config", "speculators_model_type", "target_hidden_size",
    "markov_rank", "markov_head_type", "sample_from_anchor", "is_causal",
    "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "architectures",
    "draft_vocab_size", "final_logit_softcapping", "norm_before_fc", "fc_norm",
)  # fmt: skip
_MTP = "glm4_moe_lite"
_FITTING = {"hidden_size": 32, "vocab_size": VOCAB}


def _configs() -> dict[str, dict[str, Any]]:
    tokens = {"mask_token_id": 96, "target_layer_ids": list(published.READS)}
    return {
        "dflash": published.dflash_config(**_FITTING, dflash=tokens),
        "dspark": published.dspark_config(**_FITTING),
        "dflash2": published.dflash2_config(**_FITTING, dflash=tokens),
        "peagle": published.peagle_config(**_FITTING),
        "eagle": published.eagle_config(**_FITTING),
        "speculators": published.speculators_config("dflash", layers=_FITTING),
    }


def deep_target(world: World) -> Path:
    """A target with as many layers as the heads were made for."""
    path = world.folder / "deep"
    model = _tiny_model("llama", **SIZES, num_hidden_layers=published.LAYERS)
    save_model(path, model)
    save_config({**vars(model.args), "eos_token_id": [276]}, path / "config.json")
    tokenizer_of(world.folder / "deep-tokenizer").save_pretrained(path)
    return path


def deep_loaded(world: World) -> LoadedModel:
    """The same, loaded once."""
    return load(world.once(deep_target))


def gguf_loaded(world: World) -> LoadedModel:
    """The sound file, loaded once."""
    return load(world.once(sound_gguf))


def loads(folder: Path, target: LoadedModel) -> bool:
    """Whether a draft loads; if not, a line says why."""
    try:
        draft = load_draft(str(folder), target)
        map_vocabulary(target, draft)
    except Exception as error:
        check_error(error)
        return False
    return True


def deep_alone(world: World) -> str:
    """What that target gives without a draft."""
    target = world.once(deep_target)
    return specdec_works("run", "--target", target, "--draft", "none", *ASK).out


def _arrays(folder: Path) -> dict[str, mx.array]:
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    return dict(arrays)


def odd_array(array: mx.array, rng: random.Random) -> mx.array:
    """An array of another type, shape or value."""
    draw = rng.randrange(7)
    if draw == 0:
        return array.astype(rng.choice((mx.int8, mx.float16, mx.uint32)))
    if draw == 1:
        return array[None]
    if draw == 2:
        return array[:0]
    if draw == 3:
        return mx.concatenate([array, array])
    if draw == 4:
        return array.astype(mx.float32) * mx.nan
    if draw == 5:
        return mx.full(array.shape, rng.choice((2**31, 2**62, -1)), mx.int64)
    return mx.array(0.0)


def spoil_arrays(folder: Path, rng: random.Random) -> None:
    """Arrays of other types, shapes and values; lacking, or packed."""
    arrays = _arrays(folder)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted({*arrays, *(("d2t",) if "d2t" in arrays else ())}))
        array = arrays[name]
        draw = rng.random()
        if draw < 0.15:
            del arrays[name]
        elif draw < 0.3:
            arrays[rng.choice(("fc.weight", "layers.9.x", "", name + ".scales"))] = (
                array
            )
        elif draw < 0.4 and array.ndim == 2 and array.shape[1] % 32 == 0:
            weight, *rest = mx.quantize(array.astype(mx.float32), 32, 4)
            arrays[name] = weight
            base = name.removesuffix("weight")
            rest = rest[: rng.choice((1, 2))]
            arrays |= zip((base + "scales", base + "biases"), rest, strict=False)
        else:
            arrays[name] = odd_array(array, rng)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


def spoil_head(folder: Path, rng: random.Random) -> None:
    """One of the ways in which a head's folder may be wrong."""
    path, draw = folder / "config.json", rng.random()
    if draw < 0.5:
        config = json.loads(path.read_text("utf-8"))
        path.write_bytes(to_json(spoil_tree(config, rng, KEYS)).encode())
    elif draw < 0.55:
        path.write_bytes(spoil_text(path.read_text("utf-8"), rng))
    elif draw < 0.65:
        spoil_sizes(folder, rng)
    elif draw < 0.75:
        spoil_weights(folder, rng)
    elif draw < 0.95:
        spoil_arrays(folder, rng)
    else:
        plant(folder / rng.choice(("config.json", "model.safetensors", "x")), rng)


@kind
def draft_head(case: Case) -> None:
    """A head in a malformed folder: refused in a line, or with the target's text."""
    rng = case.rng
    folder = case.place / "head"
    configs = _configs()
    published.write_head(folder, configs[rng.choice(sorted(configs))])
    spoil_head(folder, rng)
    target = case.world.once(deep_target)
    if not loads(folder, case.world.once(deep_loaded)) or rng.random() < 0.8:
        return  # whole runs take longest
    if rng.random() < 0.2:
        specdec("estimate", "--target", target, "--draft", folder, "--context", "64")
        return
    drafting = ("--draft", folder, "--num-draft-tokens", "2")
    answer = specdec("run", "--target", target, *drafting, *ASK)
    if answer.code == 0 and answer.out != case.world.once(deep_alone):
        fail(f"other tokens with a draft: {answer}")


def mtp_target(world: World) -> LoadedModel:
    """A target with experts and latent attention, without its MTP head."""
    path = world.folder / "mtp-target"
    write_target(path, _MTP, with_head=False)
    return load(path)


def mtp_head(world: World) -> Path:
    """The head in a folder of its own."""
    model, _ = make_model(_MTP)
    arrays = head_arrays(_MTP, model, make_parts(_MTP, model))
    sizes = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    return write_apart(world.folder / "mtp-head", _MTP, arrays, **sizes)


@kind
def mtp_folder(case: Case) -> None:
    """An MTP head in a malformed folder of its own."""
    folder = case.place / "head"
    shutil.copytree(case.world.once(mtp_head), folder)
    spoil_head(folder, case.rng)
    loads(folder, case.world.once(mtp_target))


@kind
def draft_vocabulary(case: Case) -> None:
    """A draft whose tokens have odd ids and spellings, or are very long."""
    rng = case.rng
    folder = case.place / "draft"
    shutil.copytree(case.world.once(sound_folder), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for text in rng.sample(sorted(vocabulary), rng.choice((1, 3, 20))):
        draw = rng.random()
        if draw < 0.4:
            vocabulary[text] = rng.choice([n for n in NUMBERS if type(n) is int])
        elif draw < 0.6:
            vocabulary[rng.choice(TEXTS)] = vocabulary.pop(text)
        else:
            letter = rng.choice("aé\u0120")
            vocabulary[letter * rng.choice((10, 4000, 40_000))] = vocabulary.pop(text)
    path.write_bytes(to_json(tokenizer).encode())
    if not loads(folder, case.world.once(gguf_loaded)) or rng.random() < 0.8:
        return
    target = case.world.once(sound_gguf)
    drafting = ("--draft", folder, "--num-draft-tokens", "2")
    answer = specdec("run", "--target", target, *drafting, *ASK)
    if answer.code == 0 and answer.out != case.world.once(text_alone):
        fail(f"other tokens with a draft: {answer}")
