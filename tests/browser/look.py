"""Looks at the page as people do: a browser, in an environment of its own, opens every view and tells what it saw as JSON.

python look.py BROWSER ADDRESS FOLDER       pictures of every view go to FOLDER, light, dark and as wide as a phone
                                ... views   and nothing but the views is looked at
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

VIEWS = ("overview", "curves", "timeline", "samples", "samples?failed=1", "evaluation", "health", "bus", "memory")
LOOKS = {"light": (1440, 900, "light"), "dark": (1440, 900, "dark"), "phone": (390, 844, "light")}
SEEN = """() => {
  const main = document.querySelector("main"), text = main.innerText.trim();
  const wide = [...document.querySelectorAll("body *")].filter((each) => each.getBoundingClientRect().right > innerWidth + 1
    && !each.closest(".wide, pre, nav, .events, .uplot, .entry, .skip")).map((each) => `${each.tagName}.${each.className}`);
  const charts = [...document.querySelectorAll(".chart, .spark")];
  return { text, title: document.title, wide: wide.slice(0, 5),
    scripts: main.querySelectorAll("script, img:not(.media img), iframe").length,
    overflow: document.documentElement.scrollWidth - innerWidth, trouble: document.querySelector("#trouble").innerText,
    charts: charts.length, blank: charts.filter((each) => !each.innerText.trim() || each.offsetWidth < 100).length };
}"""


def see(page: Page, address: str, view: str) -> dict[str, Any]:
    page.goto(f"{address}#/{view}")
    page.wait_for_function(
        "view => document.querySelector('nav [aria-current]')?.getAttribute('href').startsWith('#/' + view) "
        "&& document.querySelector('main > .' + view) && document.querySelector('main').innerText.trim()",
        arg=view.partition("?")[0],
        timeout=60_000,
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.chart, .spark')].every(e => e.innerText.trim())", timeout=60_000
    )
    page.wait_for_timeout(300)
    if view == "timeline":
        page.locator("canvas").last.hover(position={"x": 60, "y": 38})
    return dict(page.evaluate(SEEN))


def main(browser_path: str, address: str, folder: str, what: str = "") -> None:
    root = address.partition("#")[0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"console": [], "elsewhere": [], "views": {}}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for look, (width, height, scheme) in LOOKS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page = context.new_page()
            page.on("console", lambda message: told["console"].append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: told["console"].append(str(error)))
            page.on(
                "request",
                lambda request: (
                    request.url.removeprefix("blob:").startswith(root) or told["elsewhere"].append(request.url)
                ),
            )
            page.goto(address)
            for view in VIEWS:
                told["views"][f"{look} {view}"] = see(page, root, view)
                page.screenshot(path=f"{folder}/{look}-{view.replace('?', '-')}.png")
            if look == "light" and what != "views":
                told["keys"] = keys(page)
                told["tokens"] = tokens(page, root, folder)
        browser.close()
    print(json.dumps(told))


def tokens(page: Page, root: str, folder: str) -> dict[str, Any]:
    """A prompt group that is kept in full: another of its samples, and how many backgrounds each choice of colours gives."""
    see(page, root, "samples?failed=1")
    page.locator(".kept .entry").first.click()
    colours = []
    for value in ("log_probs", "advantages", "versions", ""):
        page.locator(".kept select").select_option(value)
        colours.append(
            page.evaluate(
                "new Set([...document.querySelectorAll('.tokens span')].map(e => getComputedStyle(e).backgroundColor)).size"
            )
        )
        page.locator(".kept").screenshot(path=f"{folder}/tokens-{value or 'nothing'}.png")
    dim, num = page.locator(".tokens .dim").count(), page.locator(".kept .entry").count()
    title = "owned" if "owned" in page.title() else "not owned"
    text = page.locator(".tokens").text_content()
    return {"colours": colours, "dim": dim, "samples": num, "title": title, "text": text, "media": media(page, folder)}


def media(page: Page, folder: str) -> dict[str, Any]:
    """What of a prompt can be seen and heard: how wide its pictures are, how long its sounds, and what is said of others."""
    page.locator(".media button").click()
    for kind in ("img", "audio"):
        page.locator(f".media {kind}").wait_for()
    wide = page.evaluate(
        "Promise.all([...document.querySelectorAll('.media img')].map(e => e.decode().then(() => e.naturalWidth)))"
    )
    long = page.evaluate(
        "Promise.all([...document.querySelectorAll('.media audio')].map(e => e.duration || new Promise("
        "done => e.addEventListener('loadedmetadata', () => done(e.duration)))))"
    )
    page.locator(".media").screenshot(path=f"{folder}/media.png")
    return {"wide": wide, "long": long, "said": page.locator(".media .empty").all_text_contents()}


def keys(page: Page) -> list[str]:
    """The views that keys lead to."""
    found = []
    for key in "12345678":
        page.keyboard.press(key)
        page.wait_for_timeout(50)
        found.append(page.evaluate("location.hash.slice(2).split('?')[0]"))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
