#!/usr/bin/env python3
"""Counts the words of a text: a handler in Python.

    [handler.word-count]
    exec = ["examples/handlers/word_count.py"]
    check = ["examples/handlers/word_count.py"]

Payload: {"text": "to be or not to be"}
"""

import collections
import json
import os
import signal
import sys

task = json.load(sys.stdin)
text = task["payload"].get("text")
to_worker = os.fdopen(3, "w", buffering=1)


def say(**message):
    print(json.dumps(message), file=to_worker)


if task["phase"] == "check":
    if isinstance(text, str):
        sys.exit(0)
    say(type="reason", text="payload/text: give the text whose words are counted")
    sys.exit(int(os.environ["JOURNEYMAN_EXIT_MALFORMED"]))

# On cancellation, exit at once.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["JOURNEYMAN_EXIT_RETRY"])))

words = collections.Counter(text.lower().split())
print(f"{words.total()} words, {len(words)} different ones")
with open(os.path.join(task["workdir"], "words.txt"), "w", encoding="utf-8") as out:
    for word, count in words.most_common():
        print(f"{count}\t{word}", file=out)
say(type="artifact", name="public/words.txt", path="words.txt")
say(type="result", value={"words": words.total(), "different": len(words)})
