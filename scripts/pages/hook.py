"""The hook that gives MkDocs the generated pages. Run as a program, it writes them into docs/, for builders without hooks."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages import benchmarks, zoo
from pages.records import read

SHIM = "https://unpkg.com/iframe-worker/shim"  # what Material loads for a search without a server
DOCS = Path(__file__).parents[2] / "docs"


def generated() -> dict[str, str]:
    """Path in docs -> Markdown."""
    records = read()
    return {**zoo.pages(records), **benchmarks.pages(records)}


def on_config(config: Any) -> Any:
    """Put the generated pages behind the index of their section."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    more = {
        "The zoo": [{name: f"zoo/{name}.md"} for name in zoo.names()],
        "Benchmarks": [{benchmarks.title(r): f"benchmarks/{r.stem}.md"} for r in read()],
    }
    for section in config.nav:
        for name, pages in section.items():
            if name in more:
                pages.extend(more[name])
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages; a written one of the same name gives way."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        old = files.get_file_from_path(path)
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, path, content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the one script that the theme would load from a network from our own copy."""
    from mkdocs.utils import get_relative_url

    return output.replace(SHIM, get_relative_url("assets/iframe-worker/shim.js", page.url))


if __name__ == "__main__":
    for path, text in generated().items():
        target = DOCS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
