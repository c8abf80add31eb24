"""The README is short, and the pages lead somewhere. test_pages.py runs their commands."""

import os
import re

from pages import PAGES, ROOT, blocks

README = (ROOT / "README.md").read_text()


def test_the_scripts_to_begin_with_exist():
    top = README.splitlines()[:25]
    for script in ("scripts/demo", "scripts/test"):
        assert any(line.split()[:1] == [script] for line in top)
        assert os.access(ROOT / script, os.X_OK)


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def test_the_quick_start_shows_what_each_command_prints():
    (quick_start,) = (block for block in blocks("sh") if "assets/demo-mha" in block.text)
    commands = list(quick_start.commands())
    assert len(commands) == 5
    assert all(command.promised for command in commands)


def test_every_command_is_on_the_page_of_commands():
    from convert.cli import cli as convert
    from uptrain.cli import cli as uptrain

    page = (ROOT / "docs/cli.md").read_text()
    for program, group in (("convert", convert), ("uptrain", uptrain)):
        for name in group.commands:
            assert f"`{program} {name} " in page, (program, name)


def test_links_lead_somewhere():
    for path in PAGES:
        for target, _, section in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", path.read_text()):
            if target.startswith("http"):
                continue
            page = path.parent / target if target else path
            assert page.exists(), (path.name, target)
            assert not section or section in headings(page), (path.name, target, section)


def headings(page):
    """Return the names by which links find a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
