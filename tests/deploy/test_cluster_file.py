from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.cluster_file import ClusterFile, read_cluster_file
from deploy.cluster_spec import ClusterSpec
from deploy.commands.config import as_yaml, config
from deploy.commands.options import spec_settings
from deploy.errors import ClusterError


def read(directory: Path, text: str) -> ClusterFile:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return read_cluster_file(path)


def spec_of(file: ClusterFile) -> ClusterSpec:
    options = file.options()
    del options["model"]
    return ClusterSpec("", "", **spec_settings(**options))


def test_an_empty_file_is_the_default_cluster(tmp_path: Path) -> None:
    assert spec_of(read(tmp_path, "")) == ClusterSpec("", "")


def test_all_of_it_reaches_the_spec(tmp_path: Path) -> None:
    text = """
    name: fleet
    log_format: json
    model: {path: /models/m, dtype: float32, device: cuda}
    workers: {prefill: 2, decode: 3, mixed: 1, cores: 4, kv_memory_mb: 256}
    router: {port: 5000, metrics_port: 5001, max_waiting: 7, recovery_patience_s: 1.5}
    slo: {ttft_s: 0.5, tpot_s: 0.05}
    ray: {address: "head:6379", host: node, role_label: baton-role}
    """
    file = read(tmp_path, text)
    assert (file.model.path, file.ray.address) == ("/models/m", "head:6379")
    assert spec_of(file) == ClusterSpec(
        "",
        "",
        name="fleet",
        log_format="json",
        num_prefill=2,
        num_decode=3,
        num_mixed=1,
        dtype="float32",
        device="cuda",
        host="node",
        role_label="baton-role",
        router_port=5000,
        cores_per_worker=4,
        kv_memory_bytes=256 << 20,
        pin_cores=False,
        max_waiting=7,
        recovery_patience_s=1.5,
        metrics_port=5001,
        slo_ttft_s=0.5,
        slo_tpot_s=0.05,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker: {}", "worker is not known; there are name, log_format, model, workers, router, slo, ray"),
        ("workers: {prefil: 2}", "workers.prefil is not known; there are prefill, decode, mixed, cores, kv_memory_mb"),
        ("workers: {prefill: -1}", "workers.prefill is -1"),
        ("workers: {prefill: two}", "workers.prefill is 'two'"),
        ("workers: {prefill: yes}", "workers.prefill is True"),
        ("model: {dtype: float16}", "model.dtype is 'float16': Input should be 'bfloat16' or 'float32'"),
        ("router: {port: 65536}", "router.port is 65536"),
        ("[1, 2]", "not list"),
        ("workers: {", "is not YAML"),
        ("workers: {prefil: 2}\nrouter: {prt: 1}", "router.prt"),
    ],
)
def test_what_is_wrong_is_named_by_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="nowhere"):
        read_cluster_file(tmp_path / "nowhere.yaml")


def test_the_example_is_the_default_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CliRunner().invoke(config, ["example"]).output)
    assert read_cluster_file(path) == ClusterFile()
    checked = CliRunner().invoke(config, ["check", str(path)])
    assert (checked.exit_code, checked.output) == (0, as_yaml(ClusterFile()))


def test_a_cluster_that_cannot_exist_does_not_check(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("workers: {decode: 0}")
    checked = CliRunner().invoke(config, ["check", str(path)])
    assert checked.exit_code == 2
    assert "no worker can decode" in checked.output
