"""Model folders: configuration, tokenizer, weights, templates, and code beside them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from mlx_lm.utils import save_config, save_model

from tests.conftest import _tiny_model
from tests.models.folders import tokenizer_of

from .case import Case, World, fail, kind
from .gguf_files import HUGE, SIZES, use_model
from .odd import (
    TEMPLATES,
    odd_value,
    plant,
    spoil_bytes,
    spoil_text,
    spoil_tree,
    to_json,
)

# Keys that mlx-lm or transformers heed, beside those that are there.
KEYS = {
    "config.json": (
        "auto_map", "model_file", "quantization", "quantization_config", "rope_scaling",
        "rope_theta", "rope_parameters", "sliding_window", "layer_types", "text_config",
        "tie_word_embeddings", "eos_token_id", "bos_token_id", "attention_bias",
        "mlp_bias", "architectures", "torch_dtype", "max_position_embeddings",
        "num_key_value_heads", "head_dim", "tokenizer_class", "vision_config",
    ),
    "tokenizer_config.json": (
        "auto_map", "chat_template", "tokenizer_class", "added_tokens_decoder",
        "additional_special_tokens", "bos_token", "eos_token", "pad_token", "unk_token",
        "model_max_length", "clean_up_tokenization_spaces", "extra_special_tokens",
        "chat_template_type", "tool_parser_type", "add_prefix_space", "legacy",
        "padding_side", "model_input_names", "vocab_file", "tokenizer_file",
    ),
    "tokenizer.json": (
        "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
        "post_processor", "decoder", "model", "version",
    ),
    "generation_config.json": ("eos_token_id", "bos_token_id", "temperature"),
    "special_tokens_map.json": ("eos_token", "bos_token", "additional_special_tokens"),
    "added_tokens.json": ("<a>", "<|im_end|>"),
    "model.safetensors.index.json": ("weight_map", "metadata"),
    "distill.json": ("target", "layers", "format", "vocab", "hidden_layers"),
}  # fmt: skip
RAN = "ran"
EVIL = """
from pathlib import Path
Path({marker!r}).touch()
def __getattr__(name):
    Path({marker!r}).touch()
    raise AttributeError(name)
"""


def sound_folder(world: World) -> Path:
    """The folder that cases spoil copies of."""
    path = world.folder / "sound"
    model = _tiny_model("llama", **SIZES)
    save_model(path, model)
    save_config({**vars(model.args), "eos_token_id": [276]}, path / "config.json")
    tokenizer_of(world.folder / "tokenizer").save_pretrained(path)
    return path


def spoil_json(path: Path, rng: random.Random) -> None:
    """Spoil a file of JSON, which may not be there."""
    keys = KEYS.get(path.name, ())
    text = path.read_text("utf-8") if path.exists() else "{}"
    if rng.random() < 0.75:
        spoilt: Any = spoil_tree(json.loads(text), rng, keys)
        if rng.random() < 0.05:
            spoilt = odd_value(rng)
        path.write_bytes(to_json(spoilt).encode())
    else:
        path.write_bytes(spoil_text(text, rng))


def spoil_sizes(folder: Path, rng: random.Random) -> None:
    """Hyperparameters that the weights do not fit, or that nothing could hold."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    sizes = [k for k, v in config.items() if type(v) is int]
    for key in rng.sample(sizes, rng.choice((1, 1, 2))):
        config[key] = rng.choice((0, -1, 1, 3, 1000, 100_000, *HUGE))
    path.write_text(json.dumps(config))


