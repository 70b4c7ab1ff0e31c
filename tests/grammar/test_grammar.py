"""Grammars that users write: what is refused, before any work, and what is kept."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec import ConfigError, EngineConfig, Grammar, SamplingParams, SpecDecoder
from specdec.grammar import GrammarCompiler, check_grammar, compiler
from specdec.grammar.spec import MAX_GRAMMAR_BYTES
from specdec.models import LoadedModel
from specdec.models.gguf.header import read_header
from specdec.models.gguf.tokenizer import build_tokenizer
from specdec.prompts import encode
from specdec.utils.child import Child
from tests.byte_tokenizer import byte_tokenizer
from tests.models.gguf_files import Vocabulary, byte_level, write_gguf
from tests.models.test_gguf_tokenizer import sentencepiece_vocabulary

YES = Grammar.regex("(yes|no)")


def until(condition: Callable[[], bool]) -> None:
    """Wait for what threads do."""
    while not condition():
        time.sleep(0.01)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


PATTERNS = [{"pattern": f".*a.{{{i}}}b"} for i in range(9)]


def chained(n: int) -> dict[str, Any]:
    """A pattern in every link: all of them hold for the first."""
    links: dict[str, Any] = {
        f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f".*a.{{{i}}}b"}
        for i in range(n)
    }
    return {"$defs": links | {f"d{n}": {}}, "$ref": "#/$defs/d0"}


def hidden(n: int) -> str:
    return json.dumps({"allOf": PATTERNS[:n]}).replace("pattern", "p\\u0061ttern")


looped: dict[str, Any] = {}
looped["items"] = looped


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex(""), "regular expression is ''"),
        (lambda: Grammar.regex("a\ud800"), "half of a surrogate pair"),
        (lambda: Grammar.lark("x" * (MAX_GRAMMAR_BYTES + 1)), "131073 bytes"),
        (lambda: Grammar.regex(7), "must be a text"),  # type: ignore[arg-type]
        (lambda: Grammar("grok", "x"), "json_schema, regex or lark"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema("{"), "cannot be read"),
        (lambda: Grammar.json_schema("[1]"), "must be an object"),
        (lambda: Grammar.json_schema(nested(101)), "more than 100 deep"),
        (lambda: Grammar.json_schema("false"), "must be an object"),
        (lambda: Grammar.json_schema({"allOf": PATTERNS}), "9 patterns"),
        (lambda: Grammar.json_schema(chained(9)), "9 patterns"),
        (lambda: Grammar.lark("start: A\nA: /a/" + ' & /"&a/' * 9), "9 patterns"),
        (lambda: Grammar.lark(f"start: %json {hidden(9)}"), "9 patterns"),
        (lambda: Grammar.json_schema(nested(10**4)), "JSON"),
        (lambda: Grammar.json_schema(looped), "JSON"),
        (lambda: Grammar.json_schema({"enum": [float("nan")]}), "JSON"),
        (lambda: Grammar.json_schema({"enum": [{1, 2}]}), "JSON"),
        (lambda: SamplingParams(grammar="x"), "must be a Grammar"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=YES, min_tokens=2), "min_tokens"),
        (lambda: SamplingParams(grammar=YES, sampler=len), "sampler"),
        (lambda: SamplingParams(grammar=YES, logits_processors=(max,)), "processors"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_written(
    make: Callable[[], Any], message: str
) -> None:
    """One line each, before anything is compiled."""
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("a("),
        Grammar.regex("(?=a)b"),
        Grammar.lark("start: nowhere"),
        Grammar.lark("start: " + "(" * 20000 + '"a"' + ")" * 20000),
        Grammar.json_schema({"type": "unheard"}),
        Grammar.json_schema({"not": {"type": "string"}}),
        Grammar.json_schema({"x-guidance": {"lenient": 7}}),
        Grammar.json_schema({"$ref": "http://example.com/other.json"}),
    ],
)
def test_what_llguidance_refuses_is_one_line(grammar: Grammar) -> None:
    """With a tokenizer and, for commands, before there is one."""
    for refuse in (check_grammar, GrammarCompiler(byte_tokenizer(), 300).compile):
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            refuse(grammar)
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


def test_patterns_of_separate_places_are_not_counted() -> None:
    """A schema of many patterns is usual; of many that hold together, it is not."""
    properties = {f"p{i}": each for i, each in enumerate(PATTERNS)}
    check_grammar(Grammar.json_schema({"properties": properties}))
    check_grammar(Grammar.json_schema({"allOf": PATTERNS[:2]}))


def test_a_grammar_that_nothing_follows_is_refused() -> None:
    """Its rows would fail at their first token."""
    with pytest.raises(ConfigError, match="no text can follow it"):
        GrammarCompiler(byte_tokenizer(), 300).compile(
            Grammar.json_schema({"$ref": "#"})
        )


def test_the_deepest_grammars_do_not_end_the_process() -> None:
    """A stack that overflows cannot be caught: they get one that is deep enough."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(8000))
    check_grammar(Grammar.lark(f'start: r0\n{chain}r8000: "a"\n'))
    links = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2900)}
    schema = {"$defs": links | {"2900": {}}, "$ref": "#/$defs/0"}
    check_grammar(Grammar.json_schema(schema))


