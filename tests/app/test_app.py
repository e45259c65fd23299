"""`sightline app` in a real browser, as a user sees it; and with twenty users at once."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from sightline.app.app import COMPARING, FOUND, Page
from sightline.app.session import Viewer
from sightline.config import App, Erm, Ifam
from sightline.datasets.toy import write_toy
from sightline.interventions.file import Intervention
from sightline.metrics.estimates import Metrics, read_metrics
from sightline.train import train

from ..commands import typed

pytest.importorskip("gradio", reason="needs Gradio: pip install 'sightline[app]'")
SMALL = {"backbone": "sightline-nano", "size": 32, "batch": 16, "workers": 0, "device": "cpu", "epochs": 1, "lr": 1e-4}
PATIENCE = 20_000  # milliseconds


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("data") / "toy", train=32, val=32, test=4, size=32)


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return train(Ifam(toy, out=out, parts=3, selector_size=32, ema=None, balance="none", **SMALL))


@pytest.fixture(scope="module")
def called():
    """Every address that this process, and so the server, has connected to."""
    addresses, real = [], socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda one, to: (addresses.append(to), real(one, to))[1])
        yield addresses


@pytest.fixture(scope="module")
def served(run, called):
    page = Page(Viewer.open(App(run, device="cpu")))
    blocks, url = page.launch()
    yield page, url
    blocks.close()


@pytest.fixture
def visit(served, browser, run):
    """A page that has arrived, of a run without an intervention; `visit.requests` is all that it asked for."""
    (run / "intervention.json").unlink(missing_ok=True)
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.requests, page.wrong = [], []
    page.on("request", lambda one: page.requests.append(one.url))
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.goto(served[1])
    page.wait_for_selector("#b-view .panel")
    yield page
    assert page.wrong == []
    context.close()


def probabilities(page, panel: str) -> str:
    return page.inner_text(f"#{panel}-view .bars")


def changes(page, panel: str, action) -> None:
    """The panel says something else after the action."""
    before = page.inner_text(f"#{panel}-view .panel")
    action()
    says_other = "([panel, before]) => document.querySelector(`#${panel}-view .panel`)?.innerText !== before"
    page.wait_for_function(says_other, arg=[panel, before])


def says(page, where: str, words: str) -> None:
    page.wait_for_selector(f"{where}:has-text({json.dumps(words)})")


def writes(page, where: str, words: str) -> None:
    """Gradio renders what an accordion holds as it opens, and empties a text box once more when it is already there."""
    box = page.locator(where).locator("input, textarea")
    for _ in range(20):
        box.fill(words)
        page.wait_for_timeout(300)
        if box.input_value() == words:
            return
    pytest.fail(f"{where} does not keep what is written into it")


def test_the_heading_says_how_good_the_model_is_and_what_a_and_b_are(served, run):
    page, results = served[0], run / "metrics.json"
    headline = Metrics.from_dict(read_metrics(results)["splits"]["test"]).headline()
    assert f"On test data, as trained: {headline}" in page.heading()
    assert COMPARING in page.heading()
    results.rename(run / "elsewhere.json")
    try:
        assert "On test data" not in page.heading()
    finally:
        (run / "elsewhere.json").rename(results)


def test_removing_a_part_in_a_changes_only_a_and_equals_the_intervention(visit, served):
    page, viewer = served[0], served[0].viewer
    seen, other = [], visit.inner_text("#b-view .panel")
    for part in range(3):
        changes(visit, "a", lambda part=part: visit.click(f"#a-parts label >> nth={part}"))
        prediction = viewer.predict(viewer.example(page.rows[0]), Intervention(drop=(part,)))
        best = prediction.probabilities.argsort(descending=True)
        shown = re.findall(r"(\d+) %", probabilities(visit, "a"))
        assert shown == [f"{100 * float(prediction.probabilities[k]):.0f}" for k in best]
        assert f"without part {part}" in visit.inner_text("#a-view .words")
        seen.append(visit.get_attribute("#a-view img >> nth=0", "src"))
        changes(visit, "a", lambda part=part: visit.click(f"#a-parts label >> nth={part}"))
    assert len(set(seen)) > 1
    assert visit.inner_text("#b-view .panel") == other
    for part in range(2):
        changes(visit, "a", lambda part=part: visit.click(f"#a-parts label >> nth={part}"))
    visit.click("#a-parts label >> nth=2")
    says(visit, "#a-view [role=alert]", "keep at least one")


def test_the_slider_removes_tokens_and_both_panels_are_evaluated_by_group(visit):
    def slide():
        visit.fill("#b-removed input[type=number]", "20")
        visit.press("#b-removed input[type=number]", "Enter")

    changes(visit, "b", slide)
    assert "0.8 distance quantile" in visit.inner_text("#b-view .words")
    visit.click("#a-parts label >> nth=1")
    says(visit, "#a-view .words", "without part 1")
    visit.click("#measure")
    says(visit, "#effects th", "A: without part 1")
    says(visit, "#effects th", "B: token removal beyond the 0.8 distance quantile")
    assert visit.locator("#effects tr").count() == 1 + 4 + 1


def test_a_drawn_mask_is_the_sight_of_b_until_it_is_cleared(visit):
    def stroke():
        box = visit.locator("#drawing canvas").bounding_box()
        for x, y, press in ((0.3, 0.3, visit.mouse.down), (0.6, 0.5, visit.mouse.up)):
            visit.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            press()

    visit.locator("#drawing canvas").scroll_into_view_if_needed()
    changes(visit, "b", stroke)
    assert "the drawn mask" in visit.inner_text("#b-view .words")
    assert 0 < int(re.search(r"sees (\d+) %", visit.inner_text("#b-view .words"))[1]) < 40
    assert visit.is_checked("#b-source input >> nth=1")
    visit.click("#drawing .clear")
    says(visit, "#b-view [role=alert]", "the drawn mask is empty")
    visit.click("#b-save")
    says(visit, "#status [role=alert]", "for one image")


def test_a_saved_intervention_applies_to_the_next_user_and_to_predict(visit, run, toy, browser, served):
    visit.click("#a-parts label >> nth=2")
    says(visit, "#a-view .words", "without part 2")
    visit.click("#names button")
    writes(visit, "#name-1", "<b>head</b>")
    says(visit, "#a-parts label", "<b>head</b>")
    visit.click("#a-save")
    says(visit, "#status", "Saved to")
    kept = Intervention.load(run / "intervention.json")
    assert (kept.drop, kept.names) == ((2,), {1: "<b>head</b>"})
    _, _, err = typed("predict", run, next((toy / "val").iterdir()), "--device", "cpu")
    assert "without part 2" in err
    with browser.new_context() as context:
        later = context.new_page()
        later.goto(served[1])
        says(later, "#a-view .words", "without part 2")
        says(later, "#b-view .words", "as trained")
        says(later, "#a-parts label", "<b>head</b>")


def test_images_are_chosen_or_uploaded_and_other_files_are_refused(visit, tmp_path):
    changes(visit, "a", lambda: visit.click("#gallery button >> nth=5"))
    assert "labelled" in visit.inner_text("#status")
    before = visit.inner_text("#a-view .panel")
    (tmp_path / "notes.png").write_text("no picture")
    visit.set_input_files("#file input[type=file]", tmp_path / "notes.png")
    says(visit, "#status [role=alert]", "notes.png: not a readable image")
    assert visit.inner_text("#a-view .panel") == before
    noise = np.random.default_rng(0).integers(0, 255, (300, 700), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "grey.png")
    changes(visit, "a", lambda: visit.set_input_files("#file input[type=file]", tmp_path / "grey.png"))
    says(visit, "#status", "grey.png")
    first = visit.get_attribute("#gallery img >> nth=0", "src")
    visit.click("#others")
    visit.wait_for_function("first => document.querySelector('#gallery img').src !== first", arg=first)


def test_neither_page_nor_server_connects_to_the_internet(visit, called):
    visit.click("#a-parts label >> nth=0")
    says(visit, "#a-view .words", "without part 0")
    elsewhere = [url for url in visit.requests if not re.match(r"(http://127\.0\.0\.1:|data:|blob:)", url)]
    assert elsewhere == []
    assert {to[0] for to in called if isinstance(to, tuple)} <= {"127.0.0.1", "localhost", "::1"}


def test_on_a_phone_nothing_is_wider_than_the_screen(served, browser):
    with browser.new_context(viewport={"width": 390, "height": 800}) as context:
        page = context.new_page()
        page.goto(served[1])
        page.wait_for_selector("#b-view .panel", timeout=PATIENCE)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("img:not([alt])").count() == 0


def test_a_method_that_sees_everything_shows_what_it_relies_on(toy, tmp_path, browser):
    page = Page(Viewer.open(App(train(Erm(toy, out=tmp_path / "erm", **SMALL)), device="cpu")))
    blocks, url = page.launch()
    with browser.new_context() as context:
        visit = context.new_page()
        visit.goto(url)
        says(visit, "#a-view figcaption", "relevance")
        assert "It sees the whole image" in visit.inner_text("#a-view .words")
        assert not visit.is_visible("#b-view")
    blocks.close()


def test_twenty_users_at_once_each_get_predictions_for_their_own_image(served, tmp_path):
    from gradio_client import Client, handle_file

    page, url = served
    generator = np.random.default_rng(1)

    def use(number: int) -> tuple[str, str]:
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels[number]).save(path)
        client = Client(url, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 120})
        every = (FOUND, [0, 1, 2], 0)
        client.predict(handle_file(path), *every, *every, api_name="/upload")
        panel = client.predict(FOUND, [k for k in range(3) if k != number % 3], 0, "", api_name="/predict_a")
        return str(path), panel

    pixels = generator.integers(0, 255, (20, 40, 40, 3), dtype=np.uint8)
    with ThreadPoolExecutor(20) as pool:
        panels = [*pool.map(use, range(20))]
    for number, (path, panel) in enumerate(panels):
        shown = [k for k in range(3) if k != number % 3]
        assert panel == page.predict(page.viewer.read(Path(path)), FOUND, shown, 0, "")
    assert len({panel for _, panel in panels}) == 20


def test_a_port_in_use_is_an_error(served, run):
    port = int(served[1].rstrip("/").rpartition(":")[2])
    code, _, err = typed("app", run, "--port", port, "--device", "cpu")
    assert (code, "choose another --port" in err, err.count("\n")) == (2, True, 1), err


def answer(url, method="GET", path="/", **headers) -> int:
    """The status of a request with these headers."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse().status


def test_the_running_server_refuses_other_hosts_and_origins(served):
    url = served[1]
    assert answer(url) == 200
    assert answer(url, Host="evil.example") == 403
    assert answer(url, Host="evil.example:7860", path="/gradio_api/info") == 403
    assert answer(url, "POST", "/gradio_api/queue/join", Origin="http://evil.example") == 403
    assert answer(url, "POST", "/gradio_api/upload", Content_Length=str(1 << 40)) == 413


def test_a_server_that_others_can_reach_wants_its_token(run):
    page = Page(Viewer.open(App(run, device="cpu", host="0.0.0.0")))
    blocks, url = page.launch()
    try:
        token = url.partition("token=")[2]
        local = f"http://127.0.0.1:{urlsplit(url).port}"
        assert len(token) >= 32
        assert answer(local) == 401
        assert answer(local, path="/?token=wrong") == 401
        assert answer(local, path=f"/?token={token}") == 303
        assert answer(local, Cookie=f"sightline_token={token}") == 200
    finally:
        blocks.close()
