"""The answer to a request that cannot be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from ..errors import (
    ConfigError,
    MemoryLimitError,
    PromptError,
    PromptTooLongError,
    ServerError,
    SpecdecError,
    reason_of,
)
from ..utils.printable import one_line

#: Kinds of errors by status, as OpenAI and Anthropic call them.
_OPENAI = {401: "authentication_error", 404: "not_found_error",
           429: "rate_limit_error"}  # fmt: skip
_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: Codes that Anthropic's clients look for in an error's details.
_DETAILS = frozenset({"thread_unsupported_request"})


class RequestError(SpecdecError):
    """A request that is not answered, or not completely.

    Args:
        message: one line that names the way out.
        status: the response's HTTP status.
        field: the parameter at fault.
        code: a fixed name of the error, for programs.
        retry_after: seconds after which to ask again.
    """

    def __init__(
        self,
        message: object,
        *,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message, field=field)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def invalid(cls, field: str | None, message: object) -> Self:
        """A parameter with an impossible value."""
        return cls(message, field=field, code="invalid_value")

    @classmethod
    def unsupported(cls, field: str | None, message: object) -> Self:
        """A parameter that is not supported, or not with this model."""
        return cls(message, field=field, code="unsupported_parameter")

    @classmethod
    def missing(cls, field: str) -> Self:
        """A parameter that is needed."""
        text = f"{field} is missing: add it"
        return cls(text, field=field, code="missing_parameter")

    @classmethod
    def content(cls, field: str, message: object) -> Self:
        """A part of a message of a kind that is not taken."""
        return cls(message, field=field, code="unsupported_content")

    @classmethod
    def no_model(cls, name: str, served: Sequence[str]) -> Self:
        """The model that is named is not served."""
        text = f"no model {name!r} is served here: use {' or '.join(served)}"
        return cls(text, status=404, field="model", code="model_not_found")

    @classmethod
    def later(cls, code: str, message: object) -> Self:
        """A request to repeat later, or at another server."""
        return cls(message, status=503, code=code, retry_after=5)

    @classmethod
    def stopping(cls) -> Self:
        """No more requests are accepted."""
        return cls.later("stopping", "the server is stopping: ask another one")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(self.retry_after)}

    def openai(self) -> dict[str, Any]:
        """The error object of OpenAI's protocols."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _OPENAI.get(self.status, default),
                "param": self.field,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """The error object of Anthropic's protocol."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC.get(self.status, default)
        error: dict[str, Any] = {"type": kind, "message": str(self)}
        if self.code in _DETAILS:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}


def request_error(error: Exception, names: Mapping[str, str]) -> RequestError:
    """What to answer for an error of the engine.

    Args:
        names: names of the protocol's parameters, by the fields of ``SamplingParams``;
            equal names may be left out.
    """
    if isinstance(error, RequestError):
        return error
    text = str(error)
    if isinstance(error, PromptTooLongError):
        # Clients look for these words, and then shorten the conversation.
        if error.tokens is not None:
            text = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
            if error.image_tokens:
                text += f"; {error.image_tokens} are of images: send smaller ones"
        return RequestError(
            text, field=names.get("prompt"), code="context_length_exceeded"
        )
    if isinstance(error, PromptError):
        text = f"the prompt cannot be used: {text}"
        return RequestError(text, field=names.get("prompt"), code="invalid_prompt")
    if isinstance(error, ConfigError):
        field = error.field
        param = names.get(field, field) if field else None
        if field and text.startswith(field):
            text = f"{param}{text[len(field) :]}"
        return RequestError(text, field=param, code="invalid_value")
    if isinstance(error, MemoryLimitError):
        # The rest of the line names options of the command, which a client cannot set.
        text = one_line(text).partition(": ")[0]
        return RequestError(
            f"{text}: shorten the prompt or ask for fewer tokens",
            field=names.get("max_tokens"),
            code="memory_limit_exceeded",
        )
    if isinstance(error, ServerError):
        return RequestError(text, status=500, code="engine_failed")
    return RequestError(reason_of(error), status=500, code="internal_error")
