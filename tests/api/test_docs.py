"""docs/api.md is generated; the page in the repository must be the one the models make now."""

from pathlib import Path

from speccache_api.docs import build_docs

_FILE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    assert _FILE.read_text() == build_docs(), "run: python -m speccache_api.docs > docs/api.md"


def test_every_link_has_a_heading() -> None:
    page = build_docs()
    anchors = {
        line[3:].lower().replace(".", "").replace("[]", "") for line in page.splitlines() if line.startswith("## ")
    }
    links = {part.split(")", 1)[0] for part in page.split("](#")[1:]}
    assert links <= anchors
    assert links
