"""`trajlake view` as a real process: what it refuses, what it prints, whom it answers, and that it only reads."""

import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from lake import Lake, ids
from lake.errors import UsageError
from testkit.commands import trajlake
from testkit.examples import mostly_slow
from testkit.lakes import build_lake, rollout
from testkit.viewer_process import Viewer, free_port, viewer
from testkit.wording import Wording
from viewer import launch


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return build_lake(tmp_path_factory.mktemp("launch"), [rollout("t", 0, 1.0)])


@pytest.fixture(scope="module")
def untouched(lk: Lake) -> dict[str, tuple[int, int]]:
    """The lake's files before any viewer was started on it."""
    return files(lk.uri)


@pytest.fixture(scope="module")
def running(
    lk: Lake, untouched: dict[str, tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Viewer]:
    """A viewer whose reader has a Streamlit configuration that would open it to everybody."""
    home = tmp_path_factory.mktemp("home")
    (home / ".streamlit").mkdir()
    (home / ".streamlit" / "config.toml").write_text(
        '[server]\naddress = "0.0.0.0"\nenableCORS = false\nenableXsrfProtection = false\nallowedHosts = ["*"]\n'
        'corsAllowedOrigins = ["http://localhost:9999"]\n[browser]\ngatherUsageStats = true\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        with viewer(lk.uri) as started:
            yield started


def files(folder: str) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its size and time of change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in Path(folder).rglob("*") if path.is_file()
    }


# ---------------------------------------------------------------- downloads


def test_a_list_is_downloaded_by_its_address_and_by_own_pages_alone(running: Viewer) -> None:
    with urlopen(f"{running.address}/download?format=csv&list=task%3Dt") as answer:
        assert answer.headers["content-disposition"] == 'attachment; filename="episodes.csv"'
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert len(answer.read().splitlines()) == 2
    with urlopen(f"{running.address}/download?format=csv&rows=groups&list=task%3Dt") as answer:
        assert answer.headers["content-disposition"] == 'attachment; filename="groups.csv"'
        assert len(answer.read().splitlines()) == 2
    for address, headers, status in [
        ("/download?format=exe", {}, 400),
        ("/download?format=csv&rows=nothing", {}, 400),
        ("/download?format=csv&rows=groups&signal=odd", {}, 400),
        ("/download?format=csv&rows=siblings&group=odd", {}, 400),
        ("/download?format=csv&rows=anchors", {}, 400),
        ("/download?format=csv&list=text%3D...", {}, 400),
        ("/download?format=csv", {"Host": "rebound.example"}, 403),
        ("/download?format=csv", {"Origin": "http://127.0.0.1:1"}, 403),
    ]:
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(running.address + address, headers=headers))
        with refused.value as answer:
            assert answer.code == status


def test_an_episode_and_a_group_are_downloaded_as_one_file(running: Viewer, lk: Lake) -> None:
    episode, group = map(ids.to_text, lk.sql("SELECT episode_id, group_id FROM episodes LIMIT 1").row(0))
    for parameter in (f"episode={episode}", f"group={group}"):
        with urlopen(f"{running.address}/download?format=html&{parameter}") as answer:
            assert answer.headers["content-disposition"] == 'attachment; filename="trajlake.html"'
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert f'id="episode-{episode}"'.encode() in answer.read()
    for wrong, status in (("episode=zzz", 400), ("group=0000000000000", 404), ("", 400)):
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{running.address}/download?format=html&{wrong}")
        with refused.value as answer:
            assert answer.code == status


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", ["missing", "file", "other folder"])
def test_what_is_no_lake_is_refused_in_one_line_before_anything_starts(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "here"
    if kind == "file":
        folder.write_text("not a lake")
    elif kind == "other folder":
        folder.mkdir()
        (folder / "notes.txt").write_text("not a lake")
    before = files(str(tmp_path))
    done = trajlake("view", "--lake", str(folder))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"trajlake: {folder}")
    assert "trajlake ingest" in line
    assert files(str(tmp_path)) == before


def test_a_port_in_use_is_refused_in_one_line(lk: Lake, wording: Wording) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = trajlake("view", "--lake", lk.uri, "--port", str(port))
    assert done.returncode == 2
    (line,) = wording(done.stderr, PORT=port).splitlines()
    assert f"port {port} is in use" in line
    assert "--port" in line


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_cannot_be_is_misuse(lk: Lake, port: str) -> None:
    done = trajlake("view", "--lake", lk.uri, "--port", port)
    assert done.returncode == 2
    assert "Invalid value for '--port'" in done.stderr


def test_help_explains_the_command() -> None:
    done = trajlake("view", "-h")
    assert done.returncode == 0
    assert "--no-browser" in done.stdout
    assert "--lake" in done.stdout


# ---------------------------------------------------------------- ports


def test_the_first_free_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        first = server.getsockname()[1]
        monkeypatch.setattr(launch, "FIRST_PORT", first)
        assert first < launch.find_free_port(None) < first + 50
        with pytest.raises(UsageError, match=f"port {first} is in use"):
            launch.find_free_port(first)
    assert launch.find_free_port(None) == first


def test_a_given_port_is_taken_as_it_is() -> None:
    port = free_port()
    assert launch.find_free_port(port) == port


# ---------------------------------------------------------------- running


