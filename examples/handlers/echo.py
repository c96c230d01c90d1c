#!/usr/bin/env python3
"""Answers a request with what it says: a handler for `journeyman worker` on a request queue."""

import json
import os
import sys

request = json.load(sys.stdin)["payload"]
with os.fdopen(3, "w") as answers:
    answers.write(json.dumps({"type": "answer", "json": {"echo": request.get("json")}}) + "\n")
