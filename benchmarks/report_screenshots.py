"""Write the screenshots in docs/ with headless Chromium: reports of synthetic runs of 2 and 1,000 ranks, and a plan.

    python -m benchmarks.report_screenshots [FOLDER]

Requires the extras observe and dev, and the Debian packages chromium and chromium-driver. FOLDER defaults to docs.
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
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping
from moe_plan.pages.plan_page import write_page
from moe_plan.pages.timeline import timeline
from moe_plan.search.request import PlanRequest
from moe_plan.step.simulate import simulate
from tests.support.synthetic import SlowLink, Straggler, SyntheticFault, SyntheticRun, write_run

WIDTH, COLORS, MAX_BYTES = 1280, 160, 400_000
PLANNED = ("tp=2,pp=8", "tp=2,pp=4", "tp=4,pp=8", "tp=1,pp=8", "tp=4,pp=4", "tp=8,pp=4")
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
    """Write one screenshot for each page."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        for name, (theme, run) in RUNS.items():
            with tempfile.TemporaryDirectory() as temporary:
                page = write_report([write_run(Path(temporary) / f"{run.ranks}-ranks", run)])
                save(browser, page, theme, folder / f"{name}.png")
        with tempfile.TemporaryDirectory() as temporary:
            save(browser, plan_page(Path(temporary) / "plan.html"), "light", folder / "plan.png")
    finally:
        browser.quit()


def plan_page(path: Path) -> Path:
    """Write the plan page of Mixtral 8x22B on 128 H100 with mappings of table 3 of MoE Parallel Folding."""
    request = PlanRequest(model_named("mixtral-8x22b"), cluster_named("h100", 128), Workload(4096, capacity=1.0), 256)
    candidates = [request.candidate(Mapping.parse(f"{one},ep=8", 128)) for one in PLANNED]
    best, *others = sorted(candidates, key=lambda one: one.step.seconds)
    model = request.model(best.mapping)
    write_page(request, best, timeline(model), (best, *others), path, simulate(model, {67: 1.5}))
    return path


def save(browser: webdriver.Chrome, page: Path, theme: str, out: Path) -> None:
    """Write the screenshot of a page."""
    out.write_bytes(picture(browser, page, theme))
    print(f"{out}: {out.stat().st_size:,} bytes, of a page of {page.stat().st_size / 1e6:.1f} MB")


def picture(browser: webdriver.Chrome, page: Path, theme: str) -> bytes:
    """Return the full page as a PNG with ``COLORS`` colors."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.set_window_size(WIDTH, 1000)
    browser.get(page.as_uri())
    browser.execute_script(
        "const one = document.getElementById('view-links'); if (one && !one.options[4].disabled) one.value = 'probe';"
        "if (one) one.dispatchEvent(new Event('change'))"
    )
    browser.set_window_size(WIDTH, browser.execute_script("return document.documentElement.scrollHeight") + 150)
    browser.execute_async_script("setTimeout(arguments[0], 1000)")
    shot = Image.open(io.BytesIO(browser.find_element("tag name", "body").screenshot_as_png)).convert("RGB")
    packed = io.BytesIO()
    shot.quantize(COLORS, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    if packed.tell() > MAX_BYTES:
        raise SystemExit(f"{page.name}: the screenshot has {packed.tell():,} bytes; the maximum is {MAX_BYTES:,}")
    return packed.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs")
