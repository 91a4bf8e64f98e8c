"""Check a built site: every local link and anchor exists, and no page loads anything from the network.

python -m benchmarks.check_site build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
"""Attributes that make a browser load something, by tag; and ``link``, by ``rel``."""
LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "manifest"}


class Page(HTMLParser):
    """The links, the anchors and the loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and given.get(LOADS[tag]):
            self.loads.append(given[LOADS[tag]])
        if tag == "link" and LOADED_LINKS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))


def faults_of(site: Path) -> list[str]:
    """One line for each fault of the site."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") or parts.netloc:
                if link in page.loads:
                    faults.append(f"{name}: loads {link} from the network")
                continue
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.path in ("/", ".") or (path.name == "404.html" and parts.path.startswith("/")):
                continue
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                faults.append(f"{name}: no {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{name}: no anchor {link}")
    for path in sorted(site.rglob("*.css")):
        for found in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text()):
            faults.append(f"{path.relative_to(site)}: loads {found} from the network")
    return faults


def main() -> None:
    """Print the faults; exit with 1 if there are any."""
    faults = faults_of(Path(sys.argv[1]))
    print("\n".join(faults) if faults else "every local link and anchor exists, and nothing is loaded from the network")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
