"""The chat page in a real Chromium: `make test-page`. `make test` tests its script in Node, without a browser.

The variable LLAMAQ_CHROMIUM names the browser, whose libraries are in the folder `lib` beside it. With
LLAMAQ_SCREENSHOTS, screenshots are written to that folder.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from llamaq.producer import Client

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment

TIMEOUT_MS = 30_000
QUESTION = "Count"
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = Path(os.environ["LLAMAQ_CHROMIUM"])
    variables = {**os.environ, "LD_LIBRARY_PATH": str(program.parent / "lib")}
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], env=variables)
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    opened = browser.new_context()
    opened.set_default_timeout(TIMEOUT_MS)
    yield opened
    opened.close()


def start_server(environment: Environment, *arguments: str, port: int = 0) -> tuple[Command, str]:
    variables = {"LLAMAQ_REDIS_URL": environment.redis_url, "LLAMAQ_QUEUE": environment.queue}
    server = environment.start("serve", "--http-port", str(port), *arguments, **variables)
    return server, server.await_output(r"http\.ready url=(http://\S+)")[1]


def open_page(context: BrowserContext, url: str) -> tuple[Page, list[str]]:
    """Return the page, and the list of what its console reports."""
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    return page, problems


def ask(page: Page, text: str = QUESTION) -> Any:
    """Send a message with the keyboard, and return the last answer on the page."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator("article.assistant").last


def answered(page: Page, count: int = 1) -> Any:
    """Wait until this number of answers is complete, and return the last one."""
    expect(page.locator("article.assistant:not(.busy)")).to_have_count(count)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return page.locator("article.assistant .content").last


def await_text(answer: Any, length: int = 20) -> str:
    """Wait until an answer has some text, and return it."""
    expect(answer.locator(".content").last).to_have_text(re.compile(rf"[\s\S]{{{length},}}"))
    return str(answer.locator(".content").last.inner_text())


def shoot(page: Page, name: str) -> None:
    if folder := os.environ.get("LLAMAQ_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_a_chat_is_streamed_and_continues_after_a_reload(environment: Environment, context: BrowserContext) -> None:
    environment.start_worker(TICK_S="0.02")
    _, url = start_server(environment)
    page, problems = open_page(context, url)
    expect(page.get_by_label("Model")).to_have_text(re.compile(r"\(\d,\d{3} tokens\)"))
    shoot(page, "empty")
    answer = ask(page, "Tell me a story.")
    first = await_text(answer)
    shoot(page, "running")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    whole = answered(page).inner_text()
    assert whole.startswith(first)
    assert len(whole) > len(first)
    ask(page, "And then?")
    answered(page, 2)
    shoot(page, "two")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    assert page.locator("article.assistant .content").first.inner_text() == whole
    assert problems == []


def test_a_chat_outlives_a_closed_tab_and_the_death_of_server_and_worker(
    environment: Environment, context: BrowserContext, free_port: int
) -> None:
    worker = environment.start_worker(TICK_S="0.04")
    server, url = start_server(environment, port=free_port)
    page, _ = open_page(context, url)
    first = await_text(ask(page, "Tell me a story."))
    worker.signal(signal.SIGKILL)
    server.signal(signal.SIGKILL)
    server.end()
    expect(page.get_by_text("Trying again in")).to_be_visible()
    shoot(page, "server-lost")
    environment.start_worker(TICK_S="0.04")
    start_server(environment, port=free_port)
    more = await_text(page.locator("article.assistant").last, len(first) + 10)
    assert more.startswith(first)
    page.close()
    page, _ = open_page(context, url)
    expect(page.locator("article")).to_have_count(2)
    assert answered(page).inner_text().startswith(more)


def test_stop_keeps_the_text_and_ends_the_job(environment: Environment, context: BrowserContext) -> None:
    environment.start_worker(TICK_S="0.05")
    _, url = start_server(environment)
    page, problems = open_page(context, url)
    await_text(ask(page, "Tell me a story."))
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".note", has_text="Stopped")).to_be_visible()
    with environment.client() as client:
        assert client.queue_depth().running == 0
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_role("button", name="Try again").click()
    await_text(page.locator("article.assistant").last)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert problems == []


