"""The README's examples run, its commands exist, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shmserve.cli import cli
from shmserve.demo.corpus import write_corpus
from tests.processes import Child, Daemon

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(
    code: str, serve: Callable[..., Daemon], tmp_path: Path, stop_embedded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what they write stays there
    tokens_file = write_corpus(tmp_path / "corpus", 1 << 20).tokens_file
    serve("--data", tokens_file)

    with Child.python(code.replace('"corpus.bin"', repr(str(tokens_file))), folder=tmp_path) as example:
        assert example.wait(60) == 0, example.describe()
        assert example.stderr == ""


def commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line for line in lines if line.startswith("shmserve ")] + re.findall(r"`(shmserve [^`]*)`", README)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_exist(command: str) -> None:
    _, name, *args = shlex.split(command)
    options = {option for parameter in cli.commands[name].params for option in parameter.opts}

    assert {arg.partition("=")[0] for arg in args if arg.startswith("--")} <= options


def test_the_configuration_file_is_read(tmp_path: Path) -> None:
    (config,) = blocks("toml")

    assert set(tomllib.loads(config)["datasets"]) == {"train", "valid"}


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)

    assert targets
    assert [target for target in targets if "://" not in target and not (REPOSITORY / target).exists()] == []
