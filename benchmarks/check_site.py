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
"""Attribute with the address of a resource that a browser loads, by tag."""
LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "manifest"}
"""Values of ``rel`` with which a browser loads the address of a ``link`` tag."""


class Page(HTMLParser):
    """The links, the anchors and the loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the links, anchors and loaded resources of a tag."""
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in LOADS and attributes.get(LOADS[tag]):
            self.loads.append(attributes[LOADS[tag]])
        if tag == "link" and LOADED_LINKS & set(attributes.get("rel", "").split()):
            self.loads.append(attributes.get("href", ""))


def faults_of(site: Path) -> list[str]:
    """Return one line for each broken link, missing anchor, and resource that is loaded from the network."""
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
                faults.append(f"{name}: the target of {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{name}: the anchor of {link} does not exist")
    for path in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text()):
            faults.append(f"{path.relative_to(site)}: loads {url} from the network")
    return faults


def main() -> None:
    """Print the faults; exit with 1 if there are any."""
    faults = faults_of(Path(sys.argv[1]))
    print("\n".join(faults) if faults else "every local link and anchor exists, and nothing is loaded from the network")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
