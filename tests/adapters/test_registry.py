"""Registry: immutable versions, none lost and none corrupted, on a disk, in memory and on S3."""

from __future__ import annotations

import json
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from poimen_exp.adapters import files
from poimen_exp.adapters import registry as registry_module
from poimen_exp.adapters.manifest import read_manifest
from poimen_exp.adapters.publish import adapter_folder, publish_adapter, resolve_adapter, verify_adapter
from poimen_exp.adapters.registry import Registry, check_name, parse_reference
from poimen_exp.errors import Refused, RunFailed


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a moto server on 127.0.0.1."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "local":
        return Registry(str(tmp_path / "registry"))
    unique = uuid.uuid4().hex
    if request.param == "memory":
        return Registry(f"memory://{unique}")
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": request.getfixturevalue("s3_server"),
    }
    fsspec.filesystem("s3", **options).mkdir(unique)
    return Registry(f"s3://{unique}/adapters", options)


def test_versions_count_up_and_latest_follows(registry: Registry, adapter: Path) -> None:
    assert registry.names() == []
    assert [registry.publish(adapter, "gates").version for _ in range(2)] == ["v1", "v2"]
    assert registry.publish(adapter, "other").version == "v1"
    assert registry.names() == ["gates", "other"]
    assert registry.versions("gates") == ["v1", "v2"]
    assert registry.latest("gates") == "v2"


def test_a_fetched_version_holds_the_same_weights_and_knows_its_name(registry: Registry, adapter: Path) -> None:
    registry.publish(adapter, "gates")
    folder = registry.fetch("gates")
    assert (folder / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.version) == ("gates", "v1")
    assert registry.show("gates").manifest == manifest
    assert registry.fetch("gates", "v1") == folder


