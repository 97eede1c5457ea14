"""`shmserve plot`: pictures of what a monitor wrote, and one line for what nobody wrote."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shmserve.plot import plot_memory
from shmserve_client.errors import ConfigError, SourceFormatError
from shmserve_client.monitor import COLUMNS, MemoryMonitor
from tests.processes import run_cli

PNG = b"\x89PNG\r\n\x1a\n"
GIB = 1 << 30
FULL = [
    [0, 10.0, 5 * GIB, 20 * GIB, 3 * GIB, GIB, GIB, GIB // 8, 4, 0.0],
    [1, 10.0, 5 * GIB, 20 * GIB, 3 * GIB, GIB, "", "", "", 1.0],
    [2, 11.0, 4 * GIB, 19 * GIB, 4 * GIB, GIB, 2 * GIB, GIB // 8, 4, 2.0],
]
SHORT = [row[:5] for row in FULL]


def write(path: Path, names: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    lines = [",".join(map(str, cells)) for cells in (names, *rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def height_of(png: Path) -> int:
    content = png.read_bytes()
    assert content.startswith(PNG)
    return int(struct.unpack_from(">I", content, 20)[0])


@pytest.fixture(scope="module", autouse=True)
def _fonts_are_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Matplotlib keeps the fonts that it has used open for good, which is no leak of ours."""
    folder = tmp_path_factory.mktemp("fonts")
    plot_memory(write(folder / "m.csv", COLUMNS, FULL), folder / "m.png")


def test_the_picture_lies_beside_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", COLUMNS, FULL)
    done = run_cli("plot", path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.endswith(f"wrote {tmp_path}/m.png\n")
    assert (tmp_path / "m.png").read_bytes().startswith(PNG)


def test_without_processes_there_is_one_panel(tmp_path: Path) -> None:
    plot_memory(write(tmp_path / "full.csv", COLUMNS, FULL), tmp_path / "full.png")
    plot_memory(write(tmp_path / "short.csv", COLUMNS[:5], SHORT), tmp_path / "short.png")
    assert height_of(tmp_path / "full.png") == 2 * height_of(tmp_path / "short.png")


def test_both_panels_say_what_they_show(tmp_path: Path) -> None:
    plot_memory(write(tmp_path / "m.csv", COLUMNS, FULL), tmp_path / "m.svg")
    text = set(re.findall(r"<!-- (.*?) -->", (tmp_path / "m.svg").read_text()))
    assert {
        *("node, GiB", "available", "used", "shared", "processes, GiB", "private memory", "page tables", "seconds"),
    } <= text


def test_what_a_monitor_writes_can_be_drawn(tmp_path: Path) -> None:
    with MemoryMonitor(tmp_path / "m.csv", interval=None) as monitor:
        monitor()
    plot_memory(tmp_path / "m.csv", tmp_path / "m.png")
    assert height_of(tmp_path / "m.png") > 0


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)

    class Without:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"pip install 'shmserve\[plot\]'"):
        plot_memory(write(tmp_path / "m.csv", COLUMNS, FULL), tmp_path / "m.png")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: not the columns index,mem_percent,"),
        ("a,b\n1,2\n", "line 1: not the columns index,mem_percent,"),
        (",".join(COLUMNS) + "\n", "line 2: no rows"),
        (",".join(COLUMNS) + "\n0,1,2,3,4,5,6,7,8,9\n1,2\n", "line 3: not 10 cells with numbers in seconds, "),
        (",".join(COLUMNS) + "\n0,1,2,three,4,5,6,7,8,9\n", "line 2: not 10 cells"),
        (",".join(COLUMNS) + "\n\0\n", "line 2: not 10 cells"),
        (",".join(COLUMNS) + "\n\n" + "9" * 200_000 + "\n", "line 3: field larger than"),
        (",".join(COLUMNS[:7]) + "\n0,1,2,3,4,5,6\n", "line 1: a column twice, or one of uss and page_tables alone"),
        (",".join([*COLUMNS, "uss"]) + "\n0,1,2,3,4,5,6,7,8,9,10\n", "line 1: a column twice"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "m.csv").write_text(content)
    with pytest.raises(SourceFormatError, match=rf"m\.csv, {message}"):
        plot_memory(tmp_path / "m.csv", tmp_path / "m.png")
    assert not (tmp_path / "m.png").exists()


def test_the_command_fails_in_one_line(tmp_path: Path) -> None:
    missing = run_cli("plot", tmp_path / "nope.csv")
    assert missing.returncode == 1
    assert re.fullmatch(r"error: .*nope\.csv.*\n", missing.stderr)
    csv = write(tmp_path / "m.csv", COLUMNS, FULL)
    before = csv.read_bytes()
    other = run_cli("plot", csv, env={"SHMSERVE_OUTPUT": str(csv)})  # as `shmserve monitor` reads it
    assert other.returncode == 1
    assert re.fullmatch(r"error: cannot draw .*m\.csv: .* an ending out of \.png, \.svg, \.pdf\n", other.stderr)
    assert csv.read_bytes() == before


@pytest.mark.parametrize("name", ["m.pgf", "m.nope", "m"])
def test_a_picture_has_one_of_three_endings(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"an ending out of \.png, \.svg, \.pdf"):
        plot_memory(write(tmp_path / "m.csv", COLUMNS, FULL), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_file_to_draw_is_not_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / "m", COLUMNS, FULL)
    (tmp_path / "m.png").symlink_to(path)
    before = path.read_bytes()
    done = run_cli("plot", path)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: cannot draw {path}.png: it is the file to draw: give another --output\n",
    )
    assert path.read_bytes() == before
    (tmp_path / "m.png").unlink()
    assert run_cli("plot", path).returncode == 0
    assert height_of(tmp_path / "m.png") > 0


def test_what_is_not_drawn_may_be_anything(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", [*COLUMNS, "note"], [[*row, "text"] for row in FULL])
    content = path.read_bytes()
    plot_memory(path, tmp_path / "plain.png")
    path.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\r\n") + b"3,11.0,4")  # killed while writing
    plot_memory(path, tmp_path / "odd.png")
    assert (tmp_path / "odd.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_one_row_can_be_seen(tmp_path: Path) -> None:
    colors = {"#2ca02c", "#d62728", "#1f77b4", "#ff7f0e", "#9467bd"}  # of the five figures
    plot_memory(write(tmp_path / "m.csv", COLUMNS, FULL[:1]), tmp_path / "m.svg")
    markers = re.findall(r"<use [^>]*stroke: (#\w+)", (tmp_path / "m.svg").read_text())
    assert colors <= set(markers)