def answer(address: str, host: str, origin: str | None = None, *, websocket: bool = True) -> int:
    """The status that a browser gets which takes the viewer for `host` and shows a page of `origin`."""
    parts_of_url = urlsplit(address)
    headers = {"Host": host} | ({"Origin": origin} if origin is not None else {})
    if websocket:
        headers |= {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version": "13",
        }
    path = "/_stcore/stream" if websocket else "/"
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    with socket.create_connection((parts_of_url.hostname, parts_of_url.port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.recv(200).split()[1])


def test_it_answers_this_machine_alone_and_only_reads(
    lk: Lake, untouched: dict[str, tuple[int, int]], running: Viewer
) -> None:
    assert urlsplit(running.address).hostname == "127.0.0.1"
    assert running.said == [f"{lk.uri} is shown at {running.address} (Ctrl-C ends it)\n"]
    with urlopen(f"{running.address}/_stcore/health", timeout=30) as health:
        assert health.read() == b"ok"
    assert files(lk.uri) == untouched


def test_only_its_own_pages_are_answered(running: Viewer) -> None:
    """A page that another port of this machine serves is not one of them, nor is a name that leads here."""
    port = urlsplit(running.address).port
    assert port is not None
    numeric, named = f"127.0.0.1:{port}", f"localhost:{port}"
    for host, origin in [
        (numeric, f"http://{numeric}"),
        (named, f"http://{named}"),
        (named, f"http://{numeric}"),
        ("localhost:7000", "http://localhost:7000"),  # forwarded with ssh -L 7000:127.0.0.1:PORT
        (numeric, None),  # no browser
    ]:
        assert answer(running.address, host, origin) == 101, (host, origin)
        assert answer(running.address, host, origin, websocket=False) == 200, (host, origin)
    for host, origin in [
        (numeric, "http://localhost:9999"),
        (named, f"http://localhost:{port + 1}"),
        (numeric, "http://127.0.0.1"),
        (numeric, f"https://{numeric}"),
        (numeric, f"http://{numeric}.example"),
        (numeric, f"http://{numeric}@evil.example"),
        (numeric, f"http://evil.example:{port}"),
        (numeric, "null"),
        (numeric, ""),
        (numeric, "http://127.0.0.1:port"),
        (f"rebound.example:{port}", f"http://rebound.example:{port}"),
        (f"rebound.example:{port}", None),
    ]:
        assert answer(running.address, host, origin) == 403, (host, origin)
        assert answer(running.address, host, origin, websocket=False) == 403, (host, origin)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/nonsense", "no page /nonsense"),
        ("/a/b/c", "no page /a/b/c"),
        ("/a/%3Cb%3E", "no page /a/&lt;b&gt;"),
        ("/episode/19js9amn7yhnq", 'href="/episode?episode=19js9amn7yhnq"'),
        ("/job/%22x/y", 'href="/job?job=%22x/y"'),
    ],
)
def test_a_path_that_no_page_has_is_said_with_links_to_the_lists(running: Viewer, path: str, shown: str) -> None:
    """Streamlit would answer with its page, which looks for its modules below the path and stays white."""
    with pytest.raises(HTTPError, match="404") as refused:
        urlopen(running.address + path, timeout=30)
    said = refused.value.read().decode()
    assert shown in said
    assert all(f'href="/{name}"' in said for name in ("", "episodes", "groups", "jobs"))
    assert "<script" not in said
    assert refused.value.headers["X-Frame-Options"] == "SAMEORIGIN"


def test_no_other_page_frames_it(running: Viewer) -> None:
    """Clicks inside a frame would write: the frame's own origin is the viewer's."""
    for path in ("/", "/episode?episode=x", "/_stcore/health", "/download?format=csv"):
        with urlopen(running.address + path, timeout=30) as sent:
            assert "frame-ancestors 'self'" in sent.headers.get_all("content-security-policy")
            assert sent.headers["x-frame-options"] == "SAMEORIGIN"


@pytest.mark.browser
def test_a_browser_shows_it_in_no_frame_of_another_page(running: Viewer, page: Any, tmp_path: Path) -> None:
    """Not in that of another server of this machine; a page of the viewer's own may hold it."""
    html = f'<iframe src="{running.address}/"></iframe>'
    (tmp_path / "hostile.html").write_text(html)
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/hostile.html")
        page.wait_for_timeout(500)
        assert [frame.url for frame in page.frames[1:]] == ["chrome-error://chromewebdata/"]
        server.shutdown()
    page.goto(f"{running.address}/_stcore/health")
    page.set_content(html)
    page.wait_for_timeout(500)
    assert [frame.url for frame in page.frames[1:]] == [f"{running.address}/"]


@pytest.mark.parametrize("ending", mostly_slow([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_a_signal_ends_it_without_a_traceback(lk: Lake, ending: signal.Signals) -> None:
    with viewer(lk.uri) as running:
        running.process.send_signal(ending)
        running.process.wait(30)
    assert "Traceback" not in "".join(running.said)
    assert running.process.returncode in (0, -ending, 128 + ending)


def test_a_setting_of_the_reader_does_not_open_the_viewer_to_the_network(running: Viewer) -> None:
    """Streamlit reads a configuration file from the home folder; what the viewer promises stands above it."""
    port = urlsplit(running.address).port
    assert port is not None
    listening = Path("/proc/net/tcp")
    if not listening.exists():
        pytest.skip("needs /proc/net/tcp to see who listens")
    mine = [line.split()[1] for line in listening.read_text().splitlines()[1:] if line.split()[3] == "0A"]
    assert [local_address for local_address in mine if local_address.endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]


def test_a_page_is_written_without_a_word_of_streamlit(lk: Lake, tmp_path: Path) -> None:
    (episode,) = lk.sql("SELECT id_text(episode_id) FROM episodes").row(0)
    done = trajlake("page", episode, "--lake", lk.uri, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "page.html").stat().st_size > 1000
