"""Prompts with images: every token equals mlx-vlm's own decoding in float32.

mlx-vlm prepares and embeds all images of a prompt in one call, and keeps one sequence.
Its rotary embeddings with three axes agree with ours to about 1e-5, not in every bit;
random logits lie further apart.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import mlx.core as mx
import numpy as np
import PIL.Image
import pytest
from transformers import AutoProcessor

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.errors import (
    ConfigError,
    MemoryLimitError,
    PromptError,
    PromptTooLongError,
    UnsupportedModelError,
)
from specdec.memory import RowNeeds
from specdec.models import image_rows, vision
from specdec.models.layers import arrays_of
from specdec.models.loading import load
from specdec.prompts.images import Image
from tests.models.architectures import Guesses
from tests.models.draft_heads import published
from tests.models.draft_heads.mtp_checkpoints import head_arrays, make_parts
from tests.models.folders import write_folder
from tests.plain import AT_ONCE, BEHIND

from .folders import FAMILIES, random_image, write_vision_folder

WIDE, TALL, SQUARE = (
    random_image(*size, seed=n)
    for n, size in enumerate([(90, 40), (30, 100), (64, 64)])
)
MAX_TOKENS = 10
#: Families whose masks mlx-vlm does not have.
BOTH_WAYS = ["gemma3", "gemma4-large", "gemma4_unified"]


def said(*parts: str | Image) -> list[dict[str, Any]]:
    """A user's turn of texts and images."""
    content = [
        {"type": "text", "text": p}
        if isinstance(p, str)
        else {"type": "image", "image": p}
        for p in parts
    ]
    return [{"role": "user", "content": content}]


PROMPTS = [
    said("what is this ", WIDE, " say"),
    said("no image"),
    said(TALL, " and ", SQUARE, " and again ", TALL, "?"),
    said(SQUARE, "a"),
    [
        *said("first", WIDE, "x"),
        {"role": "assistant", "content": "well"},
        *said("then", TALL, "?"),
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Writes a family's folder once; gives it and mlx-vlm's model."""

    @cache
    def of(family: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp("vision") / family
        return path, write_vision_folder(path, family)

    return of


def by_mlx_vlm(
    decoder: SpecDecoder, model: Any, prompt: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and the tokens that mlx-vlm alone gives."""
    pictures = [
        PIL.Image.fromarray(part["image"].pixels)
        for message in prompt
        for part in message["content"]
        if isinstance(part, dict) and "image" in part
    ]
    encoder = vision.image_encoder(decoder.target)
    assert encoder is not None
    text = decoder._encode(prompt).text
    if not pictures:
        ids = mx.array([decoder.tokenizer.encode(text, add_special_tokens=False)])
        inputs = {}
    else:
        images: Any = [pictures] if encoder.sections is None else pictures
        prepared = encoder._loaded_processor()(
            images=images, text=[text], add_special_tokens=False
        )
        prepared.pop("attention_mask")
        pixels = prepared.pop("pixel_values")
        inputs = {k: vision._array(v) for k, v in prepared.items()}
        # Images of several sizes may stay apart.
        apart = isinstance(pixels, list) and len(pixels) > 1
        inputs["pixel_values"] = pixels if apart else vision._array(pixels)
        ids = inputs.pop("input_ids")
    part = model.language_model
    part._rope_deltas = part._position_ids = None
    given = model.get_input_embeddings(ids, **inputs)
    positions = {}
    if given.rope_deltas is not None and pictures:
        part._rope_deltas = given.rope_deltas
        positions = {"position_ids": given.position_ids}
    cache = make_cache(part)
    if given.per_layer_inputs is not None:
        positions["per_layer_inputs"] = given.per_layer_inputs
    if given.deepstack_visual_embeds is not None:
        positions["visual_pos_masks"] = given.visual_pos_masks
        positions["deepstack_visual_embeds"] = given.deepstack_visual_embeds
    logits = part(
        ids, inputs_embeds=given.inputs_embeds, cache=cache, **positions
    ).logits
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        token = int(mx.argmax(logits[0, -1]))
        if token in decoder.tokenizer.eos_token_ids:
            break
        tokens.append(token)
        logits = part(mx.array([[token]]), cache=cache).logits
    prompt_ids: Any = ids[0].tolist()
    return prompt_ids, tokens


def make_cache(part: Any) -> list[Any]:
    from mlx_vlm.models.cache import KVCache

    if hasattr(part, "make_cache"):
        return list(part.make_cache())
    return [KVCache() for _ in part.model.layers]


def decoder_of(
    folder: Path, draft: str = "none", backend: Any = AT_ONCE, **config: Any
) -> SpecDecoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.backend.defaults", lambda: backend)
        return SpecDecoder.from_pretrained(
            str(folder), draft=draft, config=EngineConfig(**config)
        )


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in BOTH_WAYS])
@pytest.mark.parametrize(
    ("draft", "backend", "step", "batch"),
    [("none", AT_ONCE, 4, 3), ("ngram", BEHIND, 512, 3)],
    ids=["short-chunks", "behind"],
)
def test_every_token_is_mlx_vlms(
    folders: Callable[[str], Any],
    family: str,
    draft: str,
    backend: Any,
    step: int,
    batch: int,
) -> None:
    """Features in another order, a lost shift, a chunk that ends inside an image."""
    folder, model = folders(family)
    decoder = decoder_of(
        folder, draft, backend, batch_size=batch, prefill_step_size=step,
        num_draft_tokens=3 if draft != "none" else 0,
    )  # fmt: skip
    results = decoder.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids, expected = by_mlx_vlm(decoder, model, prompt)
        assert list(decoder._encode(prompt).token_ids) == ids
        assert result.token_ids == expected