@pytest.fixture
def bad_checkers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children that take as much as a grammar says."""
    grammars = compiler._Checkers()
    module = "tests.grammar.bad_checker"
    monkeypatch.setattr(compiler, "Child", lambda _, again: Child(module, again=again))
    monkeypatch.setattr(compiler, "_CHECKERS", grammars)
    yield
    for each in grammars._all:
        each.close()


def test_grammars_in_use_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that every request has is compiled again and again for the rare ones."""
    monkeypatch.setattr(compiler, "_KEPT", 2)
    grammars = GrammarCompiler(byte_tokenizer(), 300, bounded=False)
    rare = [Grammar.regex(text) for text in "abc"]
    for grammar in rare:
        grammars.compile(YES)
        grammars.compile(grammar)
        assert grammars.kept(grammar) is not None
        assert grammars.kept(YES) is not None
    assert [grammars.kept(grammar) is None for grammar in rare] == [True, True, False]


@pytest.mark.usefixtures("bad_checkers")
def test_what_takes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, memory or stack: none of them is this process's, and no slot is lost.

    Threads that went on for minutes took all four slots, and could end the process.
    """
    grammars = GrammarCompiler(byte_tokenizer(), 300)
    grammars.compile(YES)

    def refused(text: str) -> str:
        with pytest.raises(ConfigError) as raised:
            grammars.compile(Grammar.regex(text))
        return str(raised.value)

    with ThreadPoolExecutor(12) as pool, monkeypatch.context() as patch:
        patch.setattr(compiler, "COMPILE_SECONDS", 3.0)
        bad = ["slow", "slow", "large", "deep", "slower", "slowest", "slowly"]
        said = dict(zip(bad, pool.map(refused, bad), strict=True))
    for text, why in said.items():
        expected = (
            "takes longer than 3 s" if "slow" in text else "takes too much memory"
        )
        assert expected in why or "others have taken longer" in why, (text, why)
    assert "takes longer" in said["slow"]
    until(lambda: not compiler._running)
    for i in range(2 * compiler.AT_ONCE):
        grammars.compile(Grammar.regex(f"quick{i}"))


def test_a_stack_that_is_too_small_ends_the_child_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real overflow, which ended the process: exit code -11."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    deep = Grammar.lark(f'start: r0\n{chain}r4000: "a"\n')
    compiler.GrammarCompiler(byte_tokenizer(), 300).compile(deep)
    monkeypatch.setattr(compiler, "_stack_bytes", lambda grammar: 1 << 18)
    for refuse in (check_grammar, GrammarCompiler(byte_tokenizer(), 300).compile):
        with pytest.raises(ConfigError, match="nested too deeply"):
            refuse(deep)
        with pytest.raises(ConfigError, match="cannot be used"):  # another child
            refuse(Grammar.regex("a("))


def test_no_memory_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare RuntimeError, by which a server seemed to have lost its engine."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    grammars = GrammarCompiler(byte_tokenizer(), 300)
    for _ in range(2):
        with pytest.raises(ConfigError, match="give a shorter one"):
            grammars.compile(YES)


ENDS = """
import sys, threading
from specdec.grammar import Grammar, GrammarCompiler, compiler
from tests.byte_tokenizer import byte_tokenizer
from tests.grammar.test_grammar import large
made = GrammarCompiler(byte_tokenizer(), 300, bounded=sys.argv[1] == "tried")
for i in range(2):
    made.begin(large(i))
