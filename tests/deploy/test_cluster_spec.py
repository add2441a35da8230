"""A spec says what can exist, and turns into one spec for each worker."""

from dataclasses import replace

import pytest

from deploy.cluster_spec import ClusterSpec, ClusterSpecError


def spec(**settings: object) -> ClusterSpec:
    return ClusterSpec(model_dir="/models/m", model_name="m", **settings)  # type: ignore[arg-type]


def test_default_is_one_prefill_and_one_decode_worker() -> None:
    prefill, decode = spec().worker_specs(range(4))
    assert (prefill.name, prefill.role, prefill.cores) == ("prefill-0", "prefill", (0,))
    assert (decode.name, decode.role, decode.cores) == ("decode-0", "decode", (2,))
    assert prefill.model_dir == "/models/m"
    assert prefill.model_name == "m"


def test_workers_of_all_roles_are_numbered() -> None:
    workers = spec(num_prefill=1, num_decode=2, num_mixed=1, dtype="float32").worker_specs(range(8))
    assert [worker.name for worker in workers] == ["prefill-0", "decode-0", "decode-1", "mixed-0"]
    assert {worker.dtype for worker in workers} == {"float32"}


def test_unpinned_workers_have_no_cores() -> None:
    assert {worker.cores for worker in spec(pin_cores=False).worker_specs(range(8))} == {()}


def test_mixed_workers_alone_are_enough() -> None:
    assert spec(num_prefill=0, num_decode=0, num_mixed=1).num_workers == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_prefill": 0}, "no worker can prefill"),
        ({"num_decode": 0}, "no worker can decode"),
        ({"num_decode": -1}, "-1"),
        ({"num_prefill": 65}, "64 in all"),
        ({"dtype": "float16"}, "'float16': use bfloat16 or float32"),
        ({"device": "tpu"}, "'tpu': use cpu or cuda"),
        ({"host": "node"}, "--ray-address"),
        ({"role_label": "baton-role"}, "--ray-address"),
        ({"router_port": 65536}, "65536"),
        ({"cores_per_worker": 0}, "0 cores per worker"),
        ({"kv_memory_bytes": -5}, "-5 bytes"),
        ({"name": "../up"}, "'../up'"),
        ({"name": ""}, "cluster name ''"),
    ],
)
def test_impossible_cluster_is_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ClusterSpecError) as refusal:
        spec(**settings)
    assert told in str(refusal.value)


@pytest.mark.parametrize("settings", [{}, {"num_decode": 3}, {"kv_memory_bytes": 1 << 28}, {"allow_faults": True}])
def test_what_may_change_while_it_serves(settings: dict[str, object]) -> None:
    assert spec(**settings).change_problem(spec()) == ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "float32"}, "dtype cannot change from 'bfloat16' to 'float32'"),
        ({"router_port": 5000}, "port cannot change from 0 to 5000"),
        ({"max_waiting": 5}, "max_waiting"),
        ({"name": "other"}, "name"),
    ],
)
def test_what_needs_another_cluster_is_named(settings: dict[str, object], told: str) -> None:
    assert told in spec(**settings).change_problem(spec())


def test_a_worker_must_be_replaced_to_become_another_but_not_for_its_cores() -> None:
    (worker, *_) = spec().worker_specs([0, 1])
    assert replace(worker, cores=(7,)).digest == worker.digest
    for settings in ({"kv_memory_bytes": 5}, {"allow_faults": True}, {"block_size": 32}):
        assert replace(worker, **settings).digest != worker.digest
