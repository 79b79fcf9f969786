"""Parts of torch's releases that are read from an index: the right releases, in few requests, and nothing more."""

from __future__ import annotations

import http.server
import io
import json
import re
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch_releases
from torch_releases import HttpFile


class Server(http.server.ThreadingHTTPServer):
    """Serves one file, in ranges if it may, and notes the requests."""

    def __init__(self, content: bytes, *, ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges, self.requests = content, ranges, list[str | None]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        content = self.server.content
        if asked is None or not self.server.ranges:
            self.send_response(200)
        else:
            begin, end = map(int, re.findall(r"\d+", asked))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(content)}")
            content = content[begin : end + 1]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(urllib.request.ProxyHandler({})))
    servers = []

    def start(content: bytes, *, ranges: bool = True) -> Server:
        servers.append(Server(content, ranges=ranges))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_member_of_a_large_archive_is_read_alone(serve: Any) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for number in range(500):
            archive.writestr(f"include/{number}.h", f"// header {number}")
        archive.writestr("large", bytes(3_000_000))
    server = serve(written.getvalue())
    with zipfile.ZipFile(io.BufferedReader(HttpFile(server.url), 1 << 16)) as archive:
        assert [archive.read(f"include/{number}.h") for number in (0, 7, 499)] == [
            b"// header 0",
            b"// header 7",
            b"// header 499",
        ]
    assert len(server.requests) < 10
    read = sum(end + 1 - begin for begin, end in (map(int, re.findall(r"\d+", each)) for each in server.requests))
    assert read < 400_000


def test_a_server_without_ranges_is_refused(serve: Any) -> None:
    with pytest.raises(OSError, match="does not send parts of files"):
        HttpFile(serve(b"all of it", ranges=False).url)


def test_the_newest_patch_release_of_each_supported_minor_version(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def file(name: str, **more: Any) -> dict[str, Any]:
        return {"filename": name, "url": f"https://files/{name}", **more}

    names = [
        file("torch-2.5.1-cp311-cp311-manylinux1_x86_64.whl"),
        file("torch-2.10.0-3-cp311-cp311-manylinux_2_28_x86_64.whl"),
        file("torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"),
        file("torch-2.7.1-cp311-cp311-manylinux_2_28_x86_64.whl"),
        file("torch-2.7.0-cp311-cp311-manylinux_2_28_x86_64.whl"),
        file("torch-2.7.2-cp311-cp311-manylinux_2_28_x86_64.whl", yanked="broken"),
        file("torch-2.8.0-cp311-cp311-manylinux_2_28_aarch64.whl"),
        file("torch-2.8.0-cp311-none-macosx_11_0_arm64.whl"),
        file("torch-2.10.0-cp312-cp312-manylinux_2_28_x86_64.whl"),
        file("torch-2.10.0-cp313-cp313t-manylinux_2_28_x86_64.whl"),
    ]
    monkeypatch.setattr(torch_releases, "INDEX", serve(json.dumps({"files": names}).encode()).url)
    found = {each.version: sorted(each.urls) for each in torch_releases.releases("x86_64")}
    assert found == {"2.6.0": ["cp311"], "2.7.1": ["cp311"], "2.10.0": ["cp311", "cp312"]}
    assert [each.version for each in torch_releases.releases("aarch64")] == ["2.8.0"]
