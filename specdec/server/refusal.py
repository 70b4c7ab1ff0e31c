"""The answer to a request that cannot be served."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from ..errors import (
    ConfigError,
    MemoryLimitError,
    PromptError,
    ServerError,
    SpecdecError,
    reason_of,
)
from ..sampling_params import SamplingParams
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


class Refusal(SpecdecError):  # noqa: N818 - it is an answer, too
    """A request that is not answered, or not completely.

    Args:
        message: one line that names the way out.
        status: the response's HTTP status.
        param: the parameter at fault.
        code: a fixed name of the error, for programs.
        retry_after: seconds after which to ask again.
    """

    def __init__(
        self,
        message: object,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def invalid(cls, param: str | None, message: object) -> Self:
        """A parameter with an impossible value."""
        return cls(message, param=param, code="invalid_value")

    @classmethod
    def unsupported(cls, param: str | None, message: object) -> Self:
        """A parameter that is not supported, or not with this model."""
        return cls(message, param=param, code="unsupported_parameter")

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
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """The error object of Anthropic's protocol."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


def refusal_of(error: Exception, names: Mapping[str, str]) -> Refusal:
    """The refusal for an error of the engine.

    Args:
        names: names of the protocol's parameters, by the fields of ``SamplingParams``;
            equal names may be left out.
    """
    if isinstance(error, Refusal):
        return error
    text = str(error)
    if isinstance(error, PromptError):
        too_long = "context" in text and text.endswith("shorten it")
        param = names.get("prompt")
        code = "context_length_exceeded" if too_long else None
        return Refusal(f"the prompt cannot be used: {text}", param=param, code=code)
    if isinstance(error, ConfigError):
        # The message speaks of the grammar, not of the field of SamplingParams.
        found = re.match(
            r"(the|a) (JSON schema|regular expression|Lark grammar|grammar)\b", text
        )
        if found and "grammar" in names:
            where = names["grammar"]
            return Refusal(f"{where}: {text}", param=where, code="invalid_value")
        found = re.match(r"\w+", text)
        field = found.group() if found else ""
        param = names.get(field, field)
        own = field in SamplingParams.__dataclass_fields__ and field not in names
        known = own or param in names.values()
        text = param + text[len(field) :] if known else text
        return Refusal(text, param=param if known else None, code="invalid_value")
    if isinstance(error, MemoryLimitError):
        # The rest of the line names options of the command, which a client cannot set.
        text = one_line(text).partition(": ")[0]
        return Refusal(
            f"{text}: shorten the prompt or ask for fewer tokens",
            param=names.get("max_tokens"),
            code="memory_limit_exceeded",
        )
    if isinstance(error, ServerError):
        return Refusal(text, status=500, code="engine_failed")
    return Refusal(reason_of(error), status=500, code="internal_error")
