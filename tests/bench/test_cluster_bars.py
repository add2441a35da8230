import pytest

from bench.cluster_bars import ClusterSamples, cluster_bars


def test_the_ratios_by_hand():
    samples = ClusterSamples(
        ttft_disaggregated_s=[1.1, 1.2, 9.0],
        ttft_mixed_s=[0.9, 1.0, 1.1],
        transfer_s=[2.0, 1.0, 3.0],
        transfer_tail_s=[0.1, 0.2, 0.3],
    )
    ttft, transfer = cluster_bars(samples)
    assert ttft.measured == pytest.approx(1.2)
    assert not ttft.is_met
    assert transfer.measured == pytest.approx(0.1)
    assert transfer.is_met
