#!/usr/bin/env python3
"""An echo service for a handler of kind `http`, listening on the address or Unix socket that the worker passes.

POST PATH responds with the request, POST /count with a line for each number up to the body's, and GET /health with 200 once the
service is ready.
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
        self.respond(200 if self.path == "/health" else 404, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            document = json.loads(body)
        except ValueError:
            return self.respond(400, b'{"message": "the body is not JSON"}')
        if self.path == "/count":
            return self.count(int(document))
        reply = {"echo": document, "path": self.path, "task": self.headers["x-task-id"]}
        self.respond(200, json.dumps(reply).encode())

    def count(self, numbers):
        """Each line is a partial reply; what follows the last line is the last reply."""
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

    def respond(self, code, body):
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
