"""What this machine remembers of a running cluster: one small JSON file by cluster name."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from deploy.errors import ClusterError


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """One cluster. `router_address` is host:port, empty until it is ready.

    An embedded Ray has a `directory` for all its files and a `session_id`, the process session that all its
    processes belong to (0: not started yet); a joined one has neither.
    """

    name: str
    ray_address: str = ""
    router_address: str = ""
    directory: str = ""
    session_id: int = 0

    @property
    def is_embedded(self) -> bool:
        """Whether Ray belongs to the cluster and ends with it."""
        return bool(self.directory)


class RecordStore:
    """The records of one user on this machine."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(platformdirs.user_state_dir("baton"))

    def create(self, record: ClusterRecord) -> None:
        """Adds a record. Raises ClusterError if there is one of that name: two starts cannot both win."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with self._path(record.name).open("x") as file:
                json.dump(dataclasses.asdict(record), file)
        except FileExistsError:
            raise ClusterError(
                f"cluster {record.name!r} is running already, or was not shut down: "
                f"run `baton down --name {record.name}` first, or choose another --name"
            ) from None

    def save(self, record: ClusterRecord) -> None:
        """Replaces the record of that name, whole or not at all."""
        path = self._path(record.name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(record)))
        temporary.replace(path)

    def load(self, name: str) -> ClusterRecord:
        """The record of that name. Raises ClusterError if there is none, or it cannot be read."""
        path = self._path(name)
        try:
            return ClusterRecord(**json.loads(path.read_text()))
        except FileNotFoundError:
            others = ", ".join(self.names())
            hint = f"; running: {others}, choose one with --name" if others else ""
            raise ClusterError(f"no cluster {name!r} is running here: run `baton up`{hint}") from None
        except (ValueError, TypeError) as error:
            raise ClusterError(f"{path} is not a cluster record ({error}): delete it") from error

    def remove(self, name: str) -> None:
        """Forgets a cluster; nothing happens if it is not known."""
        self._path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names of all clusters known here."""
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"