@pytest.mark.parametrize(
    ("family", "draft"),
    [
        *((f, "self:4bit") for f in ("gemma4", "qwen3_5", "qwen3_vl", "lfm2-vl")),
        ("mistral3", "layers:0"),
        ("qwen2_5_vl", "layers:1"),
        ("qwen3_vl", "text"),
        ("gemma4", "text"),
    ],
)
def test_every_kind_of_draft_is_lossless(
    folders: Callable[[str], Any], family: str, draft: str, tmp_path: Path
) -> None:
    """A draft is given embeddings or positions that it cannot read; or none agree."""
    folder, model = folders(family)
    if draft == "text":
        draft = str(tmp_path / "draft")
        write_vision_folder(tmp_path / "draft", family, seed=1)
    decoder = decoder_of(
        folder, draft, batch_size=3, num_draft_tokens=3, prefill_step_size=5
    )
    results = decoder.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == by_mlx_vlm(decoder, model, prompt)[1]
        assert result.drafted > 0


def write_drafting_head(path: Path, family: str, head: str) -> str:
    """Write a target that sees and a random head for it; the draft's name."""
    layers = 0 if head == "assistant" else published.LAYERS
    write_vision_folder(path, family, layers=layers)
    file = path / "model.safetensors"
    stored: Any = mx.load(str(file))
    for name, array in stored.items():
        if name.endswith(("lm_head.weight", "embed_tokens.weight")):
            array[1:4] *= 6  # the target and the head write few tokens, often the same
    mx.save_safetensors(str(file), stored)
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    sizes = {"hidden_size": text["hidden_size"], "vocab_size": config["vocab_size"]}
    if head.startswith("mtp"):
        plain = load(str(path)).model
        arrays = head_arrays(family, plain, make_parts(family, plain))
        if head == "mtp beside":
            file = path / "mtp.safetensors"
        else:
            arrays = {**stored, **arrays}
        mx.save_safetensors(str(file), arrays)
        return "mtp"
    if head == "assistant":
        draft = published.assistant_config(
            sliding_window=12, num_global_key_value_heads=2,
            vocab_size=sizes["vocab_size"],
        )  # fmt: skip
        draft["backbone_hidden_size"] = sizes["hidden_size"]
    else:
        draft = getattr(published, f"{head}_config")(**sizes)
    written = path.with_name(f"{path.name}-{head}")
    published.write_head(written, draft)
    return str(written)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("qwen3_5", "mtp"),
        ("qwen3_5", "mtp beside"),
        ("qwen3_5", "dflash"),
        ("qwen3_vl", "eagle"),
        ("qwen3_vl", "dspark"),
        ("qwen2_5_vl", "peagle"),
        ("mistral3", "dflash"),
        ("gemma3", "eagle"),
        ("gemma4", "assistant"),
        ("gemma4-large", "assistant"),
    ],
)
def test_every_kind_of_head_is_lossless(family: str, head: str, tmp_path: Path) -> None:
    """A head in the checkpoint is taken for the tower; or it reads another row."""
    draft = write_drafting_head(tmp_path / "target", family, head)
    params = SamplingParams(max_tokens=2 * MAX_TOKENS)
    plain, alone, ragged = (
        decoder_of(
            tmp_path / "target", name, batch_size=batch, prefill_step_size=step,
            num_draft_tokens=0 if name == "none" else 3, prefix_cache_memory=10**7,
        )
        for name, batch, step in (("none", 1, 512), (draft, 1, 512), (draft, 3, 5))
    )  # fmt: skip
    expected = [r.token_ids for r in plain.generate(PROMPTS, params)]
    accepted = [r.accepted for r in alone.generate(PROMPTS, params)]
    for _ in range(2):  # the second time from the prefix cache
        results = ragged.generate(PROMPTS, params)
        assert [r.token_ids for r in results] == expected
        assert [r.accepted for r in results] == accepted
        assert all(r.drafted > 0 for r in results)
    # Others have an embedding or a vocabulary of their own, and agree too seldom.
    assert any(accepted) or head in ("eagle", "peagle", "assistant")


