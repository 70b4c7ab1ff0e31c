"""One tiny model, one server, and the clients of everyone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import openai
import pytest

from specdec import SpecDecoder
from specdec.server import guard
from tests.server.harness import Running, running, tiny_decoder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> SpecDecoder:
    return tiny_decoder(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def server(decoder: SpecDecoder) -> Iterator[Running]:
    with running(decoder) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def _every_line() -> Iterator[None]:
    """Let no server of a test leave lines out of the logs of later tests."""
    yield
    for name in guard._LOGGERS:
        logging.getLogger(name).removeFilter(guard._LINES_FILTER)
