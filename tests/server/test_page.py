"""The page at ``/``, as a browser shows it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from specdec import SamplingParams, SpecDecoder
from tests.server.harness import Running, until
from tests.server.test_command import line_of

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome")
     if (found := shutil.which(name))), None,
)  # fmt: skip


class NotNowError(Exception):
    """The browser cannot do that, as while it leaves a page."""


class Browser:
    """A tab of headless Chromium, by its DevTools protocol."""

    def __init__(self, connection: ClientConnection):
        self._connection = connection
        self._number = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise NotNowError(answer)
                return dict(answer["result"])

    def run(self, script: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        end = time.monotonic() + 60
        while True:
            with suppress(NotNowError):
                if value := self.run(script):
                    return value
            assert time.monotonic() < end, script
            time.sleep(0.05)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        port = line_of(process.stderr, r"ws://[\d.]+:\d+").rpartition(":")[2]
        tabs: list[Any] = []

        def has_tab() -> bool:
            answer = httpx.get(f"http://127.0.0.1:{port}/json").json()
            tabs[:] = (each for each in answer if each["type"] == "page")
            return bool(tabs)

        until(has_tab)
        (tab,) = tabs
        try:
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.kill()


def test_the_page(
    server: Running, decoder: SpecDecoder, browser: Browser, tmp_path: Path
) -> None:
    """A chat of two turns, the figures, both colours, and no scrolling on a phone."""
    browser.call("Page.enable")
    browser.call("Page.navigate", url=server.url)
    browser.until("document.readyState === 'complete' && !!document.title")
    messages: Any = [{"role": "user", "content": "Name a river."}]
    browser.run("document.getElementById('most').value = 12")
    for turn in range(2):
        (expected,) = decoder.generate([messages], SamplingParams(max_tokens=12))
        said = json.dumps(messages[-1]["content"])
        browser.run(
            f"document.getElementById('text').value = {said};"
            "document.getElementById('send').click()"
        )
        browser.until(
            f"document.querySelectorAll('.note').length === {turn + 1} && !current"
        )
        assert browser.run("messages.at(-1).content") == expected.text
        messages += [{"role": "assistant", "content": expected.text},
                     {"role": "user", "content": "And one more?"}]  # fmt: skip
    browser.until("document.getElementById('length').textContent > '0'")
    browser.until("document.querySelectorAll('#positions i').length === 2")
    assert browser.run("document.querySelector('.scale').textContent") == "100%500"
    browser.until("document.getElementById('model').textContent.startsWith('tiny')")
    colours = set()
    for scheme in ("light", "dark"):
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=feature)
        colours.add(
            browser.run("getComputedStyle(document.documentElement).backgroundColor")
        )
        for width in (360, 1200):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=720,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            assert browser.run("document.documentElement.scrollWidth") <= width
            shown = browser.run(
                "getComputedStyle(document.getElementById('side')).display"
            )
            assert (shown == "none") is (width < 500)
            if width < 500:
                browser.run("document.getElementById('side-button').click()")
                top = "document.getElementById('system').getBoundingClientRect().top"
                assert 0 < browser.run(top) < 360  # settings are seen at once
                browser.run("document.getElementById('side-button').click()")
            picture = browser.call("Page.captureScreenshot")["data"]
            name = f"{scheme}-{width}.png"
            (tmp_path / name).write_bytes(base64.b64decode(picture))
    assert len(colours) == 2
    # A reload keeps the chat.
    talk = "[...document.querySelectorAll('article.user')].map((a) => a.textContent)"
    before = browser.run("JSON.stringify(messages)")
    browser.run("window.old = true")
    browser.call("Page.reload")
    browser.until("!window.old && document.readyState === 'complete'")
    assert browser.until(f"{talk}.length") == 2
    assert browser.run("JSON.stringify(messages)") == before
    browser.run("document.getElementById('new').click()")
    assert browser.run("document.querySelectorAll('article').length") == 0
    # An error of the server's is shown, and what was asked can be asked again.
    browser.run(
        "document.getElementById('most').value = -2;"
        "document.getElementById('text').value = 'Hi';"
        "document.getElementById('send').click()"
    )
    error = browser.until("document.querySelector('.error')?.textContent")
    assert "max_tokens is -2" in error
    assert browser.run("messages.length") == 0
    browser.run("document.getElementById('most').value = 12")
    # What is left of an answer is no part of the chat that was begun meanwhile.
    browser.run(
        "document.getElementById('most').value = 3000;"
        "document.getElementById('text').value = 'Hi';"
        "document.getElementById('send').click()"
    )
    browser.until("!!document.querySelector('.said')?.textContent")
    browser.run("document.getElementById('new').click()")
    browser.until("current === null")
    assert browser.run("messages.length") == 0


MARKDOWN = [
    ("a **b** *c* `d*e*`", "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code></p>"),
    ("# H #\ntext", "<h1>H</h1><p>text</p>"),
    ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
    ("```py\nx = '<b>'\n```\nz", "<pre><code>x = '&lt;b&gt;'</code></pre><p>z</p>"),
    ("```\nunfinished **x**", "<pre><code>unfinished **x**</code></pre>"),
    (
        "- a\n- b\n  - c\n\nd",
        "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>d</p>",
    ),
    ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    (
        "1. a\n   ```\n   x\n   ```",
        '<ol start="1"><li>a<pre><code>x</code></pre></li></ol>',
    ),
    ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    (
        "| a | b |\n|--|--:|\n| 1 | *2* |",
        "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td><em>2</em></td></tr></tbody></table>",
    ),
    (
        "2 * 3 * 4, snake_case_name, 5 < 6",
        "<p>2 * 3 * 4, snake_case_name, 5 &lt; 6</p>",
    ),
    ("\\*not\\* **open", "<p>*not* **open</p>"),
    (
        "[x](https://e.org/a) https://e.org/b.",
        '<p><a href="https://e.org/a" target="_blank" rel="noopener noreferrer">x</a> '
        '<a href="https://e.org/b" target="_blank" rel="noopener noreferrer">'
        "https://e.org/b</a>.</p>",
    ),
    # What a model wrote is never run, and leads nowhere but to the web.
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("[x](data:text/html,1) ![i](file:///etc)", None),
    ("```a b```\nc", "<p><code>a b</code><br>c</p>"),
    ("````md\n```js\nx\n```\n````", "<pre><code>```js\nx\n```</code></pre>"),
    ("```md\n```js\n```", "<pre><code>```js</code></pre>"),
    ("***a***", "<p><em><strong>a</strong></em></p>"),
    (
        "|a \\| b|\n|-|\n|`c\\|d`|",
        "<table><thead><tr><th>a | b</th></tr></thead>"
        "<tbody><tr><td><code>c|d</code></td></tr></tbody></table>",
    ),
]


def test_answers_are_shown_as_markdown(server: Running, browser: Browser) -> None:
    """Markdown was shown raw; what is shown as HTML must not be a model's HTML."""
    browser.call("Page.enable")
    browser.call("Page.navigate", url=server.url)
    browser.until("document.readyState === 'complete' && !!document.title")
    for text, expected in MARKDOWN:
        html = browser.run(
            f"element('div', ...blocks({json.dumps(text)}.split('\\n'))).innerHTML"
        )
        assert "<img" not in html
        assert "<a" not in html or 'href="https://' in html
        if expected is not None:
            assert html == expected
    # Whatever is written ends, and nothing is lost.
    for text in (
        "> " * 3000 + "x",
        "- " * 3000 + "x",
        "*" * 3000 + "x",
        "`a" * 999 + "x",
        " ".join("`" * n + "a" for n in range(1, 120)) + "x",
        "**a " * 9999 + "x",
    ):
        shown = browser.run(
            f"element('div', ...blocks([{json.dumps(text)}])).textContent"
        )
        assert shown.endswith("x")
    lines = browser.run(
        "blocks('a\\n'.repeat(70000).split('\\n'))[0].childNodes.length"
    )
    assert lines == 139_999
    for address in ("https://a.b/w/C_(d)", "https://a.b/?q=[e]"):
        for text in (f"see {address}.", f"[x]({address})", f"![x]({address})"):
            html = browser.run(f"blocks([{json.dumps(text)}])[0].outerHTML")
            assert f'href="{address}"' in html
            assert "!" not in html


@pytest.mark.parametrize(
    "stored", ['{', "5", "{}", "[1]", '[{"role": "user"}]', '[{"role": "user", '
               '"content": []}]', '[{"role": "system", "content": "a"}]']
)  # fmt: skip
def test_another_pages_storage_is_no_chat(
    stored: str, server: Running, browser: Browser
) -> None:
    """Programs at one address share it; the page could send nothing any more."""
    browser.call("Page.enable")
    browser.call("Page.navigate", url=server.url)
    browser.until("document.readyState === 'complete' && !!document.title")
    stored = json.dumps(stored)
    script = f"keep.setItem('messages', {stored}); messages = []; recall(); messages"
    assert browser.run(script) == []
