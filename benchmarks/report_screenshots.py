"""The pictures of reports in docs/: made-up runs of 2 and of 1,000 ranks, drawn by headless Chromium.

    python benchmarks/report_screenshots.py [FOLDER]

Needs the extras observe and dev, and Debian's packages chromium and chromium-driver. FOLDER: docs.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver

from moe_comm.observe.report import write_report
from moe_comm.observe.synthetic import SlowLink, Straggler, SyntheticFault, SyntheticRun, write_run

WIDTH, COLORS, MOST_BYTES = 1280, 160, 400_000
RUNS = {
    "report-2-ranks": (
        "light",
        SyntheticRun(ranks=2, steps=200, layers=4, experts=16, step_s=0.2, faults=(SyntheticFault(90, "died", (1,)),)),
    ),
    "report-1000-ranks": (
        "dark",
        SyntheticRun(
            ranks=1000,
            steps=2000,
            layers=48,
            experts=128,
            tp=2,
            pp=4,
            step_s=4.0,
            load_every=20,
            checkpoint_every=200,
            stragglers=(Straggler(137, 1.4), Straggler(612, 1.3, 800)),
            slow_links=(SlowLink(240, 512, 6.0),),
            faults=(
                SyntheticFault(310, "died", (421,), injected=True),
                SyntheticFault(700, "nonfinite", (7,), "skip"),
                SyntheticFault(1400, "stuck", (880,), noticed_s=5.0, lost=100, down_s=240.0),
            ),
        ),
    ),
}


def main(folder: Path) -> None:
    """Write one picture for each run."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        for name, (theme, run) in RUNS.items():
            with tempfile.TemporaryDirectory() as place:
                page = write_report([write_run(Path(place) / f"{run.ranks}-ranks", run)])
                out = folder / f"{name}.png"
                out.write_bytes(picture(browser, page, theme))
                print(f"{out}: {out.stat().st_size:,} bytes, of a page of {page.stat().st_size / 1e6:.1f} MB")
    finally:
        browser.quit()


def picture(browser: webdriver.Chrome, page: Path, theme: str) -> bytes:
    """The whole page as a PNG of few colours."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.set_window_size(WIDTH, 1000)
    browser.get(page.as_uri())
    browser.execute_script(
        "const one = document.getElementById('view-links'); if (!one.options[4].disabled) one.value = 'probe'"
    )
    browser.execute_script("document.getElementById('view-links').dispatchEvent(new Event('change'))")
    browser.set_window_size(WIDTH, browser.execute_script("return document.documentElement.scrollHeight") + 150)
    browser.execute_async_script("setTimeout(arguments[0], 1000)")
    shot = Image.open(io.BytesIO(browser.find_element("tag name", "body").screenshot_as_png)).convert("RGB")
    packed = io.BytesIO()
    shot.quantize(COLORS, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    if packed.tell() > MOST_BYTES:
        raise SystemExit(f"{page.name}: {packed.tell():,} bytes are too many for the documentation")
    return packed.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs")
