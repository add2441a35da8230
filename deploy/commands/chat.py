"""`baton chat`."""

import readline

import click

from baton.answer import GenerateOptions
from baton.client import Client
from baton.errors import BatonError
from deploy.commands.failures import told_in_one_line
from deploy.commands.options import (
    address_option,
    max_tokens_option,
    name_option,
    router_address,
    seed_option,
)

_HELP = """/reset  begin a new conversation
/quit   leave; so does Ctrl-D
/help   this list
Ctrl-C  stop an answer, or clear what you are typing"""


@click.command()
@click.option("--system", metavar="TEXT", help="Tell the model how to behave.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.7,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@max_tokens_option
@seed_option
@address_option
@name_option
@told_in_one_line
def chat(
    *,
    system: str | None,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    address: str | None,
    name: str,
) -> None:
    """Talk to the model.

    The model sees the whole conversation until /reset. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    with Client(router_address(name, address)) as client:
        click.echo(f"{client.model_info().model}. /help shows the commands.")
        conversation = Conversation(client, system, temperature, max_tokens, seed)
        readline.set_auto_history(True)
        while (line := _read_line()) is not None and conversation.take(line):
            pass


class Conversation:
    """Lines typed in, answers streamed out, and what the model is told of both."""

    def __init__(
        self, client: Client, system: str | None, temperature: float, max_tokens: int, seed: int | None
    ) -> None:
        self._client = client
        self._options: GenerateOptions = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def take(self, line: str) -> bool:
        """Obeys a command or answers; False means that the user wants to leave."""
        match line.strip():
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._messages = list(self._opening)
                click.echo("A new conversation.")
            case command if command.startswith("/"):
                click.echo(_HELP)
            case text:
                self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        stream = self._client.generate([*self._messages, question], **self._options)
        try:
            for chunk in stream:
                click.echo(chunk.text, nl=False)
            click.echo()
        except KeyboardInterrupt:
            click.secho(" (stopped)", dim=True)
        except BatonError as error:  # the question is not kept, so that it can be asked again
            click.secho(f"Error: {error}", fg="red", err=True)
            return
        finally:
            stream.cancel()
        if stream.text:
            self._messages += [question, {"role": "assistant", "content": stream.text}]


def _read_line() -> str | None:
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            click.echo()
        except EOFError:
            click.echo()
            return None
