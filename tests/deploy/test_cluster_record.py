"""What is remembered of a cluster is remembered whole, and once by name."""

from pathlib import Path

import pytest

from deploy.cluster_record import ClusterRecord, RecordStore
from deploy.errors import ClusterError

RECORD = ClusterRecord("a", "127.0.0.2:6379", "127.0.0.1:80", "/tmp/baton-x", 42)


def test_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "new")
    store.create(ClusterRecord("a"))
    store.save(RECORD)
    assert RecordStore(tmp_path / "new").load("a") == RECORD
    assert store.names() == ["a"]


def test_second_start_under_one_name_is_refused(tmp_path: Path) -> None:
    RecordStore(tmp_path).create(ClusterRecord("a"))
    with pytest.raises(ClusterError, match="baton down --name a"):
        RecordStore(tmp_path).create(ClusterRecord("a"))


def test_unknown_cluster_tells_of_the_known(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    with pytest.raises(ClusterError, match=r"run `baton up`$"):
        store.load("b")
    store.create(RECORD)
    with pytest.raises(ClusterError, match="running: a"):
        store.load("b")


def test_removed_record_is_gone(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.create(RECORD)
    store.remove("a")
    store.remove("a")
    assert store.names() == []


@pytest.mark.parametrize("content", ["", "[]", '{"name": "a", "colour": "red"}'])
def test_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ClusterError, match=r"a\.json is not a cluster record"):
        RecordStore(tmp_path).load("a")
