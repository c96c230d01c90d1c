#!/usr/bin/env python3
"""A service for tests, which does what it is told by files in its folder and by paths. It tells of what it does by lines in
`said`, a named pipe where the test listens, and waits on named pipes."""

import http.server
import os
import signal
import socket
import socketserver
import sys
import threading
import time


# Held by whoever says that all is well.
well = threading.Lock()


def fifo(path):
    """Waits until the test has opened its side."""
    with open(path) as pipe:
        return pipe.readline()


def tell(name):
    with open(name, "w") as pipe:
        pipe.write(f"{os.getpid()}\n")


class Odd(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with well:
            self.reply(503 if os.path.exists("ill") else 200, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/wait":
            tell("waiting")
            fifo("go")
            body = b"waited"
        elif self.path == "/hang":
            tell("waiting")
            self.connection.recv(1)
            tell("dropped")
            return
        elif self.path == "/stop" and not os.path.exists("stopped"):
            # Connections are taken still, and nobody is there who would answer.
            open("stopped", "w").close()
            # Not in the moment between the two either.
            well.acquire()
            self.connection.shutdown(socket.SHUT_RDWR)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.path == "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.reply(200, body)

    def reply(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, words, *values):
        print(words % values, flush=True)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def ended(_signal, _frame):
    if os.path.exists("ended"):
        tell("ended")
    os._exit(0)


signal.signal(signal.SIGTERM, ended)
with open("lives", "a") as lives:
    lives.write(f"{os.getpid()}\n")
if os.path.exists("crash"):
    print("the map cannot be loaded", flush=True)
    sys.exit(3)
if os.path.exists("never"):
    time.sleep(1000)
Server(os.environ["JOURNEYMAN_SERVICE_SOCKET"], Odd).serve_forever()
