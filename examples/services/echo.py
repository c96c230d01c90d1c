#!/usr/bin/env python3
"""An echo service for a handler of kind `http`, on the address or the Unix socket that the worker names.

POST PATH answers with what was sent, POST /count with a line for each number up to the one that was sent, and GET /health
with 200 as soon as it is ready.
"""

import json
import os
import socketserver
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            said = json.loads(body)
        except ValueError:
            return self.answer(400, b'{"message": "the body is no JSON"}')
        if self.path == "/count":
            return self.count(int(said))
        answer = {"echo": said, "path": self.path, "task": self.headers["x-task-id"]}
        self.answer(200, json.dumps(answer).encode())

    def count(self, numbers):
        """Each line is a partial answer, and what follows the last line's end is the last one."""
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(1, numbers + 1):
            self.chunk(b"%d\n" % number)
            time.sleep(0.01)
        self.chunk(b'"done"')
        self.chunk(b"")

    def chunk(self, piece):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, words, *values):
        print(words % values, flush=True)


class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


if "JOURNEYMAN_SERVICE_SOCKET" in os.environ:
    server = OnSocket(os.environ["JOURNEYMAN_SERVICE_SOCKET"], Echo)
else:
    address = urlsplit(os.environ.get("JOURNEYMAN_SERVICE_URL", "http://127.0.0.1:8080"))
    server = ThreadingHTTPServer((address.hostname, address.port), Echo)
server.serve_forever()