def test_a_cancelled_image_changes_no_other_row(folders: Callable[[str], Any]) -> None:
    """Rows that stay read the shift of a row that has left."""
    folder, model = folders("qwen3_vl")
    decoder = decoder_of(folder, batch_size=3, num_draft_tokens=0, prefill_step_size=4)
    session, results = decoder.session(), {}
    params = SamplingParams(max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS)
    numbers = [session.add(PROMPTS[i], params) for i in (2, 0, 4, 1, 3)]
    steps = 0
    while session.busy:
        for event in session.step():
            if event.result is not None:
                results[event.index] = event.result
        steps += 1
        if steps in (2, 9):  # while it is prefilled, and while it decodes
            assert session.cancel(numbers[steps == 9])
    decoded = {n: r.token_ids for n, r in results.items() if n not in numbers[:2]}
    for number, i in zip(numbers[2:], (4, 1, 3), strict=True):
        assert decoded[number] == by_mlx_vlm(decoder, model, PROMPTS[i])[1]


def test_a_draft_may_read_layers_that_images_reach(
    folders: Callable[[str], Any],
) -> None:
    """A layer that is recorded loses what DeepStack adds to its output."""
    folder, model = folders("qwen3_vl")
    config = EngineConfig(batch_size=3, num_draft_tokens=2)
    decoder = SpecDecoder(
        load(str(folder)), drafter=lambda context: Guesses([], (0, 1)), config=config
    )
    results = decoder.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == by_mlx_vlm(decoder, model, prompt)[1]
        assert result.drafted > 0