def spoil_weights(folder: Path, rng: random.Random) -> None:
    """The header of the weights, or their bytes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        text = to_json(spoil_tree(json.loads(data[8 : 8 + length]), rng))
        if rng.random() < 0.1:
            text = "[" * rng.choice((900, 100_000))
        header = text.encode()
        path.write_bytes(
            len(header).to_bytes(8, "little") + header + data[8 + length :]
        )
    elif rng.random() < 0.8:
        path.write_bytes(spoil_bytes(data, rng))
    else:
        shutil.copyfile(path, folder / "model-00002-of-00002.safetensors")


def odd_template(folder: Path, rng: random.Random) -> None:
    """A chat template, wherever one may stand."""
    template = rng.choice(TEMPLATES)
    where = rng.randrange(4)
    if where == 0:
        path = folder / "chat_template.jinja"
        path.write_bytes(template.encode("utf-8", "surrogatepass"))
        return
    (folder / "chat_template.jinja").unlink()
    if where == 1:
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "default.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
        return
    name = ("tokenizer_config.json", "chat_template.json")[where - 2]
    path = folder / name
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    config["chat_template"] = rng.choice(
        (template, template, [{"name": "default", "template": template}])
    )
    path.write_text(json.dumps(config))


def _auto_map(names: Any) -> dict[str, Any]:
    """What makes transformers ask whether to run it: of a class it does not know."""
    return {"auto_map": {"AutoTokenizer": names}, "tokenizer_class": "Evil"}


def with_code(folder: Path, rng: random.Random) -> None:
    """Files that name code beside them, which must not run."""
    evil = EVIL.format(marker=str(folder.parent / RAN))
    (folder / "evil.py").write_text(evil)
    names = ("tokenizer_config.json", "tokenizer_config.json", "config.json")
    name = rng.choice(names)
    config = json.loads((folder / name).read_text("utf-8"))
    config |= rng.choice(
        (
            _auto_map(["evil.Evil", "evil.Evil"]),
            _auto_map(["evil.Evil", None]),
            _auto_map([None, "evil.Evil"]),
            _auto_map("evil.Evil"),
            {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}},
            {"model_file": "evil.py"},
            {"chat_template_type": "evil"},
            {"tool_parser_type": "evil"},
            {"model_type": rng.choice(("evil", "..evil", "llama.evil", "evil.py"))},
            {"tokenizer_class": "evil.Evil"},
        )
    )
    (folder / name).write_text(json.dumps(config))


@kind
def model_folder(case: Case) -> None:
    """A target or a draft in a malformed folder."""
    rng = case.rng
    folder = case.place / "model"
    shutil.copytree(case.world.once(sound_folder), folder)
    draw = rng.random()
    if draw < 0.45:
        for name in rng.sample([*KEYS], rng.choice((1, 1, 2))):
            spoil_json(folder / name, rng)
    elif draw < 0.6:
        spoil_sizes(folder, rng)
    elif draw < 0.75:
        spoil_weights(folder, rng)
    elif draw < 0.9:
        odd_template(folder, rng)
    elif draw < 0.95:
        with_code(folder, rng)
    else:
        name = rng.choice(sorted({*(p.name for p in folder.iterdir()), "distill.json"}))
        if rng.random() < 0.5:
            plant(folder / name, rng)
        else:
            (folder / name).unlink(missing_ok=True)
    use_model(case, folder)
    if (case.place / RAN).exists():
        fail("code in the model's folder ran")


def _part(rng: random.Random) -> dict[str, Any]:
    """A part of a tokenizer that is rare, or takes much."""
    text, times = rng.choice(("a", "", " ", "the", "é")), rng.choice((1, 9, 300))
    return rng.choice(
        (
            {"type": "Replace", "pattern": {"String": text}, "content": text * times},
            {"type": "Replace", "pattern": {"Regex": "a*|b"}, "content": "x" * times},
            {"type": "Prepend", "prepend": "▁" * times},
            {"type": "Strip", "content": "a", "start": 10**9, "stop": times},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(
                ("", "AAAA", "BAAAAP////9hYmM=", "AAEAAP8BAID/AQCA"))},
            {"type": "Split", "pattern": {"Regex": rng.choice(
                ("(a|aa)+$", "((a{99}){99}){99}", "(", "\\p{L}+", ""))},
             "behavior": "Isolated", "invert": False},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": "",
             "cleanup": True},
            {"type": "UnicodeScripts"}, {"type": "ByteFallback"}, {"type": "Fuse"},
        )
    )  # fmt: skip


@kind
def vocabulary(case: Case) -> None:
    """A tokenizer with rare parts, or with tokens that are not where they say."""
    rng = case.rng
    folder = case.place / "model"
    shutil.copytree(case.world.once(sound_folder), folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text("utf-8"))
    if rng.random() < 0.7:
        name = rng.choice(("normalizer", "pre_tokenizer", "decoder"))
        parts = [_part(rng) for _ in range(rng.choice((1, 2, 5)))]
        of = {"normalizer": "normalizers", "decoder": "decoders"}.get(
            name, "pretokenizers"
        )
        whole[name] = {"type": "Sequence", of: parts} if len(parts) > 1 else parts[0]
    else:
        tokens: dict[str, Any] = whole["model"]["vocab"]
        for token in rng.sample([*tokens], rng.choice((1, 2, 9))):
            tokens[token] = rng.choice(
                (0, -1, 2**31, 2**32, len(tokens), "1", None, 0.5)
            )
            if rng.random() < 0.5:
                del tokens[token]
        added = rng.choice(whole["added_tokens"] or [{}])
        added["id"] = rng.choice((0, 2**31, 2**40, -1, added.get("id", 5)))
    path.write_text(to_json(whole), "utf-8")
    use_model(case, folder)