def test_ten_versions_are_ordered_by_number(adapter: Path, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    for _ in range(10):
        registry.publish(adapter, "gates")
    assert registry.versions("gates")[-2:] == ["v9", "v10"]
    assert registry.latest("gates") == "v10"


def test_publishers_at_once_each_get_a_whole_version_of_their_own(registry: Registry, adapter: Path, tmp_path) -> None:
    folders = []
    for number in range(6):
        folder = shutil.copytree(adapter, tmp_path / f"adapter{number}")
        text = (folder / "poimen.json").read_text().replace('"run-1"', f'"run-{number}"')
        (folder / "poimen.json").write_text(text)
        folders.append(folder)
    barrier, published, errors = threading.Barrier(6), [], []

    def publish(folder: Path) -> None:
        barrier.wait()
        try:
            published.append(registry.publish(folder, "gates"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({entry.version for entry in published}) == 6
    assert set(registry.versions("gates")) == {entry.version for entry in published}
    assert {registry.show("gates", entry.version).manifest.run_id for entry in published} == {
        f"run-{number}" for number in range(6)
    }
    for entry in published:
        assert registry.show("gates", entry.version).manifest == entry.manifest
        registry.fetch("gates", entry.version)
    assert registry.latest("gates") == registry.versions("gates")[-1]


def test_a_number_is_claimed_once(registry: Registry) -> None:
    claim = registry._claim_local if registry._local else registry._claim_object
    assert claim("gates", "v1")
    assert not claim("gates", "v1")
    assert not claim("gates", "v1")  # the second has withdrawn, the first still stands
    assert len(registry._children("gates", ".claims", "v1")) == (0 if registry._local else 1)
    assert claim("gates", "v2")


def test_a_slow_publisher_of_an_older_version_does_not_move_latest_back(
    registry: Registry, adapter: Path, monkeypatch
) -> None:
    """v1 has looked and is about to point at itself; v2 comes through meanwhile."""
    write, raced = Registry._write_pointer, []

    def slow(self: Registry, name: str, version: str) -> None:
        if not raced:
            raced.append(version)
            Registry.publish(self, adapter, name)
        write(self, name, version)

    monkeypatch.setattr(Registry, "_write_pointer", slow)
    assert registry.publish(adapter, "gates").version == "v1"
    assert registry.latest("gates") == "v2"


def test_a_publisher_that_dies_leaves_no_version_and_the_next_one_goes_on(registry, adapter, monkeypatch) -> None:
    registry.publish(adapter, "gates")
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_read_back", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        patch.setattr(registry_module, "sync_folder", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(RunFailed, match=r"cannot publish gates .*gone"):
            registry.publish(adapter, "gates")
    assert registry.versions("gates") == ["v1"]
    assert registry.latest("gates") == "v1"
    with pytest.raises(Refused, match=r"gates@v2: not in registry .* versions there: v1"):
        registry.show("gates", "v2")
    assert registry.publish(adapter, "gates").version == "v3"


def test_versions_whose_publishers_died_before_the_pointer_are_found(registry, adapter, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_advance_latest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                registry.publish(adapter, "gates")
    assert registry.latest("gates") == "v2"
    assert registry.show("gates").version == "v2"


@pytest.mark.parametrize(("owner", "step"), [(files, "sync_folder"), (Path, "rename")])
def test_a_download_that_another_overtakes_uses_the_others(owner, step: str, adapter, tmp_path, monkeypatch) -> None:
    """The other process has stored its copy, and reads it, when this one is about to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry = Registry(f"memory://{uuid.uuid4().hex}")
    registry.publish(adapter, "gates")
    real, others = getattr(owner, step), []

    def overtaken(*arguments: object) -> object:
        monkeypatch.setattr(owner, step, real)
        others.append(registry.fetch("gates").stat().st_ino)
        return real(*arguments)

    monkeypatch.setattr(owner, step, overtaken)
    folder = registry.fetch("gates")
    assert [folder.stat().st_ino] == others
    assert list(folder.parent.iterdir()) == [folder]


def test_bytes_that_change_on_the_way_are_noticed_before_the_version_exists(adapter: Path, monkeypatch) -> None:
    registry = Registry(f"memory://{uuid.uuid4().hex}")
    pipe = registry._fs.pipe_file

    def corrupting(path: str, data: bytes) -> None:
        pipe(path, data[:-1] + b"x" if path.endswith("safetensors") else data)

    monkeypatch.setattr(registry._fs, "pipe_file", corrupting)
    with pytest.raises(RunFailed, match=r"adapter_model\.safetensors reads back with sha256"):
        registry.publish(adapter, "gates")
    assert registry.versions("gates") == []


def test_bytes_that_change_on_a_disk_are_noticed_before_the_version_exists(adapter, tmp_path, monkeypatch) -> None:
    def corrupting(folder: Path, _mode: int) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"x")

    monkeypatch.setattr(registry_module, "sync_folder", corrupting)
    registry = Registry(str(tmp_path / "registry"))
    with pytest.raises(Refused, match=r"adapter_model\.safetensors: sha256 is"):
        registry.publish(adapter, "gates")
    assert registry.versions("gates") == []
    assert [path.name for path in (tmp_path / "registry" / "gates").iterdir()] == [".claims"]


def test_a_published_file_is_read_only_and_its_version_folder_is_never_taken_again(adapter: Path, tmp_path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    registry.publish(adapter, "gates")
    folder = tmp_path / "registry" / "gates" / "v1"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in folder.iterdir())
    shutil.rmtree(folder)
    assert registry.publish(adapter, "gates").version == "v2"


def test_a_corrupted_version_is_refused_when_fetched(adapter: Path, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    registry.publish(adapter, "gates")
    path = tmp_path / "registry" / "gates" / "v1" / "adapter_config.json"
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"r": 8', '"r": 9'))
    with pytest.raises(Refused, match=r"adapter_config\.json: sha256 is"):
        registry.fetch("gates")
    with pytest.raises(Refused, match=r"adapter_config\.json: sha256 is"):
        verify_adapter("gates", registry)


def test_an_adapter_that_was_changed_after_export_is_not_published(registry: Registry, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match=r"adapter_config\.json: sha256 is"):
        registry.publish(adapter, "gates")
    assert registry.versions("gates") == []


@pytest.mark.parametrize(
    "name", ["", "..", "a..b", "../up", "a/b", "/root", "latest", "Gates", ".hidden", "a b", "a@v1", "x" * 65, "tail."]
)
def test_a_name_that_is_no_plain_path_part_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="adapter name"):
        check_name(name)


@pytest.mark.parametrize("version", ["1", "v0", "v01", "../v1", "newest"])
def test_a_version_that_is_none_is_refused(registry: Registry, version: str) -> None:
    with pytest.raises(Refused, match="expected latest or v1"):
        registry.show("gates", version)


def test_an_unknown_name_is_answered_with_the_known_ones(registry: Registry, adapter: Path) -> None:
    registry.publish(adapter, "gates")
    with pytest.raises(Refused, match=r"'gate': not in registry .*it holds gates"):
        registry.show("gate")


def test_a_manifest_that_names_other_files_is_refused(adapter: Path, tmp_path: Path) -> None:
    manifest = json.loads((adapter / "poimen.json").read_text())
    manifest["sha256"]["../../escape"] = "0" * 64
    (adapter / "poimen.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match="escape"):
        Registry(str(tmp_path / "registry")).publish(adapter, "gates")


def test_an_unknown_kind_of_root_is_refused() -> None:
    with pytest.raises(Refused, match="registry 'nosuch://x'"):
        Registry("nosuch://x")


def test_references_name_a_version_or_the_latest() -> None:
    assert parse_reference("gates") == ("gates", "latest")
    assert parse_reference("gates@v3") == ("gates", "v3")


def test_publishing_a_run_checks_and_probes_its_adapter(adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "run" / "0"
    run.mkdir(parents=True)
    adapter.rename(run / "adapter")
    registry = Registry(str(tmp_path / "registry"))
    published, report = publish_adapter(tmp_path / "run", "gates", registry)
    assert published.version == "v1"
    assert report.effect > 0.1
    found, again = verify_adapter("gates@v1", registry)
    assert (found.version, again) == ("v1", report)
    assert resolve_adapter("gates", registry) == (tmp_path / "registry" / "gates" / "v1", "gates")
    assert resolve_adapter(str(tmp_path / "run"), registry)[0] == run / "adapter"


def test_a_run_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no adapter there"):
        adapter_folder(tmp_path)
    (tmp_path / "0").mkdir()
    (tmp_path / "0/resolved.yaml").touch()
    with pytest.raises(Refused, match=rf"no adapter there.* The run has not finished: poimen resume {tmp_path}/0$"):
        adapter_folder(tmp_path)


def test_a_sweep_has_no_adapter_of_its_own(adapter: Path, tmp_path: Path) -> None:
    for number in (10, 2):
        (tmp_path / f"sweep/{number}").mkdir(parents=True)
    adapter.rename(tmp_path / "sweep/2/adapter")
    with pytest.raises(Refused, match=rf"a folder of several runs; give one of them, for example {tmp_path}/sweep/2$"):
        adapter_folder(tmp_path / "sweep")
