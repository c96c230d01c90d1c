#!/usr/bin/env python3
# Standard input is the task as JSON; standard output is its log; exit status 0 is success.
# Lines of JSON on descriptor 3 are results and artifacts: `journeyman guide handlers`.
import json
import os
import sys

name = json.load(sys.stdin)["payload"]["name"]
print(f"hello {name}")
with os.fdopen(3, "w") as worker:
    print(json.dumps({"type": "result", "value": {"greeted": name}}), file=worker)
