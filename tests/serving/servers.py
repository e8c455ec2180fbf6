"""A small server with the OpenAI protocol on this machine that can misbehave."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = {"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}
ERRORS = {
    "error": (500, b'{"error": "out of order"}'),
    "too long": (400, b'{"error": "maximum context length is 8 tokens"}'),
}


class Handler(BaseHTTPRequestHandler):
    """Streams one token after `server.delay` seconds, or misbehaves as `server.mode` says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics" and self.server.counters:
            self._answer(200, self._counters())
        elif self.path != "/v1/models":
            self._answer(404, b"")
        elif self.server.mode == "no models":
            self._answer(200, b"<html>hello</html>")
        else:
            self._answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def _counters(self):
        count = 10 + len(self.server.bodies)  # 10 were counted before the test
        page = "# HELP ultraep_imbalance_before load\n"
        for which, mean in (("before", 1.5), ("after", 1.0)):
            for part, value in (("sum", mean * count), ("count", count)):
                page += f'ultraep_imbalance_{which}_{part}{{policy="ultraep"}} {value}\n'
        return page.encode()

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        mode = self.server.mode
        if mode in ERRORS:
            self._answer(*ERRORS[mode])
        elif mode == "hang":
            self.server.over.wait(30.0)
        else:
            self._stream(mode)

    def _stream(self, mode):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if mode == "break":
            self.close_connection = True
            return
        event = {"object": "text_completion", "choices": []} if mode == "no token" else TOKEN
        data = b"{]" if mode == "invalid" else json.dumps(event).encode()
        time.sleep(self.server.delay)
        self._chunk(b": a comment\n\ndata: " + data + b"\n\n")
        time.sleep(self.server.delay)  # later events are not the first token
        self._chunk(b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n')
        self._chunk(b"")

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Print nothing when a client disconnects."""


@contextmanager
def serving(mode="", delay=0.01, counters=False):
    """A server on a free port; `bodies` are the request bodies it received."""
    server = Server(("127.0.0.1", 0), Handler)
    server.mode, server.delay, server.bodies, server.over = mode, delay, [], threading.Event()
    server.counters = counters
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
