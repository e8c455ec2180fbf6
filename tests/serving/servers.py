"""A small server of the OpenAI protocol on this machine, that can misbehave."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = {"object": "text_completion", "choices": [{"index": 0, "text": "x"}]}


class Handler(BaseHTTPRequestHandler):
    """Streams one token after `server.delay` seconds, or does what `server.how` says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics" and self.server.counters:
            return self._answer(200, self._counters())
        if self.path != "/v1/models":
            return self._answer(404, b"")
        if self.server.how == "no models":
            return self._answer(200, b"<html>hello</html>")
        return self._answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def _counters(self):
        count = 10 + len(self.server.asked)  # there was something before
        page = "# HELP ultraep_imbalance_before load\n"
        for which, mean in (("before", 1.5), ("after", 1.0)):
            for part, value in (("sum", mean * count), ("count", count)):
                page += f'ultraep_imbalance_{which}_{part}{{policy="ultraep"}} {value}\n'
        return page.encode()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        how = self.server.how
        if callable(how):
            how = how(len(self.server.asked))
        if how == "error":
            return self._answer(500, b'{"error": "out of order"}')
        if how == "too long":
            return self._answer(400, b'{"error": "maximum context length is 8 tokens"}')
        if how == "hang":
            self.server.over.wait(30.0)
            return None
        return self._stream(how)

    def _stream(self, how):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if how == "break off":
            self.close_connection = True
            return
        time.sleep(self.server.delay)
        self._chunk(b"data: {]\n\n" if how == "nonsense" else self._event(how))
        time.sleep(self.server.delay)  # what comes later is not the first token
        self._chunk(b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n')
        self._chunk(b"")

    def _event(self, how):
        event = {"object": "text_completion", "choices": []} if how == "no token" else TOKEN
        return b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n"

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
        """A client that went away is nothing to print."""


@contextmanager
def serving(how="well", delay=0.01, counters=False):
    """A server on a free port; `asked` are the bodies that it got."""
    server = Server(("127.0.0.1", 0), Handler)
    server.how, server.delay, server.asked, server.over = how, delay, [], threading.Event()
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