def test_a_waiting_question_has_its_place_and_an_error_its_way_out(
    environment: Environment, context: BrowserContext
) -> None:
    _, url = start_server(environment)
    page, _ = open_page(context, url)
    expect(page.get_by_role("alert")).to_contain_text("No worker is running. Start one: llamaq worker")
    shoot(page, "no-worker")
    worker = environment.start_worker("--n-parallel", "1", "--n-ctx", "256", TICK_S="0.05")
    expect(page.get_by_role("alert")).to_be_hidden()
    with environment.client() as client:
        jobs = [client.submit("Once", max_tokens=200, ignore_eos=True) for _ in range(2)]
        ask(page, "Hello")
        expect(page.get_by_text(re.compile("Waiting for a free slot: [12] requests? (is|are) ahead"))).to_be_visible()
        shoot(page, "waiting")
        for job in jobs:
            job.cancel()
    answered(page)
    ask(page, "word " * 400)
    expect(page.get_by_role("alert")).to_contain_text("send a shorter one")
    expect(page.get_by_label("Message")).to_have_value(re.compile("word word"))
    expect(page.locator("article")).to_have_count(2)
    shoot(page, "too-long")
    worker.signal(signal.SIGTERM)


def test_the_chosen_model_answers_and_is_still_chosen_after_a_reload(
    environment: Environment, context: BrowserContext
) -> None:
    environment.start_worker()
    other = f"{environment.queue}-other"
    environment.start_worker(LLAMAQ_QUEUE=other)
    _, url = start_server(environment)
    page, problems = open_page(context, url)
    page.get_by_label("Model").select_option(other)
    ask(page, "Hello")
    answered(page)
    page.reload()
    expect(page.get_by_label("Model")).to_have_value(other)
    with Client(environment.redis_url, other) as client:
        assert len(client.stats().recent) == 1
    assert problems == []


def test_the_page_asks_for_an_api_key(environment: Environment, context: BrowserContext) -> None:
    environment.start_worker()
    variables = {"LLAMAQ_REDIS_URL": environment.redis_url}
    added = environment.start("keys", "add", f"page-{environment.queue}", **variables)
    added.end()
    (key,) = re.findall(r"sk-\S+|llamaq-\S+|[\w-]{32,}", added.output)[:1]
    _, url = start_server(environment, "--require-key")
    page, _ = open_page(context, url)
    expect(page.get_by_label("requires an API key")).to_be_focused()
    shoot(page, "key")
    page.keyboard.type("wrong")
    with page.expect_response("**/v1/models"):
        page.keyboard.press("Enter")
    expect(page.get_by_label("requires an API key")).to_be_visible()
    expect(page.get_by_label("requires an API key")).to_be_focused()
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    expect(page.get_by_label("requires an API key")).to_be_hidden()
    ask(page)
    assert len(answered(page).inner_text()) > 0


STORY = """## How to sort

First **read** the numbers, *then* sort them with `sorted`:

```python
numbers = [3, 1, 2]
print(sorted(numbers))  # [1, 2, 3]
```

1. It is stable.
   - Equal elements keep their order.
2. It takes `O(n log n)` steps. See [the page](https://docs.python.org/3/howto/sorting.html).

| n | steps |
| --- | --- |
| 10 | 33 |

<img src=x onerror=alert(1)> <script>alert(2)</script> [bad](javascript:alert(3))
"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 375), ("dark", 375)])
def test_markdown_of_a_model_makes_elements_but_never_runs(
    environment: Environment, browser: Browser, scheme: Any, width: int
) -> None:
    _, url = start_server(environment)
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 760})
    page, problems = open_page(context, url)
    messages = [{"role": "user", "text": "How do I sort numbers?\nIn Python."}, {"role": "assistant", "text": STORY}]
    page.evaluate("(messages) => localStorage.setItem('llamaq-chat', JSON.stringify({messages}))", messages)
    page.reload()
    content = page.locator("article.assistant .content")
    expect(content.locator("figure pre code")).to_contain_text("print(sorted(numbers))")
    assert content.locator("img, script").count() == 0
    assert [link.get_attribute("href") for link in content.locator("a").all()] == [
        "https://docs.python.org/3/howto/sorting.html"
    ]
    assert "<img src=x onerror=alert(1)>" in content.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRASTS) >= 4.5
    shoot(page, f"{scheme}-{width}")
    assert problems == []
    context.close()


CONTRASTS = """() => {
  // Returns the least contrast between a text and its background, as WCAG defines it.
  const light = (color) => color.map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const backOf = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parts(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) => element.offsetParent !== null
    && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return Math.min(...texts.map((element) => {
    const [a, b] = [light(parts(getComputedStyle(element).color).slice(0, 3)), light(backOf(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
}"""
