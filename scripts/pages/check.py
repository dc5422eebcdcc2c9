"""Check a built site: `python scripts/pages/check.py SITE`. Links, anchors and files are there; nothing is from a network."""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
VISITED = {"canonical", "prev", "next", "edit", "alternate"}  # of <link>: told, not loaded


class Page(HTMLParser):
    """The links, loads, anchors and formulas of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {key: value for key, value in attrs if value is not None}
        self.anchors.update(told[key] for key in ("id", "name") if key in told)
        if tag == "a" and "href" in told:
            self.links.append(told["href"])
        for name, key in LOADS:
            if tag == name and key in told and told.get("rel") not in VISITED:
                self.loads.append(told[key])


def faults(site: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        if where.name == "404.html":  # its links are from the root of wherever it is served
            continue
        for address in page.loads:
            if urlsplit(address).netloc:
                yield f"{where}: loads {address} from a network"
        for address in [*page.loads, *page.links]:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where}: {address} is not there"
            elif (
                url.fragment
                and target in pages
                and unquote(url.fragment) not in pages[target].anchors | {"__top"}
            ):
                yield f"{where}: {address} has no such anchor"
    for sheet in sorted(site.rglob("*.css")):
        for piece in sheet.read_text(encoding="utf-8").split("url(")[1:]:
            address = piece.split(")")[0].strip("\"'")
            if urlsplit(address).netloc:
                yield f"{sheet.relative_to(site)}: loads {address} from a network"
            elif (
                not address.startswith(("data:", "#"))
                and not (sheet.parent / address.split("?")[0].split("#")[0]).exists()
            ):
                yield f"{sheet.relative_to(site)}: {address} is not there"


def main() -> int:
    """Print the faults; 1 if there are any."""
    site = Path(sys.argv[1])
    found = list(faults(site))
    print(*found, sep="\n")
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} faults")
    return bool(found) or not (site / "index.html").exists()


if __name__ == "__main__":
    sys.exit(main())