@pytest.mark.parametrize("late", [False, True], ids=["embedded", "in-a-forward"])
def test_an_image_that_fails_ends_its_request_alone(
    folders: Callable[[str], Any], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that join with it or run are lost, or read the positions of its chunk."""
    folder, model = folders("qwen3_vl")
    usual = vision.ImageEncoder.embeddings_of
    usual_late = image_rows.RowImages._embedded
    fails = True

    def check(image: Image, now: bool) -> None:
        if fails and now and image.digest == SQUARE.digest:
            raise PromptError("the model does not take this image")

    def embeddings_of(self: Any, image: Image) -> mx.array:
        check(image, not late)
        return usual(self, image)

    def embedded(self: Any, *args: Any) -> list[mx.array]:
        for _, placed in args[-1]:
            check(placed.image, late)
        return usual_late(self, *args)

    monkeypatch.setattr(vision.ImageEncoder, "embeddings_of", embeddings_of)
    monkeypatch.setattr(image_rows.RowImages, "_embedded", embedded)
    decoder = decoder_of(folder, batch_size=2, num_draft_tokens=0, prefill_step_size=4)
    texts = said("one"), said("a text that goes on for longer")
    prompts = [*texts, PROMPTS[2], PROMPTS[0], PROMPTS[3]]
    lengths = [2, *[MAX_TOKENS] * 4]
    results = decoder.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    assert [r.finish_reason == "error" for r in results] == [False] * 2 + [
        True, False, True,
    ]  # fmt: skip
    for i in (2, 4):
        assert "does not take this image" in str(results[i].error)
    fails = False
    for i in (0, 1, 3):
        expected = by_mlx_vlm(decoder, model, prompts[i])[1]
        assert results[i].token_ids == expected[: lengths[i]]


def by_masks(decoder: SpecDecoder, prompt: list[dict[str, Any]]) -> list[int]:
    """Gemma as transformers masks it: tokens of an image see each other both ways.

    In Gemma 4 they do so in layers with a sliding window only. Every token is computed
    from the whole text, without a cache.
    """
    encoded = decoder._encode(prompt)
    encoder: Any = decoder._target.images
    model: Any = decoder.target.model
    prompt_ids = list(encoded.token_ids)
    image_of = [-1] * len(prompt_ids)
    for number, image in enumerate(encoded.images):
        for place in image.places:
            image_of[place] = number
    window = model.language_model.args.sliding_window
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        ids = [*prompt_ids, *tokens]
        owner = image_of + [-1] * len(tokens)
        n = len(ids)
        whole = [
            [k <= q or (owner[q] == owner[k] != -1) for k in range(n)] for q in range(n)
        ]
        near = [[whole[q][k] and k > q - window for k in range(n)] for q in range(n)]
        kind = decoder.target.config["model_type"]
        full = mx.array(whole) if kind == "gemma3" else mx.tri(n, dtype=mx.bool_)
        masks = {None: full, window: mx.array(near)}
        embedded = model.language_model.model.embed_tokens(mx.array([ids]))
        for image in encoded.images:
            rows = encoder.embeddings_of(image.image)[0]
            embedded[0, mx.array(image.places)] = rows
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                f"mlx_lm.models.{kind[:6]}_text.create_attention_mask",
                lambda h, cache, window_size=None, masks=masks: masks[window_size],
            )
            logits = model(mx.array([ids]), input_embeddings=embedded)
        token = int(mx.argmax(logits[0, -1]))
        if token in decoder.tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("family", BOTH_WAYS)
@pytest.mark.parametrize(
    ("draft", "backend", "step"),
    [("none", AT_ONCE, 3), ("ngram", BEHIND, 16), ("ngram", AT_ONCE, 512)],
)
def test_tokens_of_an_image_see_each_other(
    folders: Callable[[str], Any], family: str, draft: str, backend: Any, step: int
) -> None:
    """A chunk ends inside an image; a mask belongs to another image, layer or row."""
    folder, _ = folders(family)
    decoder = decoder_of(
        folder, draft, backend, batch_size=3, prefill_step_size=step,
        num_draft_tokens=3 if draft != "none" else 0, prefix_cache_memory=10**7,
    )  # fmt: skip
    for _ in range(2):  # the second time from the prefix cache
        results = decoder.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS))
        expected = [by_masks(decoder, prompt) for prompt in PROMPTS]
        assert [r.token_ids for r in results] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_decoded_as_without_images(
    folders: Callable[[str], Any], family: str
) -> None:
    """A model that can see computes a text with other bits than one that cannot."""
    folder, _ = folders(family)
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=True)
    texts = [said("hello you"), said("a longer text without any image")]
    decoder = decoder_of(folder, batch_size=4, num_draft_tokens=0)
    without = load(str(folder))
    object.__setattr__(without, "folder", None)  # no tower
    blind = SpecDecoder(without, config=EngineConfig(batch_size=4, num_draft_tokens=0))
    assert blind._target.images is None
    rows = zip(
        decoder.generate(texts, params), blind.generate(texts, params), strict=True
    )
    for row, other in rows:
        assert row.token_ids == other.token_ids
        assert row.logprobs is not None
        assert other.logprobs is not None
        assert [x.logprob for x in row.logprobs] == [x.logprob for x in other.logprobs]


def test_prefixes_know_images_by_their_content(
    folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another image's keys answer; or the tower runs again for a second question."""
    folder, model = folders("mistral3")
    encoded: list[str] = []
    usual = vision.ImageEncoder.embeddings_of

    def counted(self: Any, image: Image) -> mx.array:
        encoded.append(image.digest)
        return usual(self, image)

    monkeypatch.setattr(vision.ImageEncoder, "embeddings_of", counted)
    long = "a text that fills a block of the prefix cache " * 8
    first = said(WIDE, long, "one")
    second = said(WIDE, long, "two")
    other = said(random_image(90, 40, seed=77), long, "one")
    for _ in range(2):  # the second decoder reads what the first has stored
        decoder = decoder_of(
            folder, batch_size=1, num_draft_tokens=0, prefix_cache=tmp_path / "prefixes"
        )
        found = []
        for prompt in (first, second, other):
            encoded.clear()
            (result,) = decoder.generate(
                [prompt], SamplingParams(max_tokens=MAX_TOKENS)
            )
            found.append((result.prefix_tokens, len(encoded)))
            assert result.token_ids == by_mlx_vlm(decoder, model, prompt)[1]
        assert found[1][0] > 200
        assert found[1][1] == 0
    assert found[0][1] == found[2][1] == 0


@pytest.mark.parametrize("family", ["gemma3", "lfm2-vl", "qwen3_5"])
def test_a_second_question_begins_after_the_image(
    folders: Callable[[str], Any],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """States and rings are stored where prompts end, so the image is read again."""
    folder, _ = folders(family)
    long = "a text that comes before the image " * 8
    (whole,) = decoder_of(folder, num_draft_tokens=0).generate(
        [said(long, WIDE, "two")], SamplingParams(max_tokens=MAX_TOKENS)
    )
    for question in ("one", "two"):
        decoder = decoder_of(
            folder, batch_size=1, num_draft_tokens=0, prefix_cache=tmp_path / "prefixes"
        )
        prompt = said(long, WIDE, question)
        (image,) = decoder._encode(prompt).images
        (result,) = decoder.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS))
        # The next decoder may not look at it.
        monkeypatch.setattr(vision.ImageEncoder, "embeddings_of", None)
    assert result.prefix_tokens >= image.stop
    assert result.token_ids == whole.token_ids


