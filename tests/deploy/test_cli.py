"""The command line: help, errors that say what to do, answers streamed from a real gRPC server."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from baton.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from deploy.cli import COMMANDS, make_cli
from deploy.lazy_group import LazyCommand


class EchoService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each prompt with `You said` and the prompt, in two messages, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []

    def Generate(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - gRPC's name
        self.requests.append(request)
        prompt = request.chat.messages[-1].content if request.HasField("chat") else request.text
        if prompt == "fail":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no decode worker")
        yield inference_pb2.GenerateResponse(text="You said ", token_ids=[1])
        finish = inference_pb2.Finish(
            reason=request_pb2.FINISH_REASON_STOP, timeline=request_pb2.Timeline(kv_bytes=777, path=1)
        )
        yield inference_pb2.GenerateResponse(text=prompt, token_ids=[2], finish=finish)

    def GetModelInfo(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        return inference_pb2.GetModelInfoResponse(model="echo-model")


@pytest.fixture
def service() -> EchoService:
    return EchoService()


@pytest.fixture
def address(service: EchoService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """Files by the right names: enough for what fails before they are read."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).touch()
    return directory


def baton(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(make_cli(), arguments, input=typed)


def test_help_teaches_all_commands() -> None:
    result = baton("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.output for name in COMMANDS)
    assert "baton demo" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = baton(command, "--help")
    assert result.exit_code == 0
    assert "Options:" in result.output


def test_commands_can_be_added() -> None:
    cli = make_cli({"more": LazyCommand("deploy.commands.down:down", "One more.")})
    assert "One more." in CliRunner().invoke(cli, ["--help"]).output
    assert "--grace" in CliRunner().invoke(cli, ["more", "--help"]).output


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from deploy.cli import make_cli\n"
        "make_cli()(['--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'ray', 'grpc', 'rich'} & sys.modules.keys()))\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert finished.stdout.splitlines()[-1] == "[]", finished.stderr


@pytest.mark.parametrize("command", [["status"], ["down"], ["chat"], ["generate", "hi"]])
def test_without_a_cluster_the_next_step_is_told(command: list[str]) -> None:
    result = baton(*command)
    assert result.exit_code == 1
    assert "no cluster 'baton' is running here: run `baton up`" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up", "--prefill", "0"], "no worker can prefill"),
        (["up", "--prefill", "-1"], "-1"),
        (["up", "--dtype", "float8"], "float8"),
        (["up", "--name", "No Name"], "'No Name'"),
        (["generate"], "PROMPT"),
        (["gennerate"], "gennerate"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], told: str) -> None:
    result = baton(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_missing_model_is_told_before_anything_starts() -> None:
    result = baton("up", "--model", "/nowhere/model")
    assert result.exit_code == 1
    assert "no model at /nowhere/model" in result.stderr


@pytest.mark.parametrize(("ray_address", "told"), [("127.0.0.1:1", "no Ray answers"), ("auto", "use host:port")])
def test_ray_that_cannot_be_joined_is_told_and_nothing_is_remembered(
    tmp_path: Path, model_directory: Path, ray_address: str, told: str
) -> None:
    result = baton("up", "--model", str(model_directory), "--ray-address", ray_address)
    assert result.exit_code == 1
    assert told in result.stderr
    assert list((tmp_path / "baton").glob("*.json")) == []


def test_generate_asks_a_question_and_prints_only_the_answer(service: EchoService, address: str) -> None:
    result = baton("generate", "hello", "--address", address, "--max-tokens", "7", "--seed", "0")
    assert result.stdout == "You said hello\n"
    (request,) = service.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hello")]
    assert request.stopping.max_tokens == 7
    assert request.sampling.temperature == 0
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")


def test_generate_raw_from_standard_input_with_timeline(service: EchoService, address: str) -> None:
    result = baton("generate", "-", "--raw", "--timeline", "--address", address, typed="Once")
    assert result.stdout == "You said Once\n"
    assert "777 bytes" in result.stderr
    assert service.requests[0].text == "Once"


def test_failed_answer_is_one_line(address: str) -> None:
    result = baton("generate", "fail", "--address", address)
    assert result.exit_code == 1
    assert result.stderr.strip() == "Error: no decode worker"


def test_chat_remembers_until_reset(service: EchoService, address: str) -> None:
    typed = "one\ntwo\n/reset\nthree\n/quit\nfour\n"
    result = baton("chat", "--address", address, "--system", "Be kind.", typed=typed)
    assert result.exit_code == 0
    assert "You said two\n" in result.stdout
    sent = [[m.content for m in request.chat.messages] for request in service.requests]
    assert sent == [
        ["Be kind.", "one"],
        ["Be kind.", "one", "You said one", "two"],
        ["Be kind.", "three"],
    ]


def test_chat_goes_on_after_an_error_and_ends_at_the_end_of_input(service: EchoService, address: str) -> None:
    result = baton("chat", "--address", address, typed="fail\nhello\n/help\n")
    assert result.exit_code == 0
    assert "no decode worker" in result.stderr
    assert "You said hello" in result.stdout
    assert "/reset" in result.stdout
    assert [m.content for m in service.requests[1].chat.messages] == ["hello"]
