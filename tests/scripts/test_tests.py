"""The tests themselves: what pytest would pass without noticing."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def without_body(text: str) -> list[str]:
    """Return the names of the tests that hold nothing but a docstring, `pass` or `...`."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if f.name.startswith("test_") and all(map(does_nothing, f.body))]


def test_every_test_has_a_body():
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 150
    assert not [f"{path.relative_to(TESTS)}: {name}" for path in files for name in without_body(path.read_text())]


def test_a_test_without_a_body_is_found():
    """A merge can drop a body, and leave a docstring that passes."""
    assert without_body('def test_a():\n    """Says something."""\n') == ["test_a"]
    assert without_body("def test_a():\n    pass\n") == ["test_a"]
    assert not without_body('def test_a():\n    """Says something."""\n    check(1)\n')
