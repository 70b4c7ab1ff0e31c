#!/usr/bin/env python3
"""Run client libraries against a server here, and print a table of what they do.

Usage: scripts/clients.py [NAME ...]

Each client is installed into build/clients, from its package registry, and runs in a
process of its own. The server is this project's; its engine's answers are scripted, so
that a model with tools is not needed: it calls a tool, and then says what it returned.
What asks for a form of the answer gets a small random model's answer in that form.
"""

from __future__ import annotations

import argparse
import json
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
SAID = "It was 21 degrees in Bonn."
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
        program: prints its last answer. ``URL`` is the server's address, ``BIN`` the
            folder of a client's commands.
        formed: the answer's form is enforced, and its text is not scripted.
        npm: the package is one of npm's.
    """

    package: str
    does: str
    program: str
    formed: bool = False
    npm: bool = False

    @property
    def name(self) -> str:
        """The distribution's name."""
        return re.split(r"[\[<>= ]", self.package)[0]

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return FOLDER / self.name.replace("/", "+")

    def install(self) -> str:
        """Install its newest version, unless there is one; return the version."""
        new = not self.folder.exists()
        if self.npm:
            command = ["npm", "install", "--prefix", str(self.folder), self.package]
            files = self.folder / "node_modules" / self.name / "package.json"
        else:
            command = [sys.executable, "-m", "pip", "install", "-q", "--target",
                       str(self.folder), *self.package.split()]  # fmt: skip
        if new:
            subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)
        if self.npm:
            return str(json.loads(files.read_text())["version"])
        (there,) = metadata.distributions(name=self.name, path=[str(self.folder)])
        return there.version


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
answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
print(answer.choices[0].message.content)
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
record = client.chat.completions.create(model="tiny", response_model=weather,
    messages=[{"role": "user", "content": "weather?"}])
print("it was 21 degrees in " + record.city)
'''),
    Client("dspy", "Predict", '''
import dspy
dspy.configure(lm=dspy.LM("openai/tiny", api_base=URL + "/v1", api_key="x"))
print(dspy.Predict("question -> answer")(question="weather?").answer)
'''),
    Client("outlines[openai]", "its vLLM backend: a record, Lark, choices", '''
import openai, outlines
from typing import Literal
from outlines.types import CFG
from pydantic import BaseModel
class Weather(BaseModel, extra="forbid"):
    degrees: Literal[21]
    city: Literal["Bonn"]
