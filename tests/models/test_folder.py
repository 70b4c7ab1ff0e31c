"""Model folders that would take all there is are refused before they are opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.models import llama

from specdec import SpecDecoder
from specdec.cli import main
from specdec.errors import ModelError
from specdec.models import load, load_draft
from specdec.models.draft_folder import CARD, FORMAT
from specdec.models.folder import check_sizes
from specdec.models.model_outline import outline, outline_draft

from .folders import write_folder

OPENED = pytest.mark.parametrize("opened", [load, outline])


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def _no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of more than a few layers is not built."""
    build = llama.Model.__init__

    def checked(self: llama.Model, args: llama.ModelArgs) -> None:
        assert args.num_hidden_layers == 2, "layers are built"
        assert args.hidden_size == 64, "layers are built"
        assert args.num_attention_heads == 4, "layers are built"
        build(self, args)

    monkeypatch.setattr(llama.Model, "__init__", checked)


@OPENED
@pytest.mark.parametrize(
    "sizes",
    [
        '"num_hidden_layers": 2147483648',
        '"num_hidden_layers": 3000',
        pytest.param(f'"num_hidden_layers": 1{"0" * 4000}', id="4000 digits"),
        pytest.param(f'"num_hidden_layers": 1{"0" * 5000}', id="5000 digits"),
        '"num_attention_heads": 2147483648',
        '"hidden_size": 2147483648',
        '"head_dim": 2147483648',
        '"text_config": {"num_hidden_layers": 2147483648}',
        '"max_position_embeddings": 1e18',
    ],
)
@pytest.mark.usefixtures("_no_layers")
def test_sizes_are_checked_before_layers_are_built(
    sizes: str, opened: Callable[[Path], object], tmp_path: Path
) -> None:
    """mlx-lm makes every layer, gigabytes of them, before it looks at the weights."""
    write_folder(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(f"{file.read_text().rstrip()[:-1]}, {sizes}}}")
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        opened(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.usefixtures("_no_layers")
def test_a_configuration_alone(tmp_path: Path) -> None:
    """``estimate`` takes one; there are no weights to compare it with."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "num_hidden_layers": 2147483648}')
    words = ["estimate", "--target", str(config), "--context", "8"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "num_hidden_layers is 2147483648, and no model has more" in result.stderr
    assert result.stderr.count("\n") == 1


def test_known_sizes_pass() -> None:
    """The largest of what is known: a bound that is too low refuses a real model."""
    config = {
        "num_hidden_layers": 128,
        "n_routed_experts": 512,
        "num_attention_heads": 128,
        "hidden_size": 18432,
        "intermediate_size": 65536,
        "vocab_size": 262_400,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 10_485_760,
        "kv_lora_rank": 512,
        "rope_theta": 500_000_000,
        "eos_token_id": [151_645, 200_000],
        "max_window_layers": 80,
        "text_config": {"num_kv_shared_layers": 20},
    }
    check_sizes(config, Path("config.json"))


@pytest.mark.timeout(60)
@OPENED
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-2.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
    ],
)
def test_files_that_are_not_plain(
    name: str, opened: Callable[[Path], object], tmp_path: Path
) -> None:
    """A FIFO waits for a writer, /dev/zero never ends."""
    for kind in ("fifo", "device"):
        folder = tmp_path / kind
        write_folder(folder)
        (folder / name).unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
        with pytest.raises(ModelError, match="it is not a plain file") as caught:
            opened(folder)
        assert str(folder / name) in str(caught.value)


@OPENED
def test_a_file_of_holes(opened: Callable[[Path], object], tmp_path: Path) -> None:
    """It takes no room on the disk, and all there is in memory."""
    write_folder(tmp_path / "m")
    os.truncate(tmp_path / "m" / "tokenizer.json", 1 << 34)
    with pytest.raises(ModelError, match=r"tokenizer\.json has 17179869184 bytes"):
        opened(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tokenizer.json", "added_tokens"),
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("tokenizer_config.json", "mask_token"),
        ("special_tokens_map.json", "mask_token"),
        ("special_tokens_map.json", "extra_special_tokens"),
    ],
)
def test_fields_of_added_tokens(
    name: str, key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The name of an unknown one arrived on standard output, with its escapes."""
    folder = tmp_path / "m"
    write_folder(folder)
    file = folder / name
    table = json.loads(file.read_text()) if file.exists() else {}

    def add(**more: Any) -> None:
        token = {"content": "<x>", "lstrip": False, **more}
        if key == "added_tokens":
            table[key][0] |= more
        elif key == "added_tokens_decoder":
            table[key] = {"276": token}
        elif key == "extra_special_tokens":
            table[key] = [token]
        elif name == "tokenizer_config.json":
            table[key] = {"__type": "AddedToken", **token}
        else:
            table[key] = token
        file.write_text(json.dumps(table))

    add()
    load(str(folder))
    add(**{"a\x1b[31m": True})
    with pytest.raises(ModelError, match=f"{name} has an added token") as caught:
        load(str(folder))
    assert str(caught.value).isprintable()
    assert capfd.readouterr().out == ""


@pytest.mark.timeout(60)
def test_drafts_of_layers_alone(tmp_path: Path) -> None:
    """They are opened in another way, and their card is read first."""
    write_folder(tmp_path / "t")
    write_folder(tmp_path / "m")
    card = tmp_path / "m" / CARD
    card.write_text(json.dumps({"format": FORMAT, "embedding": "target"}))
    change(tmp_path / "m", num_hidden_layers=2**31)
    target, target_outline = load(tmp_path / "t"), outline(tmp_path / "t")
    name = str(tmp_path / "m")
    calls: list[Callable[[], object]] = [
        lambda: load_draft(name, target),
        lambda: outline_draft(name, target_outline),
    ]
    for call in calls:
        with pytest.raises(ModelError, match="no model has more than"):
            call()
    card.unlink()
    os.mkfifo(card)
    for call in calls:
        with pytest.raises(ModelError, match="cannot be read"):
            call()


def test_a_draft_of_another_width_is_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the target's weights were read, for 22 seconds."""
    write_folder(tmp_path / "t", hidden_size=128)
    write_folder(tmp_path / "m")
    card = {"format": FORMAT, "embedding": "target"}
    (tmp_path / "m" / CARD).write_text(json.dumps(card))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr("specdec.decoder.load", never)
    with pytest.raises(ModelError, match=r"made for a target of width 64, and .* 128"):
        SpecDecoder.from_pretrained(tmp_path / "t", tmp_path / "m")


def weights_of(folder: Path) -> dict[str, mx.array]:
    found: Any = mx.load(str(folder / "model.safetensors"))
    return dict(found)


def noise(folder: Path) -> dict[str, mx.array]:
    """Weights of another model, under the same names."""
    every = weights_of(folder).items()
    return {name: mx.random.normal(a.shape, key=mx.random.key(3)) for name, a in every}


def first_norm(opened: Any) -> mx.array:
    norm: mx.array = opened.model.model.norm.weight
    return norm


@OPENED
@pytest.mark.parametrize("name", ["model_old", "model-00002-of-00002", "model-mtp"])
def test_an_index_says_which_files_are_the_models(
    name: str, opened: Any, tmp_path: Path
) -> None:
    """A file beside them replaced weights, or not, by the directory's order."""
    write_folder(tmp_path / "m")
    wanted = weights_of(tmp_path / "m")["model.norm.weight"]
    stray = tmp_path / "m" / f"{name}.safetensors"
    mx.save_safetensors(str(stray), noise(tmp_path / "m"))
    assert mx.array_equal(first_norm(opened(tmp_path / "m")), wanted)
    assert stray.exists()
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "of-another-conversion"}}))
    for _ in range(2):
        if name == "model-mtp":  # a head's; its loader reads it
            assert mx.array_equal(first_norm(opened(tmp_path / "m")), wanted)
        else:
            with pytest.raises(ModelError, match=r"model\S* in two files, one of them"):
                opened(tmp_path / "m")
        index.unlink(missing_ok=True)


@OPENED
@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}']
)
def test_an_odd_index_is_refused(text: str, opened: Any, tmp_path: Path) -> None:
    """In one line, and not by what mlx-lm makes of it."""
    write_folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index.json cannot be read") as caught:
        opened(tmp_path / "m")
    assert "\n" not in str(caught.value)
