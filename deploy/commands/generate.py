"""`baton generate`."""

import sys

import click
from rich.console import Console

from baton.answer import MAX_PRIORITY, MIN_PRIORITY
from baton.client import Client
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import (
    address_option,
    max_tokens_option,
    name_option,
    router_address,
    seed_option,
)
from deploy.timeline_view import print_timeline


@click.command()
@click.argument("prompt")
@max_tokens_option
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@seed_option
@click.option("--stop", multiple=True, help="End the answer before this text. May be given several times.")
@click.option("--chat/--raw", default=True, help="Ask a question, or continue the text. [default: chat]")
@click.option(
    "--priority",
    type=click.IntRange(MIN_PRIORITY, MAX_PRIORITY),
    default=0,
    show_default=True,
    help="The lower, the earlier its turn when the cluster is busy.",
)
@click.option("--timeline", is_flag=True, help="Show on standard error where the time went.")
@address_option
@name_option
@told_in_one_line
def generate(  # noqa: PLR0913 - one for each option
    *,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    stop: tuple[str, ...],
    chat: bool,
    priority: int,
    timeline: bool,
    address: str | None,
    name: str,
) -> None:
    """Stream one answer to standard output. PROMPT - reads it from standard input.

    \b
    Examples:
      baton generate "What is the capital of France?"
      baton generate "Once upon a time" --raw --temperature 0.8 --seed 7
      baton generate "1, 2, 3," --raw --stop 7
      git diff | baton generate - --max-tokens 100 --timeline
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "user", "content": text}]
    with Client(router_address(name, address)) as client:
        stream = client.generate(
            messages if chat else text,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=stop,
            priority=priority,
        )
        with stream:
            for chunk in stream:
                click.echo(chunk.text, nl=False)
        click.echo()
    if timeline and stream.timeline is not None:
        print_timeline(stream.timeline, Console(stderr=True))
