"""A spec says what can exist, and turns into one spec for each worker."""

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
