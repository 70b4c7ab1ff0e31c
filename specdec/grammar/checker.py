"""The process in which grammars are tried before they are compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..utils.child import serve
from .library import error_of, llguidance, located, matcher_of, tokenizer_of, validate

T = TypeVar("T")

#: Bytes that the process may allocate after its start, the deepest stack included.
_MEMORY = 3 << 29


def _with_stack(nbytes: int, work: Callable[[], T]) -> T:
    """Call ``work`` in a thread that has a stack of this size."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # a library's panic is no Exception
            errors.append(RuntimeError(str(error)))

    threading.stack_size(nbytes)
    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError as error:
        raise MemoryError from error
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _main() -> None:
    llguidance()
    # The tokenizer of the grammars that came last.
    key, tokenizer = "", None

    def check(request: dict[str, Any]) -> str | None:
        """Why a grammar cannot be used, or ``""``; ``None``: it has no tokenizer."""
        nonlocal key, tokenizer
        if "words" in request:
            key, tokenizer = request["key"], tokenizer_of(request["words"])
            return ""
        grammar, stack = request["grammar"], request["stack"]
        if not request["key"]:
            reason = _with_stack(stack, lambda: validate(*grammar))
        elif request["key"] != key or tokenizer is None:
            return None
        else:
            matcher = _with_stack(stack, partial(matcher_of, tokenizer, *grammar))
            reason = error_of(matcher)  # with a usual stack, as rows do it
        kind, text = grammar
        if reason and kind == "json_schema":
            reason = _with_stack(stack, lambda: located(text, reason))
        return reason

    serve(check, memory=_MEMORY)


if __name__ == "__main__":
    _main()
