import pytest

from bench.bar import BarsFailed
from bench.engine_bars import EngineSamples, engine_bars, measure_engine


def test_the_ratios_by_hand():
    samples = EngineSamples(
        one_stream=[30.0, 32.0, 34.0],
        many_streams=[240.0, 288.0, 300.0],
        generate=[20.0, 16.0, 1.0],
        prefill=[300.0, 400.0, 500.0],
        forward_with_cache=[200.0, 100.0, 900.0],
        forward_without_cache=[490.0, 500.0, 510.0],
    )
    batching, decode, prefill = engine_bars(samples)
    assert (batching.measured, batching.is_met) == (9.0, True)
    assert (decode.measured, decode.is_met) == (2.0, True)
    # Against the faster way of transformers, by its median and not its best.
    assert (prefill.measured, prefill.is_met) == (0.8, False)


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path):
    with pytest.raises(BarsFailed, match=r"exit code 2.*repeats.*0"):
        measure_engine(tmp_path, "bfloat16", core=0, repeats=0, on_progress=lambda _: None)
