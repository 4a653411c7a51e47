"""The pages in a real browser: nothing overflows, overlaps, hides, complains or is too faint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eke.report import compare, loss_svg, write_report

pytestmark = pytest.mark.browser

SIZES = [(1280, 900), (390, 844)]

OVERFLOW = """
const wide = document.documentElement.scrollWidth, room = arguments[0], out = [];
if (wide > room || innerWidth > room) out.push(['page', wide, innerWidth]);
for (const e of document.querySelectorAll('main *, header *, footer *')) {
  if (e.closest('svg svg, .scroll, .only-narrow, thead, details:not([open])')) continue;
  const r = e.getBoundingClientRect();
  if (r.width && (r.right > room + 0.5 || r.left < -0.5) && !e.closest('svg'))
    out.push([e.tagName, e.className, r.right, e.textContent.slice(0, 60)]);
}
return out;
"""
HIDDEN = """
return [...document.querySelectorAll('section')].filter(s => {
  const r = s.getBoundingClientRect(), h = s.querySelector('h2').getBoundingClientRect();
  return r.height < 40 || r.width < 300 || h.height < 10;
}).map(s => s.id);
"""
PICTURES = """
const bad = [];
let seen = 0;
for (const svg of document.querySelectorAll('svg.chart')) {
  const box = svg.getBoundingClientRect();
  if (!box.width) continue;
  seen += 1;
  const scale = box.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll('text')];
  const placed = [];
  for (const t of texts) {
    const r = t.getBoundingClientRect(), size = parseFloat(getComputedStyle(t).fontSize) * scale;
    if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 ||
        r.bottom > box.bottom + 1) bad.push(['outside', t.textContent]);
    if (size < 9.5) bad.push(['tiny', size, t.textContent]);
    if (t.closest('.tip')) continue;
    for (const [u, q] of placed)
      if (r.left < q.right - 1 && q.left < r.right - 1 && r.top < q.bottom - 4 &&
          q.top < r.bottom - 4) bad.push(['overlap', t.textContent, u.textContent]);
    placed.push([t, r]);
  }
}
return [seen, bad];
"""
FAINT = """
function rgba(s) { const m = s.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; }
function lum(c) {
  const f = c.slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2];
}
function ground(e) {
  for (let n = e; n; n = n.parentElement) {
    const c = rgba(getComputedStyle(n).backgroundColor);
    if (c[3] > 0.99) return c;
  }
  return [255, 255, 255, 1];
}
const bad = new Map();
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length || ['title', 'desc'].includes(e.tagName)) continue;
  const style = getComputedStyle(e);
  const ink = rgba(e.tagName === 'text' ? style.fill : style.color);
  const [a, b] = [lum(ink), lum(ground(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.set(e.tagName + '.' + (e.getAttribute('class') || ''), ratio);
}
return [...bad];
"""


def show(browser: Any, path: Path, size: tuple[int, int], scheme: str = "light") -> None:
    width, height = size
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(path.as_uri())


def check(browser: Any, size: tuple[int, int], pictures: int) -> None:
    assert browser.execute_script(OVERFLOW, size[0]) == []
    assert browser.execute_script(HIDDEN) == []
    seen, bad = browser.execute_script(PICTURES)
    assert bad == []
    assert seen == pictures
    assert browser.execute_script(FAINT) == []
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert complaints == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_whole_run_can_be_read(
    browser: Any, full_run: Path, size: tuple[int, int], scheme: str
) -> None:
    show(browser, write_report(full_run), size, scheme)
    check(browser, size, pictures=10)
    page = "return getComputedStyle(document.body).backgroundColor"
    red = int(browser.execute_script(page).split("(")[1].split(",")[0])
    assert (red > 128) == (scheme == "light")
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    check(browser, size, pictures=10)


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_run_can_be_read(
    browser: Any, make_run: Callable[..., Any], size: tuple[int, int]
) -> None:
    show(browser, write_report(make_run().root), size)
    check(browser, size, pictures=3)


@pytest.mark.parametrize("size", SIZES)
def test_hostile_and_huge_values_can_be_read(
    browser: Any, make_run: Callable[..., Any], size: tuple[int, int]
) -> None:
    evil = "</title><script>document.title='owned'</script>" + "W" * 300
    run = make_run(steps=48, name=evil)
    run.play()
    run.config(model={"source": evil}, data={"train": evil}, long={evil[-90:]: evil})
    run.json("status.json", state=evil, reason=evil)
    run.open()
    for step in range(40, 48):
        run.decide(step, evil, evil, **{evil: evil, "bound": 1e77})
        run.bill("finish", step, 1e30, flops=1e80, tokens=10**30)
    run.bill("eval", 1, None, flops=None)
    record = {
        "kind": "step", "step": 10**12, "loss": 1e60, "flops_total": 1e70, "tokens": 10**50,
        "padded_tokens": 10**51, "tokens_per_s": 1e50, "tokens_total": 1e60, "phase": evil,
        "lengths": [10**60, 1], "length_cap": 1e50,
    }  # fmt: skip
    run.metrics.append(record)
    show(browser, write_report(run.root), size)
    check(browser, size, pictures=10)
    assert browser.title != "owned"


@pytest.mark.parametrize("size", SIZES)
def test_a_comparison_can_be_read(
    browser: Any, make_run: Callable[..., Any], tmp_path: Path, size: tuple[int, int]
) -> None:
    first = make_run("a", steps=60).play()
    second = make_run("b", steps=80, seed=1, lr=1e-3, name="slower").play(crash=False)
    show(browser, compare([first, second], tmp_path / "c.html"), size, "dark")
    check(browser, size, pictures=1)


def test_the_picture_alone_can_be_read(browser: Any, full_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "loss.svg"
    path.write_text(loss_svg(full_run), encoding="utf-8")
    show(browser, path, (1280, 900))
    seen, bad = browser.execute_script(PICTURES)
    assert (seen, bad) == (1, [])


def test_pointing_at_the_curve_shows_its_numbers(browser: Any, full_run: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    show(browser, write_report(full_run), (1280, 900))
    column = browser.find_elements(By.CSS_SELECTOR, "#loss .wide .column")[-1]
    tip = column.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.value_of_css_property("opacity") == "0"
    hit = column.find_element(By.CSS_SELECTOR, ".hit")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", hit)
    ActionChains(browser).move_to_element(hit).perform()
    assert tip.value_of_css_property("opacity") == "1"
    assert "step 240" in tip.get_attribute("textContent")