def test_salts_hold_for_images(folders: Callable[[str], Any]) -> None:
    """A client learns which images others have sent."""
    decoder = decoder_of(
        folders("mistral3")[0], num_draft_tokens=0, prefix_cache_memory=10**7
    )
    prompt = said(WIDE, "a text that fills a block of the prefix cache " * 8)
    reused = [
        decoder.generate([prompt], SamplingParams(max_tokens=2, cache_salt=salt))[0]
        for salt in ("one", "two", "one")
    ]
    first, other, again = (result.prefix_tokens for result in reused)
    assert first == other == 0 < again


def test_a_tower_has_the_weights_of_its_model(
    folders: Callable[[str], Any], tmp_path: Path
) -> None:
    """A file that was left in the folder, and is no part of the model, is read."""
    folder, _ = folders("mistral3")
    stray = tmp_path / "stray"
    shutil.copytree(folder, stray)
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    index = {"weight_map": dict.fromkeys(arrays, "model.safetensors")}
    (stray / "model.safetensors.index.json").write_text(json.dumps(index))
    old = {name: array + 1 for name, array in arrays.items()}
    mx.save_safetensors(str(stray / "model_old.safetensors"), old)
    encoders = [vision.image_encoder(load(str(each))) for each in (folder, stray)]
    one, other = (e.embeddings_of(WIDE) for e in encoders if e is not None)
    assert mx.array_equal(one, other).item()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (said("a [IMG] of mine", WIDE, "b"), "image markers for 1 images"),
        ([{"role": "user", "content": [{"type": "video"}]}], "videos are not"),
    ],
)
def test_refused(
    folders: Callable[[str], Any], prompt: list[dict[str, Any]], message: str
) -> None:
    """A marker in a user's text takes the place of an image."""
    decoder = decoder_of(folders("mistral3")[0], num_draft_tokens=0)
    with pytest.raises(PromptError, match=message):
        decoder.generate([prompt])


