"""The calls in a module's source, by full names."""

import ast
from collections.abc import Iterator


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for: `np` for numpy, `system` for os.system."""
    meanings = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.ImportFrom):
                meanings[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.asname:
                meanings[alias.asname] = alias.name
    return meanings


def named_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call with the full name of what it calls, however that was imported."""
    meanings = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield node, meanings.get(first, first) + dot + rest
