#!/usr/bin/env python3
"""Run client libraries against a server here, and print a table of what they do.

Usage: scripts/clients.py [NAME ...]

Each library is installed into build/clients, from the package registry, and runs in a
process of its own. The server is this project's; its engine's answers are scripted, so
that a model with tools is not needed: it calls a tool, and then says what it returned.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "clients"
SECONDS = 180
TOOL = '''
def weather(city: str) -> str:
    """The weather of a city."""
    return "it was 21 degrees in " + city
'''


@dataclass(frozen=True)
class Client:
    """A library and a program that uses it.

    Args:
        package: what pip installs; the first word is the distribution's name.
        does: what the program tries, for the table.
        program: prints its last answer. ``URL`` is the server's address.
    """

    package: str
    does: str
    program: str

    @property
    def name(self) -> str:
        """The distribution's name."""
        return re.split(r"[\[<>=]", self.package)[0]


CLIENTS = (
    Client("openai", "chat, stream, tools, structured answers", TOOL + '''
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
class Weather(BaseModel):
    city: str
client = OpenAI(base_url=URL + "/v1", api_key="x")
messages = [{"role": "user", "content": "weather?"}]
tools = [pydantic_function_tool(Weather, name="weather")]
with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as s:
    message = s.get_final_completion().choices[0].message
call = message.tool_calls[0]
result = {"role": "tool", "tool_call_id": call.id,
          "content": weather(call.function.parsed_arguments.city)}
messages += [message.model_dump(exclude_none=True), result]
made = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
print(made.choices[0].message.content)
'''),
    Client("anthropic", "messages, tool_runner", '''
import anthropic
from anthropic import beta_tool
@beta_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "it was 21 degrees in " + city
client = anthropic.Anthropic(base_url=URL, api_key="x")
runner = client.beta.messages.tool_runner(
    model="tiny", max_tokens=300, tools=[weather],
    messages=[{"role": "user", "content": "weather?"}])
print(runner.until_done().content[-1].text)
'''),
    Client("langchain-openai", "bind_tools, streamed", TOOL + '''
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model="tiny", base_url=URL + "/v1", api_key="x")
model = model.bind_tools([weather])
turns = [HumanMessage("weather?")]
said = None
for chunk in model.stream(turns):
    said = chunk if said is None else said + chunk
call = said.tool_calls[0]
turns += [said, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
print(model.invoke(turns).content)
'''),
    Client("langchain-anthropic", "bind_tools", TOOL + '''
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
model = ChatAnthropic(model="tiny", base_url=URL, api_key="x").bind_tools([weather])
turns = [HumanMessage("weather?")]
said = model.invoke(turns)
call = said.tool_calls[0]
turns += [said, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
print(model.invoke(turns).content)
'''),
    Client("openai-agents", "a run with a tool, by chat and by responses", TOOL + '''
import agents, openai
agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x")
for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    agent = agents.Agent(name="a", instructions="Be terse.",
        tools=[agents.function_tool(weather)],
        model=kind(model="tiny", openai_client=client))
    print(agents.Runner.run_sync(agent, "weather?").final_output)
'''),
    Client("pydantic-ai-slim[openai,anthropic]", "an agent with a tool", TOOL + '''
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=URL + "/v1", api_key="x")
agent = Agent(OpenAIChatModel("tiny", provider=provider), tools=[weather])
print(agent.run_sync("weather?").output)
'''),
    Client("litellm", "completion with tools, streamed", TOOL + '''
import json, litellm
tool = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
common = dict(model="openai/tiny", api_base=URL + "/v1", api_key="x", tools=[tool])
turns = [{"role": "user", "content": "weather?"}]
chunks = list(litellm.completion(messages=turns, stream=True, **common))
message = litellm.stream_chunk_builder(chunks).choices[0].message
call = message.tool_calls[0]
turns += [message.model_dump(exclude_none=True), {"role": "tool",
    "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}]
print(litellm.completion(messages=turns, **common).choices[0].message.content)
'''),
    Client("instructor", "a structured answer by a tool", '''
import instructor, openai
from pydantic import BaseModel
class weather(BaseModel):
    city: str
client = instructor.from_openai(openai.OpenAI(base_url=URL + "/v1", api_key="x"))
made = client.chat.completions.create(model="tiny", response_model=weather,
    messages=[{"role": "user", "content": "weather?"}])
print("it was 21 degrees in " + made.city)
'''),
)  # fmt: skip


def answer(prompt: str) -> str:
    """What the scripted model says."""
    if "it was 21 degrees" in prompt:
        return "<think>Good.</think>It was 21 degrees in Bonn."
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    for begun in ('"arguments": ', "<tool_call>"):
        if prompt.endswith(begun):
            return f"{call.partition(begun)[2] or call}\n</tool_call>"
    return f"<think>I ask.</think>\n<tool_call>\n{call}\n</tool_call>"


def run(client: Client, url: str) -> tuple[str, str]:
    """The version of a client, and what its program printed or why it failed."""
    folder = FOLDER / client.name
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
    path = [str(folder)]
    try:
        version = metadata.version(client.name)
        path = []
    except metadata.PackageNotFoundError:
        if not folder.exists():
            subprocess.run([*install, client.package], check=True, timeout=900)
        found = metadata.distributions(name=client.name, path=[str(folder)])
        version = next(iter(found)).version
    program = f"URL = {url!r}\n{client.program}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        check=False,
    )
    lines = (made.stdout if made.returncode == 0 else made.stderr).split("\n")
    return version, next((line for line in reversed(lines) if line.strip()), "nothing")


def main() -> int:
    """Run the clients; the exit status is 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    sys.path.insert(0, str(ROOT))
    from tests.server.harness import Scripted, running, tiny_decoder

    failed = 0
    print("| client | version | what was run | works |\n|---|---|---|---|", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Scripted(tiny_decoder(Path(folder)), answer)) as server,
    ):
        for client in CLIENTS:
            if names and client.name not in names:
                continue
            version, said = run(client, server.url)
            works = "21 degrees in Bonn" in said
            failed += not works
            outcome = "yes" if works else f"no: {said[:200]}"
            line = f"| {client.name} | {version} | {client.does} | {outcome} |"
            print(line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
