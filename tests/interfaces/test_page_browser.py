"""The node's page in Chromium, from end to end: a drawn digit, its answer, and what the server saw of it.

HEINFER_CHROMIUM names the browser where it is not `chromium` or `google-chrome`; HEINFER_REQUIRE_BROWSER=1 makes its
absence a failure. HEINFER_PAGE_PICTURE=docs/node-page.png keeps a picture of the page (`make page-picture`).
"""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from heinfer.plan import TensorSpec
from heinfer.wire import TokenFile, make_token, token_line
from partitioner import partition
from tests.interfaces.fakes import FakeModel, FakeModels, digit_answer, fake_models, fake_plan
from tests.interfaces.page_serving import page_of
from tests.parties import REPOSITORY, Process, start
from trusted_node.serving.interface import ModelState, QueueFullError

MODEL = REPOSITORY / "models" / "released" / "mnist_dp" / "model.onnx"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE, NARROW = (ViewportSize(width=w, height=h) for w, h in ((1280, 900), (390, 844), (320, 640)))
#: Milliseconds that an answer may take on a busy machine.
PATIENCE_MS = 20_000
#: A seven, as corners on the drawing area's side.
SEVEN = ((0.25, 0.2), (0.72, 0.2), (0.6, 0.5), (0.45, 0.85))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    named = os.environ.get("HEINFER_CHROMIUM")
    found = [named] if named else [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        reason = f"needs Chromium, expected as one of {', '.join(BROWSERS)} (HEINFER_CHROMIUM names another)"
        if os.environ.get("HEINFER_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses to run as root
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found[0], args=options)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Server and node as processes of the command line, with the released private model."""
    folder = tmp_path_factory.mktemp("page")
    bundle = folder / "bundle"
    partition(MODEL, bundle)
    with start(folder / "server.log", "serve", str(bundle / "server"), "--listen", "127.0.0.1:0") as server:
        options = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--page", "--prepared", "4")
        arguments = ("node", str(bundle / "node"), "--server", server.address, *options)
        with start(folder / "node.log", *arguments) as running:
            yield running


@contextmanager
def opened(
    browser: Browser, origin: str, viewport: ViewportSize = DESKTOP, expected_errors: int = 0, **options: Any
) -> Iterator[Page]:
    """Open the page; at the end there was no error on its console, and no request to anywhere else."""
    context = browser.new_context(viewport=viewport, **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    errors: list[str] = []
    addresses: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    try:
        page.goto(origin)
        yield page
    finally:
        context.close()
    assert len(errors) == expected_errors, errors
    assert {a for a in addresses if not a.startswith((f"{origin}/", "data:"))} == set()


def drawn(page: Page, corners: tuple[tuple[float, float], ...] = SEVEN) -> None:
    """Draw with the mouse."""
    pad = page.locator("#pad")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()


def asked(page: Page) -> tuple[dict[str, Any], dict[str, Any]]:
    """Press the button; return what the page sent and what it got."""
    with page.expect_response("**/page/infer") as response:
        page.get_by_role("button", name="Ask under encryption").click()
    expect(page.locator("#said")).not_to_have_text("Asking ...")
    expect(page.locator("#run")).to_be_enabled()
    sent: dict[str, Any] = response.value.request.post_data_json
    got: dict[str, Any] = response.value.json()
    return sent, got


def ready(page: Page) -> None:
    expect(page.locator("#model")).to_be_enabled(timeout=PATIENCE_MS)


def pixels(page: Page, name: str) -> list[int]:
    """The red of every pixel of a canvas."""
    found: list[int] = page.evaluate(
        "name => { const c = document.getElementById(name);"
        " return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((_, i) => i % 4 === 0); }",
        name,
    )
    return found


@pytest.fixture(scope="module")
def plain() -> Callable[[list[float]], np.ndarray]:
    """The model in the clear."""
    session = onnxruntime.InferenceSession(MODEL)

    def run(values: list[float]) -> np.ndarray:
        image = np.array(values, np.float32).reshape(1, 1, 28, 28)
        logits: np.ndarray = session.run(None, {session.get_inputs()[0].name: image})[0][0]
        return logits

    return run


@pytest.mark.slow
def test_drawn_digit_gets_the_plain_models_answer_and_the_server_sees_other_noise_each_time(
    browser: Browser, node: Process, plain: Callable[[list[float]], np.ndarray]
) -> None:
    with opened(browser, f"http://{node.addresses['http']}") as page:
        ready(page)
        expect(page.locator("#node-state")).to_have_text("ready")
        expect(page.locator("article")).to_contain_text("epsilon = 2.929 at delta = 1e-05")
        expect(page.locator("#run")).to_be_disabled()  # nothing is drawn
        place = page.locator("#models-title").bounding_box()
        drawn(page)
        sent, first = asked(page)
        wanted = plain(sent["data"])
        assert len(sent["data"]) == 784
        assert int(wanted.argmax()) == 7
        # 10,000 images had errors up to 2e-3 (README); another image may have a few times that.
        np.testing.assert_allclose(first["outputs"][0]["values"], wanted, atol=1e-2)
        expect(page.locator("#said")).to_have_text(re.compile("^Result: 7, in "))
        expect(page.locator("#bars .top")).to_have_text(re.compile("^7"))
        expect(page.locator("#node-answer")).to_have_text("7")
        expect(page.locator("#upload")).to_contain_text("2,116 numbers of 50 bits")
        assert pixels(page, "node-picture") == pixels(page, "small")
        noise = pixels(page, "server-picture")
        assert noise == list(base64.b64decode(first["server"]["picture"]))

        again, second = asked(page)
        assert again == sent
        expect(page.locator("#again")).to_contain_text("The same query again: other noise.")
        assert pixels(page, "before-picture") == noise
        assert second["server"]["picture"] != first["server"]["picture"]
        equal = sum(a == b for a, b in zip(noise, pixels(page, "server-picture"), strict=True))
        assert equal < 40  # 8.3 by chance; 40 or more with a probability below 1e-14
        assert page.locator("#models-title").bounding_box() == place  # nothing has jumped


def test_sample_digits_can_be_had_by_keyboard_and_are_what_they_say(browser: Browser, node: Process) -> None:
    with opened(browser, f"http://{node.addresses['http']}", PHONE) as page:
        ready(page)
        for digit in range(10):
            page.get_by_role("button", name=f"Draw a sample {digit}").focus()
            page.keyboard.press("Enter")
            _, found = asked(page)
            shares = found["outputs"][0]["shares"]
            assert (int(np.argmax(shares)), max(shares) > 0.9) == (digit, True), shares


def test_drawing_is_scaled_and_centred_by_its_mass_wherever_it_is(browser: Browser) -> None:
    with page_of(fake_models()) as origin, opened(browser, origin) as page:
        ready(page)
        page.select_option("#model", "digits")
        found = []
        for size, left, top in ((1.0, 0.0, 0.0), (0.5, 0.4, 0.05)):
            page.get_by_role("button", name="Clear").click()
            drawn(page, tuple((left + size * x, top + size * y) for x, y in SEVEN))
            image = np.array(asked(page)[0]["data"]).reshape(28, 28)
            rows, columns = np.nonzero(image > 0.05)
            assert 19 <= np.ptp(rows) + 1 <= 21
            centre = [(image * place).sum() / image.sum() for place in np.indices(image.shape) + 0.5]
            assert centre == pytest.approx([14, 14], abs=0.15)
            assert image.max() == 1
            assert np.ptp(columns) < 20
            found.append(image)
        assert np.abs(found[0] - found[1]).mean() < 0.03  # the mouse moves by whole pixels


def test_touch_draws_as_a_mouse_does(browser: Browser) -> None:
    with page_of(fake_models()) as origin, opened(browser, origin, PHONE, has_touch=True) as page:
        ready(page)
        page.select_option("#model", "digits")
        page.locator("#pad").tap()
        assert max(asked(page)[0]["data"]) > 0.9


def test_token_is_asked_for_and_kept_nowhere(browser: Browser, tmp_path: Path) -> None:
    token = make_token()
    (tmp_path / "tokens").write_text(token_line(token, "ward"))
    with (
        page_of(fake_models(), TokenFile(tmp_path / "tokens")) as origin,
        opened(browser, origin, expected_errors=2) as page,  # Chromium notes both answers of 401
    ):
        expect(page.locator("#node-state")).to_have_text("locked")
        for attempt, said in (("wrong", "That token was not taken."), (token, "")):
            page.get_by_label("This node wants a token").fill(attempt)
            page.keyboard.press("Enter")
            expect(page.locator("#token-error")).to_have_text(said)
        ready(page)
        expect(page.locator("#token-form")).to_be_hidden()
        page.select_option("#model", "digits")
        drawn(page)
        assert "outputs" in asked(page)[1]
        assert page.context.cookies() == []
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert token not in page.content()


def unloaded(page: Page) -> None:
    """Wait until the page knows that its model is being unloaded."""
    expect(page.locator("article").first).to_contain_text("digits – unloading")  # noqa: RUF001


def test_failures_can_be_read_and_pass(browser: Browser) -> None:
    models = fake_models()
    with page_of(models) as origin, opened(browser, origin, expected_errors=1) as page:
        ready(page)
        page.select_option("#model", "digits")
        drawn(page)
        models["digits"].refusal = QueueFullError("1024 queries wait already")
        asked(page)
        expect(page.locator("#said")).to_have_text("The node is busy. Try again in a moment. 1024 queries wait already")
        models["digits"].refusal = None
        models["digits"].state = ModelState.UNLOADING
        unloaded(page)
        models["digits"].state = ModelState.READY
        expect(page.locator("#models-ready")).to_have_text("3 of 3")
        page.select_option("#model", "digits")
        asked(page)
        expect(page.locator("#said")).to_have_text(re.compile("^Result: "))


def test_other_models_take_a_file_or_random_values(browser: Browser) -> None:
    plan = fake_plan("vector", [TensorSpec("v", (3,))], [TensorSpec("y", (3,))])
    model = FakeModel(plan, lambda inputs: {"y": inputs["v"] * 2})
    file = io.BytesIO()
    np.save(file, np.array([1.0, -2.0, 3.5]))
    with page_of(FakeModels(model)) as origin, opened(browser, origin) as page:
        ready(page)
        expect(page.locator("#pad")).to_be_hidden()
        expect(page.locator("#expected")).to_have_text("Input: v, float32, shape (3)")
        assert asked(page)[0]["data"] == "random"
        page.get_by_label("An .npy file").set_input_files(
            {"name": "v.npy", "mimeType": "application/octet-stream", "buffer": file.getvalue()}
        )
        assert asked(page)[1]["outputs"][0]["values"] == [2.0, -4.0, 7.0]


def test_what_a_card_says_is_text_whatever_it_holds(browser: Browser) -> None:
    attack = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    plan = fake_plan("m", [TensorSpec("x", (1, 28, 28))], [TensorSpec("y", (10,))])
    card = {"dataset": attack, "epsilon": 1.0, "delta": 1e-5, "adjacency": attack, "classes": [attack] * 10}
    with page_of(FakeModels(FakeModel(plan, digit_answer, card=card))) as origin, opened(browser, origin) as page:
        ready(page)
        drawn(page)
        asked(page)
        expect(page.locator("#bars .top")).to_contain_text("<img src=x")
        expect(page.locator("article")).to_contain_text(attack)
        expect(page).to_have_title("Trusted node")


def test_status_is_asked_every_second_and_not_when_hidden(browser: Browser) -> None:
    with page_of(fake_models()) as origin, opened(browser, origin) as page:
        ready(page)
        with page.expect_response("**/page/status"):
            pass
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        asked_while_hidden: list[str] = []
        page.wait_for_timeout(200)  # an answer may be on its way
        page.on("request", lambda request: asked_while_hidden.append(request.url))
        page.wait_for_timeout(1500)
        assert asked_while_hidden == []
        with page.expect_response("**/page/status"):
            page.evaluate(
                "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE, NARROW], ids=lambda v: str(v["width"]))
def test_page_fits_every_width(browser: Browser, viewport: ViewportSize) -> None:
    with page_of(fake_models()) as origin, opened(browser, origin, viewport) as page:
        ready(page)
        page.select_option("#model", "digits")
        drawn(page)
        asked(page)
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_picture_for_the_documentation(browser: Browser, node: Process) -> None:
    wanted = os.environ.get("HEINFER_PAGE_PICTURE")
    if not wanted:
        pytest.skip("a picture is taken where HEINFER_PAGE_PICTURE names its file (make page-picture)")
    with opened(browser, f"http://{node.addresses['http']}") as page:
        ready(page)
        for digit in (3, 5, 0, 8):
            page.get_by_role("button", name=f"Draw a sample {digit}").click()
            asked(page)
        page.get_by_role("button", name="Clear").click()
        drawn(page)
        asked(page)
        asked(page)
        page.wait_for_timeout(1500)  # until pool and latencies are shown as they are after it
        page.screenshot(path=wanted, full_page=True)
