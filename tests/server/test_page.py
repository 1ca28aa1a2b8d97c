"""The page at /: what is sent, what /stats says, and the page in a browser."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from server_harness import CHAT, Harness, Script, Serve, hello, load

from strata.engine.gauges import RouteHeat, regions
from strata.interfaces.bundled import model_path
from strata.interfaces.models import LoadedModel
from strata.interfaces.server import replies
from strata.interfaces.server.page import page_files

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_TEMPLATE = (
    "{# <think> </think> #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def test_the_files_need_no_key_and_nothing_from_elsewhere(serve: Serve) -> None:
    server = serve(keys=("k",))
    assert {"/", "/page/app.js", "/page/style.css"} <= set(page_files())
    for path, (content, kind) in page_files().items():
        reply = server.get(path)
        assert reply.status == 200 and reply.body == content
        assert reply.headers["content-type"].partition(";")[0] == kind
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//cdn|<style|\son\w+=|\sstyle=", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
    assert server.get("/page/../app.py").status in (401, 404)
    assert server.get("/stats").status == 401
    assert server.get("/stats", headers={"authorization": "Bearer k"}).status == 200


def test_heads_and_other_methods(serve: Serve) -> None:
    """Monitors ask HEAD; nothing else is answered, and nobody learns more by asking otherwise."""
    server = serve(keys=("k",))
    assert server.request("HEAD", "/health", b"").status == server.get("/health").status == 200
    for path in page_files():
        head = server.request("HEAD", path, b"")
        assert head.status == 200 and "content-security-policy" in head.headers
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
            reply = server.request(method, path, b"{}")
            assert reply.status == 405 and reply.error and reply.headers["allow"]
    for method in ("HEAD", "POST", "DELETE"):
        assert server.request(method, "/stats", b"{}").status == 401
        assert server.request(method, "/stats", b"{}", headers={"x-api-key": "k"}).status == 405
    assert server.request("OPTIONS", "/stats", b"").status == 405


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/page/../app.py",
            "/page/%2e%2e/app.py",
            "/page/..%2fapp.py",
            "/page/....//app.py",
            "/page//app.js",
        ),
        *("//etc/passwd", "/page/app.js\x00.html", "/page/", "/page", "/web/index.html", "/page/app.js%00"),
        *(
            "/index.html",
            "/page/index.html",
            "/PAGE/APP.JS",
            "/stats/",
            "/stats;a",
            "/page\\app.py",
            "/\ud83d",
        ),
        "/" + "a" * 5000,
    ],
)
def test_paths_that_are_none(serve: Serve, path: str) -> None:
    """Files are a table, so that no path leads out of the folder; with a key 404, without one 401."""
    server = serve(keys=("k",))
    raw = path.encode("utf-8", "surrogatepass").decode("latin-1")
    assert server.get(raw).status == 401
    reply = server.get(raw, headers={"authorization": "Bearer k"})
    assert reply.status in (307, 404) and b"import" not in reply.body
    if reply.status == 307:
        assert reply.headers["location"].startswith("http://localhost/")


def test_keys_that_are_none(serve: Serve) -> None:
    server = serve(keys=("k\u00e9y",))
    right = {"authorization": "Bearer k\u00e9y"}
    assert server.get("/stats", headers=right).status == 200
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "Basic a",
        "Bearer k",
        "Bearer k\u00e9y k",
        "k\u00e9y",
        "Bearer\tx",
    ):
        assert server.get("/stats", headers={"authorization": wrong}).status == 401


def test_stats(tiny: Harness) -> None:
    """The documented shape; heat is counted from the first question on."""
    before = tiny.get("/stats").json
    replies.Stats.model_validate(before)
    assert tiny.post(CHAT, hello(ignore_eos=True)).status == 200
    after = tiny.get("/stats").json
    replies.Stats.model_validate(after)
    assert after["tokens"]["decode"] - before["tokens"]["decode"] == 5
    assert after["now"] > before["now"] and after["requests"]["running"] == 0
    experts = after["experts"]
    spec = tiny.engine.decoder.spec
    assert experts["layers"] == [layer for layer in range(spec.layers) if spec.is_moe(layer)]
    assert {len(row) for row in experts["heat"]} == {2 * experts["count"]}
    assert "ff" in "".join(experts["heat"]) and experts["layer_hits"] == []
    (pages,) = after["regions"]
    assert (pages["tier"], pages["name"], pages["used"]) == ("host", "KV pages", 0) and pages["total"] > 0
    assert len([each for each in tiny.engine.observers if isinstance(each, RouteHeat)]) == 1


def test_stats_of_a_server_that_loads(tiny_store: Path) -> None:
    goes_on = threading.Event()

    def slowly() -> LoadedModel:
        goes_on.wait(30)
        return load(tiny_store)

    server = Harness(slowly, wait=False, warm_up=False)
    try:
        reply = server.get("/stats").json
        replies.Stats.model_validate(reply)
        assert reply["status"] == "loading" and reply["tokens"] is reply["experts"] is None
        goes_on.set()
        server.wait_for(lambda: server.get("/stats").json["status"] == "ok")
    finally:
        goes_on.set()
        server.close()


def test_heat_is_counted_only_while_somebody_looks(serve: Serve) -> None:
    server = serve()
    heat = RouteHeat(server.engine)
    server.engine.observers.append(heat)
    server.post(CHAT, hello())
    assert not heat.uses.any()
    assert set("".join(heat.shades())) == {"0"}
    server.post(CHAT, hello())
    uses = heat.uses.sum(axis=1)
    assert uses.all() and heat.shades()[0].count("00") < heat.uses.shape[1]


def test_levels_of_a_device() -> None:
    """Slots and pages of an emulated card, beside the host's pages; hits and misses by layer."""
    server = Harness(lambda: load(model_path("demo"), device_use="emulated", experts_slots=60))
    try:
        server.post(CHAT, hello())
        stats = server.get("/stats").json
        replies.Stats.model_validate(stats)
        names = [(region["tier"], region["name"]) for region in stats["regions"]]
        assert ("device", "expert slots") in names and ("host", "KV pages") in names
        assert all(0 <= level.used <= level.peak <= level.total for _, level, _ in regions(server.engine))
        experts = stats["experts"]
        assert sum(experts["layer_hits"]) + sum(experts["layer_misses"]) > 0
        assert experts["hits"] + experts["fetched"] + experts["computed"] + experts["streamed"] > 0
    finally:
        server.close()


