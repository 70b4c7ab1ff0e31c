"""The process that renders chat templates."""

from __future__ import annotations

from typing import Any

from ..utils.child import serve

#: Bytes that the process may allocate after its start.
_MEMORY = 1 << 30
#: The most characters of a text: more than any context holds.
_CHARACTERS = 1 << 26


def _main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: dict[str, Any]) -> str:
        try:
            ((text,), _) = render_jinja_template(**request)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(str(error)[:_CHARACTERS]) from None
        if len(text) > _CHARACTERS:
            raise MemoryError
        return str(text)

    serve(render, memory=_MEMORY)


if __name__ == "__main__":
    _main()
