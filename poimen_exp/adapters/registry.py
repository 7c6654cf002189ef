"""A registry of adapters: ``<root>/<name>/<version>/``, immutable versions, a ``latest`` pointer.

``<root>`` is a local path or any fsspec URL. Versions are ``v1``, ``v2``, ...: one more than the highest number that
is published or being published. Two publishers of one name get two numbers; a publisher that dies leaves a gap.

- A local version folder is written aside, read back, and renamed: it is there whole or not at all.
- Object stores cannot rename. There ``poimen.json``, which holds the hash of every other file, is written last, after
  the others were read back; a version without it does not exist for any reader.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poimen_exp.adapters.check import check_hashes
from poimen_exp.adapters.files import READ_ONLY, folder_written_aside, sync_folder
from poimen_exp.adapters.hashing import sha256_of_bytes
from poimen_exp.adapters.manifest import MANIFEST_NAME, Manifest, parse_manifest, read_manifest
from poimen_exp.errors import Refused, RunFailed

LATEST = "latest"
_CLAIMS = ".claims"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_VERSION = re.compile(r"v([1-9][0-9]{0,8})")
_CLAIM_ATTEMPTS = 60


@dataclass(frozen=True)
class Published:
    """One version in a registry."""

    name: str
    version: str
    url: str
    manifest: Manifest

    def __str__(self) -> str:
        return f"{self.name}@{self.version} at {self.url}"


class Registry:
    """Adapters under one root.

    Args:
        root: local path or fsspec URL (``s3://bucket/adapters``, ``memory://adapters``).
        storage_options: for the fsspec file system.
    """

    def __init__(self, root: str, storage_options: dict[str, Any] | None = None) -> None:
        from fsspec.core import url_to_fs

        self.root = root.rstrip("/")
        try:
            self._fs, self._path = url_to_fs(self.root, **(storage_options or {}))
        except (ValueError, ImportError) as error:
            raise Refused(
                f"registry {root!r}: {error}; expected a path or a URL of an installed file system"
            ) from error
        self._path = self._path.rstrip("/")
        self._local = "file" in _protocols(self._fs)

    def publish(self, folder: Path, name: str) -> Published:
        """Copies an adapter folder into the next version of ``name`` and moves ``latest`` to it.

        The mount check is the caller's (``publish.publish_adapter``).

        Raises:
            Refused: the name is none, or the folder's files are not those of its ``poimen.json``.
            RunFailed: what was stored does not read back as written.
        """
        check_name(name)
        check_hashes(folder)
        manifest = dataclasses.replace(read_manifest(folder), name=name)
        files = {file: (folder / file).read_bytes() for file in manifest.sha256}
        try:
            version = self._claim(name)
            manifest = dataclasses.replace(manifest, version=version)
            store = self._store_local if self._local else self._store_objects
            store(name, version, files, manifest)
            self._advance_latest(name)
        except OSError as error:
            raise RunFailed(f"registry {self.root}: cannot publish {name} ({type(error).__name__}: {error})") from error
        return Published(name, version, self._url(name, version), manifest)

    def is_missing_folder(self) -> bool:
        """Whether the root is a local path without a folder."""
        return self._local and not self._fs.isdir(self._path)

    def names(self) -> list[str]:
        """Names with at least one complete version."""
        return [name for name in self._children("") if _NAME.fullmatch(name) and self.versions(name)]

    def versions(self, name: str) -> list[str]:
        """Complete versions of ``name``, oldest first."""
        check_name(name)
        found = [entry for entry in self._children(name) if _VERSION.fullmatch(entry)]
        return sorted((v for v in found if self._fs.exists(self._at(name, v, MANIFEST_NAME))), key=version_number)

    def latest(self, name: str) -> str:
        """The version that the pointer names; without a pointer (a publisher died before it wrote one) the newest."""
        check_name(name)
        try:
            text = str(self._fs.cat_file(self._at(name, LATEST)), "utf-8").strip()
        except FileNotFoundError:
            if stored := self.versions(name):
                return stored[-1]
            raise Refused(
                f"adapter {name!r}: not in registry {self.root}; it holds {', '.join(self.names()) or 'nothing'}"
            ) from None
        if not _VERSION.fullmatch(text):
            raise Refused(f"registry {self.root}: {name}/{LATEST} holds {text!r}, expected a version such as v3")
        return text

    def show(self, name: str, version: str = LATEST) -> Published:
        """One version's manifest. ``version`` may be ``latest``."""
        version = self._resolve(name, version)
        path = self._at(name, version, MANIFEST_NAME)
        try:
            text = self._fs.cat_file(path)
        except FileNotFoundError:
            have = ", ".join(self.versions(name)) or "none"
            raise Refused(f"adapter {name}@{version}: not in registry {self.root}; versions there: {have}") from None
        return Published(name, version, self._url(name, version), parse_manifest(text, path))

    def fetch(self, name: str, version: str = LATEST) -> Path:
        """A local folder with the version, its hashes checked: the registry's own where that is local, else a copy
        in the user's cache, made once."""
        found = self.show(name, version)
        folder = Path(self._at(name, found.version)) if self._local else self._download(found)
        check_hashes(folder)
        return folder

    # Claims

    def _claim(self, name: str) -> str:
        """A version number that no other publisher has or will get."""
        for _ in range(_CLAIM_ATTEMPTS):
            taken = [e for e in (*self._children(name), *self._children(name, _CLAIMS)) if _VERSION.fullmatch(e)]
            version = f"v{max((version_number(entry) for entry in taken), default=0) + 1}"
            if self._claim_local(name, version) if self._local else self._claim_object(name, version):
                return version
            time.sleep(random.uniform(0.01, 0.2))
        raise RunFailed(f"registry {self.root}: no version of {name} to be had in {_CLAIM_ATTEMPTS} attempts")

    def _claim_local(self, name: str, version: str) -> bool:
        path = Path(self._at(name, _CLAIMS, version))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()  # exclusive on every local file system
        except FileExistsError:
            return False
        return True

    def _claim_object(self, name: str, version: str) -> bool:
        """Writes a claim of its own and keeps it only if it then stands alone.

        Needs no conditional writes, only listings that show every finished write: whoever sees itself alone was
        there before any other wrote, so all others see that claim and withdraw theirs. Two that see each other both
        withdraw and try again.
        """
        token = uuid.uuid4().hex
        mine = self._at(name, _CLAIMS, version, token)
        self._fs.pipe_file(mine, token.encode())
        if self._children(name, _CLAIMS, version) == [token]:
            return True
        self._fs.rm_file(mine)
        return False

    # Storing

    def _store_local(self, name: str, version: str, files: dict[str, bytes], manifest: Manifest) -> None:
        aside = Path(self._at(name, f".{version}.{uuid.uuid4().hex}.partial"))
        aside.mkdir(parents=True)
        try:
            for file, data in files.items():
                (aside / file).write_bytes(data)
            (aside / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
            sync_folder(aside, READ_ONLY)
            check_hashes(aside)
            aside.rename(self._at(name, version))
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _store_objects(self, name: str, version: str, files: dict[str, bytes], manifest: Manifest) -> None:
        for file, data in files.items():
            self._fs.pipe_file(self._at(name, version, file), data)
        for file, expected in manifest.sha256.items():
            self._read_back(self._at(name, version, file), expected)
        text = manifest.to_json().encode()
        self._fs.pipe_file(self._at(name, version, MANIFEST_NAME), text)
        self._read_back(self._at(name, version, MANIFEST_NAME), sha256_of_bytes(text))

    def _read_back(self, path: str, expected: str) -> None:
        got = sha256_of_bytes(self._fs.cat_file(path))
        if got != expected:
            raise RunFailed(f"registry: {path} reads back with sha256 {got}, {expected} was written; try again")

    def _advance_latest(self, name: str) -> None:
        """Points ``latest`` at the highest complete version.

        Looks again after writing: of two publishers the last to write has seen every version that was complete when
        it wrote, so the pointer never stays on the lower one.
        """
        written = ""
        while (newest := self.versions(name)[-1]) != written:
            self._write_pointer(name, newest)
            written = newest

    def _write_pointer(self, name: str, version: str) -> None:
        path = self._at(name, LATEST)
        if not self._local:
            self._fs.pipe_file(path, version.encode())  # one object: readers see the old or the new one
            return
        aside = Path(self._at(name, f".{LATEST}.{uuid.uuid4().hex}"))
        aside.write_text(version, encoding="ascii")
        aside.replace(path)

    # Reading

    def _download(self, found: Published) -> Path:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        key = sha256_of_bytes(f"{found.url}\n{found.manifest.to_json()}".encode())[:32]
        folder = Path(root) / "poimen_exp" / "adapters" / key / found.name
        if (folder / MANIFEST_NAME).is_file():
            return folder
        with folder_written_aside(folder, replace=False) as aside:  # another process may have it in use by then
            for file in (*found.manifest.sha256, MANIFEST_NAME):
                (aside / file).write_bytes(self._fs.cat_file(self._at(found.name, found.version, file)))
        return folder

    def _resolve(self, name: str, version: str) -> str:
        check_name(name)
        if version == LATEST:
            return self.latest(name)
        if not _VERSION.fullmatch(version):
            raise Refused(f"adapter {name}: version {version!r}, expected {LATEST} or v1, v2, ...")
        return version

    def _children(self, *parts: str) -> list[str]:
        """Names directly under a folder, past any listing cache; none where there is no folder."""
        path = self._at(*parts)
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries if str(entry).rstrip("/") != path}
        return sorted(names)

    def _at(self, *parts: str) -> str:
        return "/".join([self._path, *(part for part in parts if part)])

    def _url(self, name: str, version: str) -> str:
        return f"{self.root}/{name}/{version}"


def check_name(name: str) -> None:
    """Refuses names that are no single, plain path part."""
    if not _NAME.fullmatch(name) or ".." in name or name == LATEST:
        raise Refused(
            f"adapter name {name!r}: expected 1 to 64 of a-z, 0-9, '.', '_', '-', beginning and ending with a letter "
            f"or digit, without '..', and not {LATEST!r}"
        )


def version_number(version: str) -> int:
    """3 for ``v3``."""
    match = _VERSION.fullmatch(version)
    assert match is not None
    return int(match[1])


def parse_reference(text: str) -> tuple[str, str]:
    """``name`` or ``name@version`` -> name and version (``latest`` if left out)."""
    name, _, version = text.partition("@")
    check_name(name)
    return name, version or LATEST


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