while sys.argv[1] == "compiled" and made._tokenizer is None:
    pass
"""


def large(i: int) -> Grammar:
    """A schema that takes a fifth of a second."""
    texts = {
        f"p{i}_{n}": {"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(8)
    }
    parts = [
        {"properties": {f"{k}{n}": v for k, v in texts.items()}} for n in range(80)
    ]
    return Grammar.json_schema({"anyOf": parts})


@pytest.mark.parametrize("phase", ["tried", "compiled"])
def test_the_end_while_grammars_compile(phase: str) -> None:
    """Python that ends while a thread is in llguidance: SIGSEGV at SIGTERM."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ENDS, phase], cwd=root, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_only_announced_does_not_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would compile all that rank 0 refused before what it has to have."""
    go, compiled = threading.Event(), GrammarCompiler._compiled

    def slow(self: GrammarCompiler, grammar: Grammar) -> Any:
        go.wait(60)
        return compiled(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)
    follower = GrammarCompiler(byte_tokenizer(), 300, bounded=False)
    for i in range(3 * compiler.AT_ONCE):
        follower.begin(Grammar.regex(f"{i}x"))
    under_way = len(compiler._running)
    go.set()
    assert under_way == compiler.AT_ONCE
    follower.compile(YES)


def test_without_the_library_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[structured\]'"):
        check_grammar(YES)


