"""The README is short, its numbers are those of the programs, and the pages lead somewhere.

test_pages.py runs their commands.
"""

import json
import os
import re

import pytest
from llama_2_7b import write_llama_2_7b
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


def check_numbers(*numbers):
    """Check that the README says these numbers one after the other, near together, whatever the words between them."""
    pattern = ".{1,60}?".join(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)" for number in numbers)
    assert re.search(pattern, " ".join(README.split())), f"README.md does not say {', '.join(numbers)}"


@pytest.fixture
def seven(tmp_path):
    """Return Llama-2-7B after the conversion to 8 K/V heads, and its parent, without weights."""
    return write_llama_2_7b(tmp_path)


def test_sizes_of_llama_2_7b(convert, seven):
    _, parent = seven
    options = {each["groups"]: each for each in json.loads(convert("inspect", parent, "--json").out)["groups"]}
    before, after = options[32], options[8]
    check_numbers(*(f"{each['kv_cache_bytes_per_token'] / 1e3:.0f}" for each in (before, after)))
    check_numbers(*(f"{each['tensor_bytes'] / 1e9:.1f}" for each in (before, after)))


def test_uptraining_of_llama_2_7b(uptrain, seven):
    model, parent = seven
    plans = [
        json.loads(uptrain("plan", model, "--teacher", parent, "--alpha", alpha, "--json").out)
        for alpha in (0.0025, 0.05)
    ]
    assert [round(plan["tokens"] / 1e9) for plan in plans] == [5, 100]
    short, paper = (f"{plan['time']['attention']['device_hours']['H100']:,.0f}" for plan in plans)
    check_numbers("5", short, "100", paper)
    first = json.loads(
        uptrain("plan", model, "--teacher", parent, "--tokens", "50M", "--global-batch-tokens", 131072, "--json").out
    )
    assert f"This takes {first['time']['attention']['device_hours']['H100']:.1f} H100-hours" in README
    default = plans[0]["memory"]["attention"]
    ways = (default, default["minimum"])
    check_numbers(*(f"{way['replicated_bytes_per_process'] / 1e9:.0f}" for way in ways))
    check_numbers(*(f"{way['sharded_bytes_per_process']['8'] / 1e9:.0f}" for way in ways))


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
