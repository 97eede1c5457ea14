"""What the commands share: options that are also environment variables, and errors as one line and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import click

from shmserve.config import MODES
from shmserve.progress import harmless
from shmserve_client.connection import Connection
from shmserve_client.errors import ProtocolError, ShmserveError, printable
from shmserve_client.protocol import Message

__all__ = [
    "Answer",
    "Command",
    "FailedError",
    "Group",
    "ask",
    "columns_option",
    "dataset_options",
    "decode_option",
    "echo_json",
    "endpoint_option",
    "json_option",
    "keys_option",
    "option",
]

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Answer = TypeVar("Answer")


def option(flag: str, *others: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    """Return click's option for `--flag`, which `$SHMSERVE_FLAG` sets as well."""
    name = flag.partition("/")[0].removeprefix("--")
    variable = "SHMSERVE_" + name.upper().replace("-", "_")
    return click.option(flag, *others, envvar=variable, show_envvar=True, **settings)


endpoint_option = option("--endpoint", metavar="ENDPOINT", help="Which daemon.  [default: the first that is found]")
keys_option = option(
    "--keys", metavar="DIR", help="For an endpoint of TCP: the keys of this client, as `shmserve keys` makes them."
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise click.BadParameter(f"{value!r} has an empty name")
    return names


columns_option = option(
    "--columns", callback=_names, metavar="A,B", help="Which columns of a table, in this order.  [default: all]"
)


decode_option = option(
    "--decode",
    type=click.IntRange(1),
    metavar="PIXELS",
    help="Decode images to uint8 of that width and height.  [default: they stay the bytes of their files]",
)


def dataset_options(command: Decorated) -> Decorated:
    """Give the command the options of the datasets that it names."""
    for add in (
        option("--warm", is_flag=True, help="With --mode map: read the files once, so that they are in memory."),
        option(
            "--mode",
            type=click.Choice(MODES),
            default="load",
            show_default=True,
            help="Whether to load into shared memory, or have clients map the values in their files.",
        ),
        option(
            "--stride", type=int, metavar="S", help="The clients' default step from window to window.  [default: B]"
        ),
        option("--block-size", type=int, metavar="B", help="The clients' default window, in tokens."),
        option("--vocab-size", type=int, metavar="N", help="Refuse token ids outside [0, N)."),
        decode_option,
        columns_option,
        option("--dtype", metavar="DTYPE", help="What a file without a header holds, such as uint16."),
    ):
        command = add(command)
    return command


class FailedError(click.ClickException):
    """Ends the command with `error: message` on stderr and the given exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: Any = None) -> None:
        """Write the line."""
        stream = file or sys.stderr
        with harmless(stream):  # or the exit code would be another
            click.echo(f"error: {printable(self.message)}", file=stream)


def _misused(ctx: click.Context, error: click.UsageError) -> FailedError:
    message = error.format_message().rstrip(".")
    return FailedError(f"{message}: see `{ctx.command_path} --help`", error.exit_code)


class _OneLine(click.Command):
    """What is wrong with the arguments is one line on stderr."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a UsageError becomes a FailedError."""
        asks_for_help = not args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if asks_for_help and self.no_args_is_help:
                raise
            raise _misused(ctx, error) from error


class Group(_OneLine, click.Group):
    """The commands."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return which command the arguments mean; a UsageError becomes a FailedError."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise _misused(ctx, error) from error


class Command(_OneLine):
    """A command whose errors are one line on stderr, without a traceback."""

    failure_exit_code: ClassVar[int] = 1

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises becomes a FailedError."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has what it wanted: click ends quietly
            raise
        except (ShmserveError, OSError) as error:
            raise FailedError(str(error), self.failure_exit_code) from error


def ask(connection: Connection, request: Message, kind: type[Answer]) -> Answer:
    """Return the daemon's reply to `request`, which has to be of this kind."""
    reply = connection.request(request)
    if not isinstance(reply, kind):
        raise ProtocolError(f"the daemon answered {type(request).__name__} with {type(reply).__name__}")
    return reply


def echo_json(record: Any) -> None:
    """Print a record, or what JSON has anyway, on stdout."""
    click.echo(json.dumps(record, indent=2, default=asdict))