def test_tokenizers_that_cannot_be_used_are_named() -> None:
    words = Tokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="no"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words)

    class Slow:
        eos_token_ids = frozenset({1})

    for tokenizer, message in (
        (TokenizerWrapper(fast, eos_token_ids={1}), "llguidance refuses it"),
        (TokenizerWrapper(fast, eos_token_ids=set()), "end-of-sequence"),
        (Slow(), "fast tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            GrammarCompiler(tokenizer, 300).compile(YES)


TEXTS = ("the cat", '{"naïve": [1, 23], "日本": "🤗\\n"}', " x1  y\n\tz")


@pytest.mark.parametrize(
    "vocabulary",
    [
        byte_level("qwen2"),
        sentencepiece_vocabulary(space_prefix=False),
        sentencepiece_vocabulary(space_prefix=True),
    ],
)
def test_gguf_tokenizers_spell_what_grammars_allow(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """Byte-level and SentencePiece: the tokens of a text are allowed, and then its end.

    A vocabulary read wrongly (blanks, bytes, specials) refuses its own spelling.
    """
    file = write_gguf(tmp_path / "t.gguf", "llama", {}, {}, vocabulary)
    tokenizer: Any = build_tokenizer(read_header(file))
    grammars = GrammarCompiler(tokenizer, len(tokenizer.get_vocab()))
    for text in TEXTS:
        tokens = tokenizer.encode("x" + text, add_special_tokens=False)
        # A prefix space is no part of a text in the middle.
        first = next(
            n for n in range(len(tokens)) if tokenizer.decode(tokens[:n]) == "x"
        )
        quoted = json.dumps(text, ensure_ascii=False)
        matcher = grammars.compile(Grammar.lark(f"start: {quoted}"))._matcher
        for token in tokens[first:]:
            assert not matcher.is_accepting()
            assert matcher.validate_tokens([token]) == 1, (text, token)
            assert matcher.consume_token(token)
        assert matcher.is_accepting()


@pytest.fixture(scope="module")
def decoder(tiny_model: Callable[..., Any]) -> SpecDecoder:
    tokenizer: Any = byte_tokenizer()
    vocab_size = len(tokenizer.get_vocab())
    models = [
        LoadedModel(
            tiny_model("llama", seed=i, vocab_size=vocab_size), tokenizer, {}, "m"
        )
        for i in range(2)
    ]
    config = EngineConfig(batch_size=3, num_draft_tokens=2)
    return SpecDecoder(*models, config=config)


def test_the_api_checks_grammars_when_requests_are_added(decoder: SpecDecoder) -> None:
    """Not in the middle of a run; stop texts and cancelled rows leave others alone."""
    bad = SamplingParams(grammar=Grammar.regex("a("))
    fine = SamplingParams(grammar=YES, max_tokens=9)
    with pytest.raises(ConfigError, match="prompt 1: the regular expression"):
        decoder.generate(["x", "y"], [fine, bad])
    alone = decoder.generate(["x"], fine)[0]
    assert alone.text in ("yes", "no")
    session = decoder.session()
    with pytest.raises(ConfigError):
        session.add("x", bad)
    digits = Grammar.regex("[0-9]{40}")
    cancelled = session.add("y", SamplingParams(grammar=digits))
    session.add("x", fine)
    stopped = session.add(
        "z", SamplingParams(grammar=Grammar.regex("ab+c"), stop=("b",))
    )
    cut = session.add("z", SamplingParams(grammar=digits, max_tokens=7))
    results = {}
    for step in range(1000):
        if step == 4:
            session.cancel(cancelled)
        for event in session.step():
            if event.result is not None:
                results[event.index] = event.result
        if not session.busy:
            break
    assert results[cancelled].finish_reason == "cancelled"
    assert results[cancelled + 1].text == alone.text
    assert (results[stopped].text, results[stopped].finish_reason) == ("a", "stop")
    assert (len(results[cut].text), results[cut].finish_reason) == (7, "length")


def test_a_server_compiles_beside_the_rows(
    decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of its own; one that cannot be used is its own request's loss.

    Requests with no grammar, with one that is kept and with another new one overtake a
    slow one.
    """
    asked: list[str] = []
    compiled = GrammarCompiler.compile

    def noted(self: GrammarCompiler, grammar: Grammar) -> Any:
        if grammar not in self._kept:
            asked.append(threading.current_thread().name)
        return compiled(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", noted)

    async def serve() -> list[Any]:
        async with decoder.serve() as server:
            return await asyncio.gather(
                *(
                    server.generate(each, SamplingParams(grammar=Grammar.regex(text)))
                    for each, text in (("x", "aaa"), ("x", "b("), (encoded, "ccc"))
                ),
                return_exceptions=True,
            )

    encoded = encode(decoder.tokenizer, "x")  # a prompt that needs no tokenizing
    first, bad, last = asyncio.run(serve())
    assert (first.text, last.text) == ("aaa", "ccc")
    assert isinstance(bad, ConfigError)
    assert set(asked) == {"specdec compiler"}

    begun, go, make = threading.Event(), threading.Event(), GrammarCompiler._compiled

    def slow(self: GrammarCompiler, grammar: Grammar) -> Any:
        if grammar.text == "ddd":
            begun.set()
            assert go.wait(60)
        return make(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)

    async def overtake() -> str:
        async with decoder.serve() as server:
            ask = partial(SamplingParams, max_tokens=4)
            one = SamplingParams(grammar=Grammar.regex("ddd"))
            waits = asyncio.create_task(server.generate("x", one))
            left = asyncio.create_task(server.generate("x", one))
            await asyncio.to_thread(begun.wait)
            left.cancel()
            await server.generate("y", ask())
            for text in ("ccc", "eee"):
                await server.generate(encoded, ask(grammar=Grammar.regex(text)))
            assert not waits.done()
            go.set()
            return (await waits).text

    assert asyncio.run(overtake()) == "ddd"
