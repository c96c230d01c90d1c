#!/usr/bin/env python3
"""Replies to a request with its body: a handler for requests."""

import json
import os
import sys

request = json.load(sys.stdin)["payload"]
with os.fdopen(3, "w") as answers:
    answers.write(json.dumps({"type": "answer", "json": {"echo": request.get("json")}}) + "\n")
