"""Chat templates of models, rendered in a process of their own.

A template comes with a model and is a program: ``{{ 'a' * 10**10 }}`` takes all memory,
and two nested loops never end. transformers keeps a template from files and from
Python's internals, but bounds neither memory nor time. So templates render in a child
process with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..errors import PromptError
from ..utils.child import Child, ChildError

#: Seconds that one rendering may take; real ones take milliseconds.
SECONDS = 10


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] = MappingProxyType({}),
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool = False,
    answer: bool = True,
) -> str:
    """Chat messages as the text that the model continues.

    Args:
        config: more variables for the template.
        tools: the tools that the model may call.
        continued: the last message is the beginning of the answer.
        answer: what begins an answer follows the messages.

    A Python function that renders messages, mlx-lm's or the user's own, is called in
    this process.

    Raises:
        PromptError: the template refuses the messages, or takes too long or too much
            memory.
        Exception: whatever such a function raises.
    """
    options: dict[str, Any] = {
        **config,
        "add_generation_prompt": answer and not continued,
    }
    if continued:
        options["continue_final_message"] = True
    if tools is not None:
        options["tools"] = list(tools)
    template = template_of(tokenizer, tools=tools)
    if template is None:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    # The same variables as in mlx-lm and transformers.
    known = dict(tokenizer.special_tokens_map)
    if hasattr(tokenizer, "has_thinking"):
        known["enable_thinking"] = tokenizer.has_thinking
    request = {
        **known,
        **options,
        "conversations": [
            [{k: v for k, v in m.items() if v is not None} for m in messages]
        ],
        "chat_template": template,
    }
    try:
        return str(_CHILD.ask(request, SECONDS, default=_plain))
    except ChildError as error:
        way_out = "use another model, or --ignore-chat-template"
        text = str(error)
        raise PromptError(
            text if error.kind == "error" else f"{text}: {way_out}"
        ) from error


def template_of(
    tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> str | None:
    """The template that transformers would render; ``None``: something else renders."""
    # mlx-lm's wrapper passes this on to transformers' tokenizer.
    get = getattr(tokenizer, "get_chat_template", None)
    inner = getattr(get, "__self__", None)
    if get is None or inner is None or inner.chat_template is None:
        return None
    if "apply_chat_template" in vars(tokenizer):  # the user's own
        return None
    apply = getattr(type(inner), "apply_chat_template", None)
    if getattr(apply, "__module__", None) != "transformers.tokenization_utils_base":
        return None
    if inner.init_kwargs.get("chat_template_type"):  # mlx-lm has a function
        return None
    return str(get() if tools is None else get(tools=list(tools)))


_CHILD = Child(f"{__package__}.template_process")
#: Call this when a chat template will be rendered soon.
start = _CHILD.start


def _plain(value: object) -> object:
    """A value that JSON lacks, in the form that transformers passes to templates."""
    if isinstance(value, Mapping):
        return dict(value)
    return f"<{type(value).__name__}>"
