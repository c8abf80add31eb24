"""What the fuzz tests of all formats share: strange values, and converting while every write is watched."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

names = st.sampled_from(
    [
        "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight",
        "model.layers.00.self_attn.k_proj.weight", "model.layers.9.self_attn.q_proj.bias", "__metadata__", "", "../x",
        "/etc/passwd", "a\0b", "é" * 300, "\ud800",
    ]
) | st.text(max_size=6)  # fmt: skip
numbers = st.integers(-2, 70) | st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
values = st.recursive(
    numbers | names | st.sampled_from(["F32", "BF16", "I8", "F4", "Q9"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=6,
)


def file_names(suffix: str, *real: str) -> st.SearchStrategy[Any]:
    """Return names of files that an index may give: the real ones, paths that lead elsewhere, and none at all."""
    strange = [
        f"../{real[0]}", f"/tmp/x{suffix}", "..", ".", "", "config.json", f"x{suffix}", *real, f"sub/../x{suffix}",
        f"..\\x{suffix}", suffix, f"a\0{suffix}", "é" * 300 + suffix, f"\ud800{suffix}",
    ]  # fmt: skip
    return st.sampled_from(strange) | values


def fuzz(check: Callable[..., None], examples: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the test of `check(…, data)` on a few examples, and the slow one on thirty times as many."""

    def test(n: int) -> Callable[..., None]:
        checked: Callable[..., None] = given(data=st.data())(check)
        return settings(max_examples=n, suppress_health_check=list(HealthCheck))(checked)

    return test(examples), pytest.mark.slow(pytest.mark.timeout(3600)(test(30 * examples)))


def convert_and_compare(convert: Any, place: Path) -> int:
    """Convert; only OUT and its staging area may be written, a refusal is one line, and what was made is right."""
    before = tiny.snapshot(place)
    with Writes() as writes:
        result = convert("mha-to-gqa", "--method", "mean", place / "source", place / "out", "--groups", 2)
    allowed = (str(place / "out"), str(place / ".out.groupwise"))
    strange = [path for path in writes.paths if path != os.devnull and not path.startswith(allowed)]
    assert not strange, strange
    if result.code:
        result.refused()
        assert {p.name for p in place.iterdir()} == {"source"}
    else:
        convert("verify", place / "source", place / "out").succeeded()
        shutil.rmtree(place / "out")
    assert tiny.snapshot(place) == before
    return int(result.code)


def change_index(data: Any, index: Any, files: st.SearchStrategy[Any]) -> Any:
    """Return an index of shards changed at random."""
    for _ in range(data.draw(st.integers(1, 3))):
        table = index.get("weight_map") if isinstance(index, dict) else None
        action = data.draw(st.sampled_from(["point", "add", "remove", "table", "all"]))
        if action == "all":
            index = data.draw(values)
        elif action == "table" and isinstance(index, dict):
            index["weight_map"] = data.draw(values)
        elif isinstance(table, dict) and table:
            name = data.draw(st.sampled_from(sorted(table)))
            if action == "remove":
                del table[name]
            else:
                table[name if action == "point" else data.draw(names)] = data.draw(files)
    return index


def fresh_copy(whole: Path, place: Path) -> Path:
    shutil.rmtree(place / "source", ignore_errors=True)
    shutil.copytree(whole, place / "source")
    return place / "source"


class Writes:
    """Notes every path that this process creates, changes or removes, as Python's audit events tell."""

    _now: "Writes | None" = None
    _is_hooked = False
    # Where each event tells its paths, and the folders that they are relative to.
    _CHANGES: ClassVar[dict[str, tuple[tuple[int, int], ...]]] = {
        "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),),
        "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.truncate": ((0, -1),), "os.chmod": ((0, 2),),
    }  # fmt: skip

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __enter__(self) -> "Writes":
        if not Writes._is_hooked:  # a hook stays until the process ends
            sys.addaudithook(Writes._note)
            Writes._is_hooked = True
        Writes._now = self
        return self

    def __exit__(self, *exc: object) -> None:
        Writes._now = None

    @staticmethod
    def _note(event: str, arguments: tuple[Any, ...]) -> None:
        if Writes._now is None:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                Writes._now.paths.append(_absolute(path, -1))
        for path_at, folder_at in Writes._CHANGES.get(event, ()):
            if not isinstance(arguments[path_at], int):
                path = _absolute(arguments[path_at], arguments[folder_at] if folder_at >= 0 else -1)
                if event != "os.mkdir" or not Path(path).is_dir():
                    Writes._now.paths.append(path)


def _absolute(path: Any, folder: int) -> str:
    """Return a path as it stands, links not followed; `folder` is the open folder it is relative to, or -1."""
    base = Path(f"/proc/self/fd/{folder}").readlink() if folder >= 0 else ""
    return os.path.abspath(os.path.join(base, os.fsdecode(path)))  # noqa: PTH100, PTH118
