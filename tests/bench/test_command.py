"""The command as users run it: its own process, against a server of ours."""

import asyncio
import json
import sys

import pytest


async def _baton(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from bench.cli import main; main()",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode(), errors.decode()


def _bench(inference, *arguments):
    return _baton("bench", "--address", inference.address, *arguments)


async def test_a_closed_loop_end_to_end(inference, tmp_path):
    file = tmp_path / "bench.json"
    options = ["--num-requests", "5", "--prompt-tokens", "8", "--output-tokens", "3", "--json", str(file)]
    code, output, errors = await _bench(inference, *options)
    assert (code, errors) == (0, "")
    assert "5 of 5 requests" in output
    assert "TTFT" in output
    written = json.loads(file.read_text())
    assert (written["model"], written["num_completed"], len(written["requests"])) == ("tiny", 5, 5)
    assert written["settings"]["concurrency"] == 4
    assert len(inference.requests) == 7  # two to warm up
    prompts = [tuple(request.token_ids.ids) for request in inference.requests]
    assert len({prompt[0] for prompt in prompts}) == 7
    assert {len(prompt) for prompt in prompts} == {8}
    assert not any(7 in prompt for prompt in prompts)  # the end token


async def test_an_open_loop_with_a_shared_prefix_writes_json_alone(inference):
    options = ["--rate", "200", "--num-requests", "4", "--warmup", "0", "--prompt-tokens", "8", "--output-tokens", "3"]
    code, output, errors = await _bench(inference, *options, "--shared-prefix-tokens", "6", "--json", "-")
    assert code == 0
    assert json.loads(output)["settings"]["rate"] == 200
    assert "4 of 4 requests" in errors
    assert len({tuple(request.token_ids.ids[:6]) for request in inference.requests}) == 1
    assert len({request.token_ids.ids[6] for request in inference.requests}) == 4


async def test_two_runs_send_the_same_prompts_and_share_no_cache(inference):
    options = ["--num-requests", "2", "--warmup", "0", "--prompt-tokens", "8", "--output-tokens", "1"]
    await _bench(inference, *options)
    await _bench(inference, *options)
    prompts = sorted(tuple(request.token_ids.ids) for request in inference.requests)
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert len({request.cache_salt for request in inference.requests}) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "1", "--concurrency", "1"], "give one of them"),
        (["--prompt-tokens", "8", "--shared-prefix-tokens", "8"], "must be below"),
        (["--prompt-tokens", "60", "--output-tokens", "5"], "context window of tiny is 64"),
    ],
)
async def test_wrong_usage_is_told_and_nothing_is_sent(inference, options, told):
    code, _, errors = await _bench(inference, *options)
    assert code == 2
    assert told in errors
    assert inference.requests == []


async def test_no_cluster_is_told_in_one_line():
    code, _, errors = await _baton("bench", "--address", "127.0.0.1:1")
    assert code == 1
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1


async def test_the_exit_code_tells_that_nothing_was_answered(inference):
    inference.hold = asyncio.Event().wait
    options = ["--num-requests", "2", "--warmup", "0", "--prompt-tokens", "8", "--output-tokens", "1"]
    code, output, _ = await _bench(inference, *options, "--timeout", "0.2")
    assert code == 1
    assert "2 with DEADLINE_EXCEEDED" in output


async def test_help_lists_bench_beside_the_commands_of_deploy():
    code, output, _ = await _baton("--help")
    assert code == 0
    assert {"up", "down", "bench"} <= {line.split()[0] for line in output.splitlines() if line.strip()}
