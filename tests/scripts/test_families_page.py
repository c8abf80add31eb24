"""docs/families.md says of each family what is so: each row is tried on a tiny model."""

import re
from pathlib import Path

import pytest
import tiny
from families_without_gqa import mt5, t5
from tiny_tokenizers import make_tokenizer

from convert.layers.layer_stream import open_checked
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError, InputError
from model.families import FAMILIES, NATIVE_FAMILIES
from uptrain.models.checks import check_exportable, check_packing
from uptrain.models.load import load_student

PAGE = Path(__file__).parents[2] / "docs/families.md"
TABLE = PAGE.read_text().partition("|---|")[2]
ROWS = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `(\w+)`[^|]* \| (.*) \|$", TABLE, re.MULTILINE)}


def test_every_family_has_a_row():
    assert sorted(ROWS) == sorted(name for name in FAMILIES if not name.endswith("_gqa"))
    n_trained = sum(not trained.startswith("no:") for _, trained, _ in ROWS.values())
    assert f"`uptrain` trains {n_trained} of the {len(ROWS)};" in PAGE.read_text()
    readme = (PAGE.parents[1] / "README.md").read_text()
    assert f"{len(ROWS)} families" in readme
    assert re.search(rf"`uptrain`\s+trains {n_trained}\b", readme)


@pytest.mark.parametrize("family", sorted(set(tiny.STOCK) & set(ROWS)))
def test_row(convert, tmp_path, family):
    default, trained, opens = ROWS[family]
    size = {"hidden_size": 64} if family == "stablelm" else {}  # a quarter of a head is rotated, which must be even
    folder = tiny.save(tiny.build(family, **size), tmp_path / "source")
    merged = convert(
        "mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "pca", "--calibration", "none", "--dry-run"
    )
    assert (default, merged.code) == ("fit", 0)
    with open_checkpoint(folder) as checkpoint:
        open_checked(checkpoint, "cpu")
    assert trained == how_trained(family, folder)
    assert FAMILIES[tiny.inner(family)].joins_experts == (trained == "attention")
    inside = tiny.TEXT_TYPES.get(family, tiny.inner(family))
    assert opens == ("the stock class" + f" (the `{inside}` inside is merged)" * (family in tiny.WRAPPERS))


def how_trained(family: str, folder: Path) -> str:
    part = "attention" if family in tiny.WRAPPERS or FAMILIES[family].joins_experts else "all"
    try:
        check_exportable(folder, part)
        check_packing(load_student(folder, part), seq_len=8)
    except CheckpointError as error:
        assert "only causal models can be trained" in str(error)
        return "no: not causal"
    if family in tiny.WRAPPERS:
        return "on text"
    try:
        check_exportable(folder, "all")
    except InputError:
        return "attention"
    return "own code" if family in NATIVE_FAMILIES else "yes"


@pytest.mark.parametrize("family", ["falcon", "gpt_neox", "mpt", "mt5", "t5"])
def test_rows_of_families_with_tests_of_their_own(convert, tmp_path, family):
    """See tests/numerics/test_families_without_gqa.py and test_custom_code.py."""
    assert family not in tiny.STOCK
    which = {"falcon": "fit, to one K/V head", "mt5": "fit (the decoder)", "t5": "fit (the decoder)"}
    assert ROWS[family][0] == which.get(family, "fit")
    make = {"mt5": mt5, "t5": t5}.get(family)
    model = make(vocab_size=300) if make else tiny.build(family, vocab_size=300, hidden_size=64)
    source = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", tiny.few(family), "--dry-run").succeeded()
    assert "fit" in result.out
