"""Communication libraries among mapped files: small libraries that have the names and versions of real ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from commtrace.process_setup.mapped_libraries import MappedLibraries

SOURCES = {
    "libnccl.so.2": 'const char version[] = "NCCL version 2.27.3+cuda12.9";',
    "librccl.so.1.0": 'const char version[] = "RCCL version 2.22.3-HEAD:abc";',
    "libucp.so.0.0.0": 'const char *ucp_get_version_string(void) { return "1.18.1"; }',
    "libfabric.so.1.20.0": 'const char address[] = "127.0.0.1"; const char version[] = "1.17.0";',
    "libmpi.so.40.30.5": 'const char version[] = "Open MPI vulcan collective MCA component version 5.0.11";',
    "libnccl-net-ofi.so": 'const char version[] = "2.0.0";',
    "libcudart.so.12": 'const char version[] = "NCCL version 2.1.1";',
}


def build(folder: Path, name: str, source: str, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    code, path = folder / "code.c", folder / name
    code.write_text(source)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", *options, "-o", str(path), str(code)], check=True)
    return path


def maps(folder: Path, *paths: str | Path) -> MappedLibraries:
    """Return a reader of a file that has the form of /proc/self/maps."""
    lines = [f"7f00-7f01 {mode} 00000000 fe:00 1234       {path}\n" for path in paths for mode in ("r--p", "r-xp")]
    (folder / "maps").write_text("".join(["7ffc-7ffd rw-p 00000000 00:00 0      [stack]\n", *lines]))
    return MappedLibraries(str(folder / "maps"))


def test_versions_are_those_of_the_mapped_files(tmp_path: Path) -> None:
    reader = maps(tmp_path, *(build(tmp_path, name, source) for name, source in SOURCES.items()))
    rows = [(row["name"], Path(row["file"]).name, row.get("version")) for row in reader.read()]
    assert rows == [
        ("NCCL", "libnccl.so.2", "2.27.3+cuda12.9"),
        ("Open MPI", "libmpi.so.40.30.5", "5.0.11"),
        ("RCCL", "librccl.so.1.0", "2.22.3-HEAD"),
        ("UCX", "libucp.so.0.0.0", "1.18.1"),
        ("libfabric", "libfabric.so.1.20.0", "1.17.0"),
        ("plugin libnccl-net-ofi", "libnccl-net-ofi.so", None),
    ]


@pytest.mark.parametrize("option", ["-Wl,--build-id=sha1", "-Wl,--build-id=none"])
def test_equal_files_have_equal_builds_and_others_do_not(tmp_path: Path, option: str) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    a = build(folders[0], "libnccl.so.2", SOURCES["libnccl.so.2"], option)
    b = Path(shutil.copy(a, folders[1]))
    c = build(folders[2], "libnccl.so.2", SOURCES["libnccl.so.2"].replace("2.27.3", "2.27.5"), option)
    rows = maps(tmp_path, a, b, c).read()
    assert [row["build"] == rows[0]["build"] for row in rows] == [True, True, False]
    assert [row["version"] for row in rows] == ["2.27.3+cuda12.9", "2.27.3+cuda12.9", "2.27.5+cuda12.9"]


def test_a_library_stays_in_the_rows_and_is_read_once(tmp_path: Path) -> None:
    path = build(tmp_path, "libnccl.so.2", SOURCES["libnccl.so.2"])
    reader = maps(tmp_path, path)
    rows = reader.read()
    path.unlink()
    maps(tmp_path)
    assert reader.read() == rows
    assert rows[0]["version"] == "2.27.3+cuda12.9"


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 58, b"text"])
def test_a_file_that_is_no_library_has_no_version(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(content)
    assert maps(tmp_path, path).read() == [{"name": "NCCL", "file": str(path)}]


def test_every_cut_of_a_library_is_read_without_an_error(tmp_path: Path) -> None:
    whole = build(tmp_path, "libucp.so.0", SOURCES["libucp.so.0.0.0"]).read_bytes()
    paths = []
    for number, length in enumerate(range(0, len(whole), 997)):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(folder / "libucp.so.0")
        paths[-1].write_bytes(whole[:length])
    versions = [row.get("version") for row in maps(tmp_path, *paths).read()]
    assert len(versions) == len(paths)
    assert {*versions} <= {None, "1.18.1"}


def test_deleted_and_missing_files(tmp_path: Path) -> None:
    rows = maps(tmp_path, "/gone/libnccl.so.2 (deleted)", "/none/librccl.so.1").read()
    assert rows == [
        {"name": "NCCL", "file": "/gone/libnccl.so.2 (deleted)"},
        {"name": "RCCL", "file": "/none/librccl.so.1"},
    ]
    assert MappedLibraries(str(tmp_path / "no maps")).read() == []