client = openai.OpenAI(base_url=URL + "/v1", api_key="x")
model = outlines.from_vllm(client, "tiny")
record = Weather.model_validate_json(model("weather?", Weather, max_tokens=400))
assert model("weather?", CFG(\'start: "a"\')) == "a"
choices = Literal[f"it was {record.degrees} degrees in {record.city}"]
print("".join(model.stream("weather?", choices)))
''', formed=True),
    Client("guidance openai", "its vLLM backend: select, JSON, gen", '''
import guidance, json
from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel
model = VLLMModel("tiny", base_url=URL + "/v1", api_key="x", echo=False)
schema = {"type": "object", "properties": {"degrees": {"const": 21}},
          "required": ["degrees"], "additionalProperties": False}
with user():
    model += "weather?"
with assistant():
    model += guidance.json(name="record", schema=schema)
with user():
    model += "where?"
with assistant():
    model += select(["in Bonn"], name="where")
with user():
    model += "and then?"
with assistant():
    model += gen(name="rest", max_tokens=4)
print(json.loads(model["record"])["degrees"], "degrees", model["where"])
''', formed=True),
    Client("guidellm", "run, with completions, chat and responses", '''
import json, pathlib, subprocess, sys
pathlib.Path("prompts.jsonl").write_text(
    "".join(json.dumps({"prompt": f"weather {i}?"}) + "\\n" for i in range(8)))
requests = 0
for path in ("completions", "chat/completions", "responses"):
    backend = f"kind=openai_http,target={URL},request_format=/v1/{path}"
    output = "kind=json,path=report.json"
    subprocess.run([sys.executable, "-m", "guidellm", "run", "--backend", backend,
        "--profile", "kind=concurrent,streams=2", "--constraint",
        "kind=max_requests,count=7", "--data", "kind=json_file,path=prompts.jsonl",
        "--output", output, "--disable-console"], check=True)
    (report,) = json.load(open("report.json"))["benchmarks"]
    requests += len(report["requests"]["successful"])
print(requests, "degrees in Bonn")
'''),
    Client("aider-chat", "an edit of a file", '''
import pathlib, subprocess, sys
pathlib.Path("a.txt").touch()
subprocess.run([sys.executable, "-m", "aider", "--openai-api-base", URL + "/v1",
    "--openai-api-key", "x", "--model", "openai/tiny", "--edit-format", "diff",
    "--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update",
    "--analytics-disable", "--message", "weather?", "a.txt"], check=True,
    stdin=subprocess.DEVNULL)
print(pathlib.Path("a.txt").read_text().strip())
'''),
    Client("@anthropic-ai/claude-code", "a call of its shell", '''
import os, subprocess
names = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "tiny")
environment = {**os.environ, **names, "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN":
    "x", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
subprocess.run([BIN + "/claude", "-p", "weather?", "--allowedTools", "Bash"],
    check=True, env=environment, stdin=subprocess.DEVNULL)
''', npm=True),
    Client("@openai/codex", "a call of its shell", '''
import os, pathlib, subprocess
folder = pathlib.Path.home() / ".codex"
folder.mkdir()
(folder / "config.toml").write_text(f"""
model = "tiny"
model_provider = "specdec"
[model_providers.specdec]
name = "specdec"
base_url = "{URL}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
""")
subprocess.run([BIN + "/codex", "exec", "--skip-git-repo-check", "--sandbox",
    "danger-full-access", "weather?"], check=True, stdin=subprocess.DEVNULL,
    env={**os.environ, "OPENAI_API_KEY": "x"})
''', npm=True),
)  # fmt: skip


def answer(prompt: str) -> str:
    """What the scripted model says."""
    if "[[ ## answer ## ]]" in prompt:  # dspy's form
        return f"[[ ## answer ## ]]\n{SAID}\n\n[[ ## completed ## ]]"
    if "*SEARCH/REPLACE*" in prompt:  # aider's
        return f"a.txt\n<<<<<<< SEARCH\n=======\n{SAID}\n>>>>>>> REPLACE"
    if "it was 21 degrees" in prompt:
        return f"<think>Good.</think>{SAID}"
    name, arguments = "weather", {"city": "Bonn"}
    shells = {"Bash": "command", "exec_command": "cmd"}
    for tool, argument in shells.items():
        if f'"name": "{tool}"' in prompt:
            name, arguments = tool, {argument: "echo it was 21 degrees in Bonn"}
    call = json.dumps({"name": name, "arguments": arguments})
    for beginning in ('"arguments": ', "<tool_call>"):
        if prompt.endswith(beginning):
            return f"{call.partition(beginning)[2] or call}\n</tool_call>"
    return f"<think>I ask.</think>\n<tool_call>\n{call}\n</tool_call>"


def run(client: Client, url: str) -> tuple[str, str]:
    """The version of a client, and what its program printed or why it failed."""
    version = client.install()
    commands = client.folder / ("node_modules/.bin" if client.npm else "bin")
    program = f"URL, BIN = {url!r}, {str(commands)!r}\n{client.program}"
    path = {} if client.npm else {"PYTHONPATH": str(client.folder)}
    with tempfile.TemporaryDirectory() as home:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=home,
            env={**os.environ, "HOME": home, **path},
            check=False,
        )
    lines = (ran.stdout if ran.returncode == 0 else ran.stderr).split("\n")
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
    with tempfile.TemporaryDirectory() as folder:
        # A coding agent's first prompt has 70,000 characters, each a token here.
        decoder = tiny_decoder(Path(folder), context=1 << 18)
        scripted = Scripted(decoder, answer)
        with running(scripted) as server, running(decoder) as forming:
            for client in CLIENTS:
                if names and client.name not in names:
                    continue
                url = (forming if client.formed else server).url
                version, last = run(client, url)
                works = "21 degrees in Bonn" in last
                failed += not works
                outcome = "yes" if works else f"no: {last[:200]}"
                line = f"| {client.name} | {version} | {client.does} | {outcome} |"
                print(line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
