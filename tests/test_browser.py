"""The server's page in Chromium: what a user does, what it shows, and what an answer cannot do.

Slow for its size: each test opens a page of its own, so that its console and requests are its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from inside import engine_of, loop_of
from serving import Running, serving
from whole import wait_until

from lowtide import AsyncLLM
from lowtide.parsing.pieces import Done, Piece, Prefilled, Reasoning, Text
from lowtide.serve.service import Ask

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no program chromium: apt install chromium"),
]

AXE = "axe-core@4.14.1"
DEMOS = "autoregressive", "diffusion"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
LIMIT_MS = 20_000
SORT = "Sort 93 21 57 40 12"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install it")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def demos() -> Iterator[dict[str, Running]]:
    """Servers of both demos, whose experts are partly on disk."""
    with ExitStack() as stack:
        found = {}
        for kind in DEMOS:
            llm = AsyncLLM(f"demo:{kind}", context=512, host_memory="6MiB")
            stack.callback(loop_of(llm).close)  # playwright's event loop is this thread's
            found[kind] = stack.enter_context(serving(llm, served_name=f"demo:{kind}"))
        yield found


@pytest.fixture
def chatting(demos: dict[str, Running]) -> Running:
    return demos["autoregressive"]


class Seen:
    """A page, what its console said, and what it asked for."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(viewport=DESKTOP, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.said.append(f"failed: {request.url}"))

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.locator("#model:not(:empty)").wait_for()

    def ask(self, text: str) -> str:
        """Ask, wait for the answer's end, and return its text."""
        self.page.locator("#prompt").fill(text)
        self.page.locator("#prompt").press("Enter")
        return self.answer()

    def answer(self) -> str:
        self.page.locator(".assistant:last-child .facts").get_by_text("ended").wait_for()
        self.page.locator("body:not(.running)").wait_for()
        return str(self.page.locator(".assistant:last-child .body").inner_text())

    def check(self) -> None:
        assert self.said == []
        assert all(url.startswith((self.url, "blob:")) for url in self.asked), self.asked


@contextmanager
def opened(browser: Any, server: Running, **options: Any) -> Iterator[Seen]:
    """A page; at the end its console is empty, and all requests were to its server."""
    seen = Seen(browser, server.url, **options)
    try:
        seen.open()
        yield seen
        seen.check()
    finally:
        seen.context.close()


class Scripted:
    """Answers a service's requests with given pieces; a number is a silence in seconds."""

    def __init__(self, script: Sequence[Piece | float]) -> None:
        self.script = script
        self.asks: list[Ask] = []
        self.num_closed = 0

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        self.asks.append(ask)
        try:
            yield Prefilled(0, 8)
            for each in self.script:
                if isinstance(each, float):
                    await asyncio.sleep(each)
                else:
                    yield each
        finally:
            self.num_closed += 1


@contextmanager
def scripted(server: Running, *script: Piece | float) -> Iterator[Scripted]:
    made = Scripted(script)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.service, "answer", made.answer)
        yield made


def done(num_new: int = 3) -> Done:
    return Done("stop", 8, num_new, 0)


ENDLESS: list[Piece | float] = [part for _ in range(2000) for part in (Text("word "), 0.02)]