def test_a_target_that_reads_text_only(tmp_path: Path) -> None:
    """An image is dropped without a word."""
    write_folder(tmp_path / "text")
    decoder = decoder_of(tmp_path / "text", num_draft_tokens=0)
    decoder.tokenizer.chat_template = "{% for m in messages %}x{% endfor %}"
    with pytest.raises(PromptError, match="reads text only"):
        decoder.generate([said("look", WIDE, "?")])


def test_threads_do_not_keep_what_mlx_vlm_changes() -> None:
    """A thread takes another's changes for what was there before, and restores them."""
    usual = vars(AutoProcessor)["from_pretrained"]
    entered, both, left = (threading.Event() for _ in range(3))

    def first() -> None:
        with vision._as_before():
            AutoProcessor.from_pretrained = None
            entered.set()
            both.wait(0.2)
        left.set()

    def second() -> None:
        entered.wait()
        with vision._as_before():
            both.set()
            left.wait()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vars(AutoProcessor)["from_pretrained"] is usual


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_no_name_of_the_hub(
    family: str, folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a relative folder lacks came from the hub, from another model."""
    folder, asked = folders(family)[0], []

    def download(name: str, *_: Any, **__: Any) -> str:
        asked.append(name)
        raise OSError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(folder.parent)
    encoder = vision.image_encoder(load(folder.name))
    assert encoder is not None
    assert encoder.marker
    assert all(Path(name).is_absolute() for name in asked)


def test_threads_load_one_processor(
    folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests at once load it twice, and one of the two is dropped in use."""
    encoder = vision.image_encoder(load(str(folders("mistral3")[0])))
    assert encoder is not None
    usual, loads, again = vision._mlx_vlm, [], threading.Event()

    def loading(*arguments: Any) -> Any:
        loads.append(arguments)
        if len(loads) > 1:
            again.set()
        again.wait(0.2)
        return usual(*arguments)

    monkeypatch.setattr(vision, "_mlx_vlm", loading)
    with ThreadPoolExecutor(2) as pool:
        markers = list(pool.map(lambda _: encoder.marker, range(2)))
    assert markers == ["[IMG]"] * 2
    assert len(loads) == 1


def test_rows_decode_between_layers_of_the_tower(
    folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row waits for a whole tower, which takes seconds for a large image."""
    monkeypatch.setattr(vision, "PAUSES", (0.0, 0.0))
    decoder = decoder_of(folders("qwen3_vl")[0], batch_size=2, num_draft_tokens=0)
    usual, log = vision.ImageEncoder.embed, []

    def embed(self: Any, image: Image) -> Iterator[None]:
        for _ in usual(self, image):
            log.append("layer")
            yield

    monkeypatch.setattr(vision.ImageEncoder, "embed", embed)
    prompts = [said("one that decodes for long"), said("short"), said(WIDE, "late")]
    params = [SamplingParams(max_tokens=n, min_tokens=n) for n in (24, 2, 2)]
    for event in decoder.stream(prompts, params):
        log.append(f"token {event.index}")
    depth = decoder.target.config["vision_config"]["depth"]
    at = [i for i, what in enumerate(log) if what == "layer"]
    assert len(at) >= depth
    assert all("token 0" in log[a:b] for a, b in pairwise(at))


def test_an_image_that_is_prepared_waits_for_no_other(
    folders: Callable[[str], Any],
) -> None:
    """A request whose image is being prepared stalls all rows."""
    encoder = vision.image_encoder(load(str(folders("mistral3")[0])))
    assert encoder is not None
    expected = encoder.embeddings_of(SQUARE)
    encoder.text_of(WIDE)
    with encoder._processing, ThreadPoolExecutor(1) as pool:
        rows = pool.submit(lambda: np.array(encoder.embeddings_of(WIDE))).result(60)
    assert rows.shape[-1] == expected.shape[-1]


def test_a_chunk_of_several_large_images_runs_the_tower_once_for_each(
    folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drops the other's embeddings, which are computed again, and rows wait."""
    folder, model = folders("qwen3_vl")
    monkeypatch.setattr(vision, "_KEPT_BYTES", 1)
    built, usual = [], vision.ImageEncoder._built

    def counted(self: Any, image: Image) -> Any:
        built.append(image.digest)
        return usual(self, image)

    monkeypatch.setattr(vision.ImageEncoder, "_built", counted)
    decoder = decoder_of(folder, batch_size=1, num_draft_tokens=0)
    prompt = said(TALL, " and ", SQUARE, "?")
    params = SamplingParams(max_tokens=MAX_TOKENS)
    (result,) = decoder.generate([prompt], params)
    assert built == [TALL.digest, SQUARE.digest]
    assert result.token_ids == by_mlx_vlm(decoder, model, prompt)[1]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma4_unified"])
def test_the_plan_bounds_what_a_tower_takes(family: str, tmp_path: Path) -> None:
    """A prompt with an image passes the memory limit while the tower runs."""
    wide = {"hidden_size": 256, "intermediate_size": 1024}
    if "head_dim" in FAMILIES[family][1]["vision_config"]:
        wide["head_dim"] = wide["global_head_dim"] = 128
    if family == "qwen2_vl":
        wide = {"embed_dim": 256, "mlp_ratio": 4}
    write_vision_folder(tmp_path / "wide", family, **wide)
    target = load(str(tmp_path / "wide"))
    encoder = vision.image_encoder(target)
    plan = vision.tower_memory(target, fuses=False)
    assert encoder is not None
    assert plan is not None
    weights = arrays_of(encoder._loaded_tower())
    assert sum(array.nbytes for _, array in weights) <= plan.held_bytes
    for image in (WIDE, SQUARE):
        tokens = encoder.count_of(image)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        encoder.embeddings_of(image)
        assert mx.get_peak_memory() - before <= plan.peak(tokens)


def test_a_tower_without_numbers_has_no_plan(tmp_path: Path) -> None:
    """``estimate`` ends with an error of Python's where loading would say what is."""
    arrays = {"vision_tower.patch": mx.zeros((2, 2), mx.uint32)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    config = {"model_type": "gemma3", "vision_config": {}}
    described: Any = SimpleNamespace(config=config, folder=tmp_path)
    assert vision.tower_memory(described, fuses=False) is None


def test_an_image_that_passes_the_limit_is_refused(
    folders: Callable[[str], Any],
) -> None:
    """The plan of a request does not count its image."""
    decoder = decoder_of(folders("qwen3_vl")[0], batch_size=1, num_draft_tokens=0)
    preflight, image = decoder._preflight, decoder._encode(said(WIDE, "a")).images
    assert preflight is not None
    params = SamplingParams(max_tokens=1)
    exact = preflight.plan.peak([RowNeeds(30, params)])
    tight = replace(preflight, limit=exact)
    tight.check(30, params)
    with pytest.raises(MemoryLimitError, match=r"30 prompt tokens \(\d+ of images\)"):
        tight.check(30, params, image)


def test_images_longer_than_the_context_are_refused_by_their_tokens(
    folders: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says to shorten a short text; or all images are prepared before."""
    decoder = decoder_of(folders("qwen3_vl")[0], num_draft_tokens=0)
    encoder: Any = decoder._target.images
    tokens = len(decoder._encode(said(WIDE, "a")).token_ids)
    image = encoder.count_of(WIDE)
    usual, counts = vision.ImageEncoder.count_of, []

    def count_of(self: Any, image: Image) -> int:
        counts.append(image)
        return usual(self, image)

    monkeypatch.setattr(vision.ImageEncoder, "count_of", count_of)
    way = "shorten it, or send fewer or smaller images"
    for prompt, context, begin in (
        (said(WIDE, "a"), tokens - 1, f"it has {tokens} tokens ({image} of images)"),
        (said(WIDE, WIDE, TALL, "a"), 2 * image - 1, f"it has {2 * image} tokens or "),
    ):
        counts.clear()
        decoder.prompt_limit = replace(decoder.prompt_limit, context_length=context)
        with pytest.raises(PromptTooLongError) as refused:
            decoder._encode(prompt)
        assert str(refused.value).startswith(begin)
        assert str(refused.value).endswith(way)
    assert len(counts) == 2


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl", "gemma4_unified"])
def test_the_tower_is_loaded_at_the_start_on_request(
    folders: Callable[[str], Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first image waits for the weights all the same."""
    folder, _ = folders(family)
    params = SamplingParams(max_tokens=4)
    later = decoder_of(folder, num_draft_tokens=0)
    early = decoder_of(folder, num_draft_tokens=0, load_vision=True)
    assert later._target.images is not None
    assert later._target.images._tower is None
    expected = later.generate(PROMPTS[:1], params)
    monkeypatch.setattr(vision, "_load_tower", None)
    monkeypatch.setattr(vision, "_mlx_vlm", None)
    (result,) = early.generate(PROMPTS[:1], params)
    assert result.token_ids == expected[0].token_ids


def test_a_tower_that_cannot_be_loaded_at_the_start(
    folders: Callable[[str], Any], tmp_path: Path
) -> None:
    """The server starts, and refuses every image."""
    write_folder(tmp_path / "text")
    with pytest.raises(ConfigError, match="reads text only: leave load_vision out"):
        decoder_of(tmp_path / "text", load_vision=True)
    blind = tmp_path / "blind"
    shutil.copytree(folders("mistral3")[0], blind)
    arrays: Any = mx.load(str(blind / "model.safetensors"))
    text = {k: v for k, v in arrays.items() if k.startswith("language_model.")}
    mx.save_safetensors(str(blind / "model.safetensors"), text)
    with pytest.raises(UnsupportedModelError, match="no weights of an image tower"):
        decoder_of(blind, load_vision=True)
    seeing = decoder_of(folders("mistral3")[0])
    assert seeing._preflight is not None
    needed = seeing._preflight.plan.peak([RowNeeds(1, SamplingParams(max_tokens=1))])
    decoder_of(folders("mistral3")[0], memory_limit=needed)
    with pytest.raises(MemoryLimitError, match="the models need"):
        decoder_of(folders("mistral3")[0], memory_limit=needed, load_vision=True)
