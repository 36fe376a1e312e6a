"""The server of `make trace-viewer`: to whom it answers, and a trace that Perfetto takes as a whole."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import socket
import threading
from collections import defaultdict
from contextlib import contextmanager

import pytest
from fixtures_traces import kineto

from common.show import trace_viewer
from common.traces import viewing

THREAD = 7


def opening(name, begin, duration):
    """Return a label and the Python call that opens it, as the profiler records them with stacks."""
    where = {"pid": 3, "tid": THREAD, "ts": begin, "dur": duration, "args": {"External id": 1}}
    label = {"ph": "X", "cat": "user_annotation", "name": name, **where}
    call = {**label, "cat": "python_function", "name": "record_function_enter", "ts": begin - 5, "dur": 10}
    return [call, label]


EVENTS = [*opening("ProfilerStep#1", 1000, 900), *opening("loss", 1100, 300), *opening('say "tid": 9', 1500, 200)]


def dropped(text):
    """Return the names of spans that Perfetto drops: they begin within another of their track, and end after it."""
    tracks, names = defaultdict(list), []
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        above = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            above = [other for other in above if other > event["ts"]]
            if above and end > above[-1]:
                names.append(event["name"])
            else:
                above.append(end)
    return names


@contextmanager
def serving(folder, trace, content):
    trace.write_bytes(content)
    (folder / "index.html").write_text("the UI")
    with trace_viewer.Server(folder, trace, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.port
        finally:
            server.shutdown()
            thread.join()


def ask(port, path, host=""):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_no_label_is_dropped():
    text = kineto(EVENTS)
    assert dropped(text) == ["ProfilerStep#1", "loss", 'say "tid": 9']
    shown = b"".join(viewing.lines(io.BytesIO(text.encode())))
    assert dropped(shown) == []
    events = json.loads(shown)["traceEvents"]
    assert [event for event in events if event.get("cat") == "python_function"] == EVENTS[::2]
    labels = [event for event in events if event.get("cat") == "user_annotation"]
    assert [(event["name"], event["ts"], event["dur"]) for event in labels] == [
        (event["name"], event["ts"], event["dur"]) for event in EVENTS[1::2]
    ]
    (name,) = [event for event in events if event["ph"] == "M"]
    assert name["args"]["name"] == viewing.TRACK and {event["tid"] for event in labels} == {name["tid"]}


@pytest.mark.parametrize("text", ["", "{", json.dumps({"traceEvents": EVENTS}), "x" * 3 * 2**20])
def test_what_kineto_did_not_write_is_handed_on(text):
    assert b"".join(viewing.lines(io.BytesIO(text.encode()))).decode() == text


@pytest.mark.parametrize("packed", [False, True])
def test_the_ui_gets_the_trace(packed, tmp_path):
    content = kineto(EVENTS).encode()
    with serving(tmp_path, tmp_path / "w.json", gzip.compress(content) if packed else content) as port:
        status, body, _ = ask(port, "/localtrace")
        assert status == 200 and not dropped(gzip.decompress(body) if packed else body)
        status, _, headers = ask(port, "/")
        assert status == 302 and "ExpandTracks" in headers["Location"]
        assert ask(port, "/index.html")[1] == b"the UI"
        assert ask(port, "/..%2f..%2fetc/passwd")[0] == 404


def test_a_name_of_another_site_is_refused(tmp_path):
    with serving(tmp_path, tmp_path / "w.json", b"{}") as port:
        for path in ("/", "/localtrace", "/index.html", "/file_info"):
            assert ask(port, path, f"evil.example:{port}")[0] == 403
        assert ask(port, "/localtrace", "127.0.0.1")[0] == 403
        for name in ("127.0.0.1", "localhost", "[::1]"):
            assert ask(port, "/localtrace", f"{name}:{port}")[:2] == (200, b"{}")


def test_a_connection_that_asks_nothing_blocks_nobody(tmp_path):
    with serving(tmp_path, tmp_path / "w.json", b"{}") as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert ask(port, "/localtrace")[1] == b"{}"
        for connection in idle:
            connection.close()


def test_a_trace_that_is_cut_short_is_one_line(tmp_path, capsys):
    packed = gzip.compress(kineto(EVENTS).encode())
    with serving(tmp_path, tmp_path / "w.json", packed[: len(packed) // 2]) as port:
        ask(port, "/localtrace")
    printed = capsys.readouterr()
    assert "w.json" in printed.out and printed.out.count("\n") == 1 and "Traceback" not in printed.err