def test_a_chat_is_streamed_and_measured(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        assert seen.ask("47 + 85") == "132"
        assert seen.ask(SORT) == "12 21 40 57 93"
        facts = seen.page.locator(".assistant:last-child .facts").inner_text()
        for name in ("speed", "first token", "tokens", "kept", "read a token", "hit rate", "ended"):
            assert name in facts
        assert "the model was done" in facts
        assert "of 512 tokens" in seen.page.locator("#room-text").inner_text()
        assert not seen.page.locator("#welcome").is_visible()


def test_an_answer_can_be_stopped_and_a_tab_that_closes_ends_its_passes(browser, chatting) -> None:
    with scripted(chatting, *ENDLESS) as script, opened(browser, chatting) as seen:
        for stop in ("click", "key"):
            seen.page.locator("#prompt").fill("Go on")
            seen.page.locator("#prompt").press("Enter")
            seen.page.locator(".assistant:last-child").get_by_text("word word word").wait_for()
            if stop == "click":
                seen.page.get_by_role("button", name="Stop").click()
            else:
                seen.page.keyboard.press("Escape")
            assert seen.answer().startswith("word word word")
            assert "stopped by you" in seen.page.locator(".assistant:last-child").inner_text()
        wait_until(lambda: script.num_closed == 2)
        seen.said.clear()  # a request that was stopped counts as failed

        seen.page.locator("#prompt").fill("Go on")
        seen.page.locator("#prompt").press("Enter")
        seen.page.locator(".assistant:last-child").get_by_text("word word word").wait_for()
        seen.page.close()
        wait_until(lambda: script.num_closed == 3)
        seen.said.clear()


def test_passes_end_with_the_tab(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        with chatting.client() as client:
            client.get("/health")
        seen.ask(SORT)
        seen.page.close()
        wait_until(lambda: not engine_of(chatting.service.llm).experts.is_watched)
        assert chatting.service.is_idle


def begin(seen: Seen, text: str = "Go on", until: str = "word word word") -> None:
    """Ask, and wait for the beginning of the answer."""
    seen.page.locator("#prompt").fill(text)
    seen.page.locator("#prompt").press("Enter")
    seen.page.locator(".assistant:last-child").get_by_text(until).wait_for()


def test_an_answer_whose_page_is_left_is_kept_as_far_as_it_came(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        with scripted(chatting, *ENDLESS):
            begin(seen, "A long question")
            seen.page.reload()
            body = seen.page.locator(".assistant .body").inner_text()
        assert body.startswith("word word word")
        assert seen.page.locator(".user .plain").inner_text() == "A long question"
        facts = seen.page.locator(".assistant .facts").inner_text()
        assert "not complete when it was kept" in facts
        seen.page.locator("#model:not(:empty)").wait_for()
        seen.page.get_by_role("button", name="Another answer").click()
        seen.page.get_by_text("2 of 2").wait_for()
        seen.answer()
        seen.said.clear()  # a request that ended with its page counts as failed


def test_each_tab_goes_on_with_its_own_conversation(browser, chatting) -> None:
    with opened(browser, chatting) as seen, opened(browser, chatting) as other:
        first, second = seen.page, seen.context.new_page()
        second.goto(chatting.url)
        second.locator("#model:not(:empty)").wait_for()
        assert seen.ask("47 + 85") == "132"
        other.page = second
        assert other.ask("Roman 148") == "CXLVIII"
        first.reload()
        assert first.locator(".user .plain").all_inner_texts() == ["47 + 85"]
        third = seen.context.new_page()
        third.goto(chatting.url)
        assert third.locator(".user .plain").all_inner_texts() == ["Roman 148"]
        seen.said.clear()  # events ended by the reload


def test_long_code_is_code_while_it_comes_and_when_it_is_read_again(browser, chatting) -> None:
    lines = "".join(
        f"def function_{i}(value):  # a line that is long enough\n" for i in range(1000)
    )
    text = f"So:\n```python\n{lines}```\n\nThat is **it**.\n"
    pieces = [Text(text[i : i + 500]) for i in range(0, len(text), 500)]
    with scripted(chatting, *pieces[:50], 1.0, *pieces[50:], done()):
        with opened(browser, chatting) as seen:
            begin(seen, until="def function_100")
            code = seen.page.locator(".body pre")
            assert code.inner_text().startswith("def function_0(value):")
            for _ in range(2):
                seen.page.locator(".body strong").wait_for()
                assert code.count() == 1 and code.text_content() == lines
                assert "```" not in seen.page.locator(".body").inner_text()
                seen.page.reload()
            seen.said.clear()  # events ended by the reload


def test_code_that_comes_stays_scrolled_and_selected(browser, chatting) -> None:
    lines = (Text(f"line_{i} = {'x' * 400}\n") for i in range(2000))
    script = [Text("```py\n"), *(part for line in lines for part in (line, 0.02))]
    with scripted(chatting, *script), opened(browser, chatting) as seen:
        begin(seen, until="line_2 ")
        seen.page.evaluate(
            """() => {
              const pre = document.querySelector(".body pre");
              const text = pre.querySelector("code").firstChild;
              pre.scrollLeft = 50;
              getSelection().setBaseAndExtent(text, 0, text, 6);
              document.querySelector(".body .code button").focus();
            }"""
        )
        seen.page.locator(".body pre").get_by_text("line_20 ").wait_for()
        kept = seen.page.evaluate(
            """() => [document.querySelector(".body pre").scrollLeft, String(getSelection()),
                      document.activeElement.textContent]"""
        )
        assert kept == [50, "line_0", "Copy"]
        seen.page.keyboard.press("Escape")
        seen.answer()
        seen.said.clear()  # a request that was stopped counts as failed


def test_rendered_text_without_an_element_is_shown(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        seen.page.route("**/markdown", lambda route: route.fulfill(json={"nodes": ["Rendered"]}))
        assert seen.ask("47 + 85") == "Rendered"


def test_text_from_right_to_left_begins_at_the_right(browser, chatting) -> None:
    hebrew = "\u05e9\u05dc\u05d5\u05dd"
    text = f"{hebrew}, world.\n\n- {hebrew}\n\n```\n{hebrew}\n```\n\nHello, {hebrew}.\n"
    with scripted(chatting, Text(text), done()), opened(browser, chatting) as seen:
        seen.ask(f"{hebrew}, world.")
        seen.page.locator(".body ul").wait_for()
        directions = seen.page.locator(".body > *").evaluate_all(
            "all => all.map(e => getComputedStyle(e).direction)"
        )
        assert directions == ["rtl", "rtl", "ltr", "ltr"]
        user = seen.page.locator(".user .plain")
        assert user.evaluate("e => getComputedStyle(e).unicodeBidi") == "plaintext"


def test_earlier_answers_stay_as_they_are_shown(browser, demos) -> None:
    with opened(browser, demos["diffusion"]) as seen:
        seen.ask(SORT)
        seen.page.locator(".diffusion summary").click()  # folds it
        seen.asked.clear()
        seen.ask("Sort 9 8 7 6 5")
        assert seen.page.locator(".diffusion").count() == 2
        assert seen.page.locator(".diffusion[open]").count() == 1
        rendered = [url for url in seen.asked if url.endswith("/markdown")]
        assert len(rendered) <= 2  # those of the new answer


def test_who_reads_further_up_is_left_there(browser, chatting) -> None:
    paragraphs = [Text(f"Paragraph {i}.\n\n") for i in range(60)]
    script = [*paragraphs, 1.0, *paragraphs, done()]
    with scripted(chatting, *script), opened(browser, chatting) as seen:
        page = seen.page
        begin(seen, until="Paragraph 59.")
        page.locator(".body > p").nth(59).wait_for()
        assert page.evaluate("scrollY + innerHeight >= document.body.scrollHeight - 8")
        page.evaluate("scrollBy(0, -100)")
        at = page.evaluate("scrollY")
        seen.answer()
        page.locator(".body > p").nth(119).wait_for()
        assert page.evaluate("scrollY") == at


def test_a_connection_that_breaks_off_is_told_in_words(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        seen.page.evaluate(
            """() => {
              const real = window.fetch;
              window.fetch = async (path, request) => {
                if (!path.endsWith("/chat/completions")) return real(path, request);
                const broken = (stream) => stream.error(new TypeError("network error"));
                return new Response(new ReadableStream({ start: broken }));
              };
            }"""
        )
        seen.ask("47 + 85")
        assert "broke off" in seen.page.locator(".trouble").inner_text()


def test_the_gauge_counts_an_answer_that_was_stopped(browser, chatting) -> None:
    with scripted(chatting, *ENDLESS), opened(browser, chatting) as seen:
        begin(seen)
        seen.page.keyboard.press("Escape")
        seen.answer()
        used = re.match(r"\d+", seen.page.locator("#room-text").inner_text())
        assert used is not None and int(used[0]) >= 8 + 3
        seen.said.clear()  # a request that was stopped counts as failed


def test_the_keyboard_stays_where_it_acts(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        page = seen.page

        def press(name: str, key: str = "Enter") -> str:
            page.get_by_role("button", name=name).focus()
            page.keyboard.press(key)
            return str(
                page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.id")
            )

        seen.ask("47 + 85")
        for number in (2, 3):
            assert press("Another answer") == "prompt"
            page.get_by_text(f"{number} of {number}").wait_for()
            seen.answer()
        assert press("Answer before") == "Answer before"
        assert press("Answer before") == "Answer after"  # there is none before
        assert press("Edit") == "Edited message"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.textContent") == "Edit"


def test_turns_are_edited_answered_again_kept_and_exported(browser, chatting, tmp_path) -> None:
    with opened(browser, chatting, accept_downloads=True) as seen:
        page = seen.page
        assert seen.ask("47 + 85") == "132"
        page.get_by_role("button", name="Another answer").click()
        page.get_by_text("2 of 2").wait_for()
        assert seen.answer() == "132"
        page.get_by_role("button", name="Answer before").click()
        page.get_by_text("1 of 2").wait_for()

        page.get_by_role("button", name="Edit").click()
        page.get_by_role("textbox", name="Edited message").fill("Roman 148")
        page.get_by_role("button", name="Send again").click()
        page.locator(".user").get_by_text("Roman 148").wait_for()
        assert seen.answer() == "CXLVIII" and page.locator(".user").count() == 1

        page.reload()
        page.locator(".assistant .body").get_by_text("CXLVIII").wait_for()
        page.locator("#model:not(:empty)").wait_for()
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        download.value.save_as(tmp_path / "saved.json")
        saved = json.loads((tmp_path / "saved.json").read_text())
        assert [turn["role"] for turn in saved["turns"]] == ["user", "assistant"]
        assert saved["model"] == "demo:autoregressive"

        page.get_by_role("button", name="New").click()
        page.get_by_role("button", name="Start anew").click()
        page.locator("#welcome").wait_for()
        page.reload()
        page.locator("#welcome").wait_for()
        seen.said[:] = [each for each in seen.said if "events" not in each]  # ended by the reload


def test_an_end_of_earlier_answers_stays_one(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        page = seen.page
        seen.ask("47 + 85")
        page.get_by_role("button", name="Another answer").click()
        page.get_by_text("2 of 2").wait_for()
        seen.answer()
        seen.ask("Roman 148")
        before, after = (
            page.get_by_role("button", name=f"Answer {to}") for to in ("before", "after")
        )
        assert before.is_enabled() and after.is_disabled()
        after.evaluate("button => { button.disabled = false; button.click(); }")
        assert page.get_by_text("2 of 2").is_visible()
        before.click()
        page.get_by_text("1 of 2").wait_for()
        page.reload()
        assert page.locator(".user .plain").all_inner_texts() == ["47 + 85", "Roman 148"]
        page.get_by_text("1 of 2").wait_for()
        seen.said[:] = [each for each in seen.said if "events" not in each]  # ended by the reload


def test_a_kept_conversation_that_cannot_be_read_is_none(browser, chatting) -> None:
    version = {"text": "132", "thoughts": "", "facts": {}, "ended": "stop"}
    turns = [{"role": "assistant", "versions": [version, None], "chosen": 0}]
    kept = json.dumps({"turns": turns})
    with opened(browser, chatting) as seen:
        seen.page.evaluate("kept => sessionStorage.setItem('lowtide-conversation', kept)", kept)
        seen.page.reload()
        seen.page.locator("#welcome").wait_for()
        assert seen.ask("47 + 85") == "132"
        seen.said[:] = [each for each in seen.said if "events" not in each]  # ended by the reload


def test_settings_are_the_model_s_and_are_sent(browser, chatting) -> None:
    pieces = Reasoning("Let me see."), Text("Yes."), done()
    with scripted(chatting, *pieces) as script, opened(browser, chatting) as seen:
        page = seen.page
        page.get_by_role("button", name="Sampling").click()
        assert page.get_by_label("steps").count() == 0
        page.get_by_label("temperature").fill("0.7")
        page.get_by_label("max tokens").fill("40")
        page.get_by_role("button", name="Done").click()
        assert seen.ask("Is it?") == "Yes."
        params = script.asks[0].params
        assert params.temperature == 0.7 and params.max_tokens == 40 and params.top_p is None
        thoughts = page.locator(".thoughts")
        assert not thoughts.get_by_text("Let me see.").is_visible()
        thoughts.locator("summary").click()
        assert thoughts.get_by_text("Let me see.").is_visible()


def test_a_diffusion_model_is_seen_at_work(browser, demos) -> None:
    with opened(browser, demos["diffusion"]) as seen:
        page = seen.page
        page.get_by_role("button", name="Sampling").click()
        page.get_by_label("threshold", exact=True).fill("1")
        page.get_by_role("button", name="Done").click()
        assert seen.ask(SORT) == "12 21 40 57 93"
        scrubber = page.get_by_role("slider", name="Pass")
        last = int(scrubber.get_attribute("max"))
        assert last >= 5 and scrubber.input_value() == str(last)
        assert page.locator(".cell").count() > 0 and page.locator(".cell.guess").count() == 0
        hues = page.locator(".cell").evaluate_all(
            "all => all.map(e => e.style.getPropertyValue('--hue'))"
        )
        assert len(set(hues)) >= 5

        scrubber.focus()
        page.keyboard.press("Home")
        assert page.locator(".cell.guess").count() > 0
        assert "Pass 1 of" in page.locator(".scrubber output").inner_text()
        page.get_by_role("button", name="Play").click()
        page.get_by_role("button", name="Pause").wait_for()
        page.get_by_role("button", name="Play").wait_for()
        assert page.locator(".cell.guess").count() == 0


@pytest.mark.parametrize("kind", DEMOS)
def test_the_map_changes_within_a_second(browser, demos, kind) -> None:
    with opened(browser, demos[kind]) as seen, demos[kind].client() as client:
        canvas = seen.page.locator("#experts")
        canvas.wait_for()
        before = canvas.evaluate("e => e.toDataURL()")
        client.post("/v1/completions", json={"prompt": SORT, "max_tokens": 8})
        end_s = time.monotonic() + 1.0
        while canvas.evaluate("e => e.toDataURL()") == before:
            assert time.monotonic() < end_s
        canvas.hover(position={"x": 5, "y": 5})
        # In one look: what moves on the page may take the map from under the pointer again.
        told = r"Layer 1, expert 0: (in memory|on disk), \d+ hits, (last|not asked)"
        seen.page.locator("#expert").get_by_text(re.compile(told)).wait_for()
        stack = seen.page.locator(".stack").first
        assert "experts" in stack.get_attribute("aria-label")
        binding = seen.page.locator("#binding").inner_text()
        assert binding.endswith(".") and ("disk" in binding or "memory" in binding)


def test_everything_is_reached_by_the_keyboard(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        page, reached = seen.page, []
        page.keyboard.type("47 + 85")
        page.keyboard.press("Enter")
        assert seen.answer() == "132"
        page.locator("body").evaluate("() => document.activeElement.blur()")
        for _ in range(24):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.id || document.activeElement.textContent")
            )
        for name in ("anew", "export", "sampling", "prompt", "send", "experts", "Copy", "Edit"):
            assert name in reached, (name, reached)
        page.locator("#experts").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.locator("#expert").get_by_text("Layer 2, expert 1:").wait_for()
        page.locator("#sampling").focus()
        page.keyboard.press("Enter")
        page.locator("#sampling-dialog").wait_for()
        page.keyboard.press("Escape")
        page.locator("#sampling-dialog").wait_for(state="hidden")


def test_a_phone_has_room_for_it(browser, demos) -> None:
    with opened(browser, demos["diffusion"]) as seen:
        page = seen.page
        page.set_viewport_size(PHONE)
        assert seen.ask(SORT) == "12 21 40 57 93"
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert not page.locator("#machine").is_visible()
        page.get_by_role("button", name="Machine").click()
        assert page.locator("#binding").is_visible() and page.locator("#prompt").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


HOSTILE = """\
<script>document.title = "changed"</script>
<img src="http://127.0.0.1:9/a.png" onerror="document.title = 'changed'">

![a](http://127.0.0.1:9/b.png) [b](javascript:document.title='changed') <p style="color: red">c</p>

[d](http://127.0.0.1:9/d) **e** <svg onload=alert(1)> <style>* { display: none }</style>

| a | b |
|--:|---|
| 1 | <b onclick=alert(1)>2</b> |

```html
<script>document.title = "changed"</script>
```
"""


def test_an_answer_can_do_nothing_but_be_read(browser, chatting) -> None:
    letters = [Text(HOSTILE[i : i + 7]) for i in range(0, len(HOSTILE), 7)]
    pieces = [Reasoning(HOSTILE), *letters, done()]
    with scripted(chatting, *pieces), opened(browser, chatting) as seen:
        shown = seen.ask(HOSTILE)
        body = seen.page.locator(".assistant")
        assert (
            body.locator("img, script, style, svg, [style*=color], [onerror], [onclick]").count()
            == 0
        )
        assert seen.page.title() == "demo:autoregressive · lowtide"
        assert "<script>" in shown and "onerror" in shown
        links = body.locator("a")
        assert links.evaluate_all("all => all.map(e => e.getAttribute('href'))") == [
            "http://127.0.0.1:9/b.png",
            "http://127.0.0.1:9/d",
        ]
        assert set(links.evaluate_all("all => all.map(e => e.rel)")) == {"noopener noreferrer"}
        assert body.locator("strong").inner_text() == "e" and body.locator("table").count() == 1
        seen.page.reload()
        seen.page.locator(".assistant strong").wait_for()
        assert body.locator("img, script, style, svg, [onerror], [onclick]").count() == 0
        seen.said[:] = [each for each in seen.said if "events" not in each]  # ended by the reload


def test_errors_are_said_in_words(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        seen.page.locator("#prompt").fill("1 " * 2000)
        seen.page.locator("#prompt").press("Enter")
        seen.answer()
        trouble = seen.page.locator(".trouble").inner_text()
        assert "context length is 512 tokens" in trouble
        seen.said.clear()  # the browser's own line on the refusal


def test_the_key_is_asked_for_once_and_kept_for_the_tab(browser, demos) -> None:
    llm = demos["autoregressive"].service.llm
    with serving(llm, api_key="a key", served_name="keyed") as server:
        seen = Seen(browser, server.url)
        seen.page.goto(server.url)
        dialog = seen.page.locator("#key-dialog")
        dialog.wait_for()
        assert "keyed" not in seen.page.content()
        key = seen.page.get_by_role("textbox", name="Key")
        key.fill("wrong")
        seen.page.keyboard.press("Enter")
        dialog.get_by_text("not the key").wait_for()
        key.fill("a key")
        seen.page.keyboard.press("Enter")
        seen.page.locator("#model").get_by_text("keyed").wait_for()
        assert seen.ask("47 + 85") == "132"
        seen.page.reload()
        seen.page.locator("#model").get_by_text("keyed").wait_for()
        assert not dialog.is_visible()
        assert seen.page.evaluate("localStorage.getItem('lowtide-key')") is None
        seen.context.close()


def test_the_page_paints_without_scripts(browser, chatting) -> None:
    context = browser.new_context(viewport=DESKTOP, java_script_enabled=False)
    page = context.new_page()
    page.goto(chatting.url)
    for place in ("h1", "#welcome", "#prompt", "#machine"):
        assert page.locator(place).is_visible(), place
    context.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    folder: Path = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no program npm: apt install npm")
    packed = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, timeout=120
    )
    if packed.returncode:
        pytest.skip(f"{AXE} cannot be had from npm")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as packages:
        source = packages.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", DEMOS)
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(browser, demos, axe, kind, scheme, size) -> None:
    with opened(browser, demos[kind], color_scheme=scheme, bypass_csp=True) as seen:
        page = seen.page
        page.set_viewport_size(size)
        page.add_script_tag(content=axe)
        check_axe(page)
        seen.ask(SORT)
        if size == PHONE:
            page.get_by_role("button", name="Machine").click()
        check_axe(page)
        page.get_by_role("button", name="Sampling").click()
        check_axe(page)
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (colour == "rgb(17, 23, 26)") is (scheme == "dark")


def check_axe(page: Any) -> None:
    found = page.evaluate("() => axe.run()")
    told = [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]]
    assert told == []


def test_axe_finds_nothing_in_a_long_answer(browser, chatting, axe) -> None:
    text = "# A\n\n- b\n- c\n\n### D\n\n> e\n\n" + "`f`\n\n```py\n" + "g = 1  # " * 40 + "\n```\n\n"
    text += "|a|b|\n|-:|:-:|\n|1|2|\n\n[h](https://i.example/)\n"
    with scripted(chatting, Reasoning("j"), Text(text), done()):
        with opened(browser, chatting, bypass_csp=True) as seen:
            seen.page.add_script_tag(content=axe)
            seen.ask("k")
            seen.page.locator(".body table").wait_for()
            check_axe(seen.page)


def test_the_page_is_whole_after_two_rounds(browser, chatting) -> None:
    with opened(browser, chatting) as seen:
        static = [url for url in seen.asked if url.endswith((".js", ".css"))]
        assert len(static) == len(set(static))
        with httpx.Client(base_url=chatting.url) as client:
            html = client.get("/").text
        assert all(url.removeprefix(f"{chatting.url}/") in html for url in static)