# In a browser


@pytest.fixture(scope="module")
def talking(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    """A server with a key behind a real socket; its address, and what makes it say what a test wants."""
    template = tmp_path_factory.mktemp("template") / "t.jinja"
    template.write_text(_TEMPLATE)
    harness = Harness(lambda: load(tiny_store, chat_template=template), warm_up=False, keys=("secret",))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(harness.app, lifespan="off", log_level="critical", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    served = harness.run(server._serve(sockets=[listener]))
    assert harness.thread.model is not None
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/", Script(harness.thread.model)
    server.should_exit = True
    served.result(30)
    harness.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if _CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=_CHROMIUM, args=[*_FLAGS])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, talking: tuple[str, Script]) -> Iterator[Any]:
    """The page, with its key given. Nothing may go wrong in it that its console would tell."""
    context = browser.new_context(viewport={"width": 1100, "height": 700}, color_scheme="light")
    context.set_default_timeout(60_000)
    page, faults = context.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.goto(talking[0])
    page.locator("#ask[open]").wait_for()  # /stats was refused
    page.fill("#secret", "secret")
    page.press("#secret", "Enter")
    page.locator("#status[data-state=ok]").wait_for()
    yield page
    assert not faults
    context.close()


def _ask(page: Any, text: str) -> Any:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return page.locator("article.assistant").last


@pytest.mark.browser
def test_an_answer_is_text_whatever_it_says(page: Any, talking: tuple[str, Script]) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script> **bold** *slanted* `<b>`"
    talking[1].say(
        f"<think>\nLet <b>me</b> see.\n</think>\n\n{hostile}\n\n```js\n<i>x</i>\n```\n- one\n- two"
    )
    answer = _ask(page, "<u>hi</u>")
    answer.locator(".meta", has_text="tokens").wait_for()
    assert "<img src=x onerror=alert(1)><script>alert(2)</script>" in answer.inner_text()
    assert answer.locator("img, script, b, i, a").count() == 0
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("em").inner_text() == "slanted"
    assert answer.locator("pre code").inner_text() == "<i>x</i>" and answer.locator("li").count() == 2
    fold = answer.locator("details.reasoning")
    assert fold.get_attribute("open") is None and "Let <b>me</b> see." in fold.text_content()
    assert page.locator("article.user .body").inner_text() == "<u>hi</u>"
    assert page.evaluate("() => Object.values(sessionStorage)") == ["secret"]
    assert "secret" not in page.evaluate("() => JSON.stringify(localStorage)")


@pytest.mark.browser
def test_stop_and_go_on(page: Any, talking: tuple[str, Script]) -> None:
    """Esc and the button; the server is rid of the request, and the conversation goes on."""
    script = talking[1]
    script.say("x" * 150)
    script.delay = 0.05
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.click("#send.stop")):
        answer = _ask(page, "go on")
        answer.locator("p", has_text="xx").wait_for()
        page.locator("#running", has_text="1").wait_for()  # the live view sees it
        stop()
        answer.locator(".meta", has_text="stopped").wait_for()
        page.locator("#running", has_text="0").wait_for()
    script.delay = 0.0
    script.say("done")
    answer = _ask(page, "and now?")
    answer.locator(".meta", has_text="tokens").wait_for()
    assert answer.locator(".body").inner_text() == "done"
    page.keyboard.press("Alt+n")
    assert page.locator("article").count() == 0 and page.locator("#empty").is_visible()


@pytest.mark.browser
def test_a_wrong_key_and_what_the_server_refuses(page: Any, talking: tuple[str, Script]) -> None:
    talking[1].say("fine")
    page.click("#key")
    page.fill("#secret", "wrong")
    page.press("#secret", "Enter")
    page.locator("#ask[open]").wait_for()
    page.fill("#secret", "secret")
    page.press("#secret", "Enter")
    page.locator("#status[data-state=ok]").wait_for()
    refused = _ask(page, "word " * 5000)
    refused.locator(".meta.error", has_text="context").wait_for()
    answer = _ask(page, "again")
    answer.locator(".meta", has_text="tokens").wait_for()


@pytest.mark.browser
def test_live_view_theme_and_a_small_screen(page: Any, talking: tuple[str, Script]) -> None:
    talking[1].say("hello there")
    _ask(page, "hi").locator(".meta", has_text="tokens").wait_for()
    page.locator("#regions .region").first.wait_for()
    painted = (
        "() => { const c = document.getElementById('heat'); return new Set(c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data).size }"
    )
    assert page.evaluate(painted) > 8  # more than one colour
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    page.reload()
    page.locator("#status[data-state=ok]").wait_for()  # the key was kept, and so was the theme
    assert page.evaluate(ground) != light
    page.set_viewport_size({"width": 380, "height": 700})
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Alt+l")
    assert not page.locator("#live").is_visible() and page.locator("#prompt").is_visible()
