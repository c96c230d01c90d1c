#!/usr/bin/env python3
"""Verifies webhooks as receivers do: v1 with the official library, v1a with PyNaCl, because no official library has v1a.

Reads [{"headers": {…}, "body": base64, "key": "whsec_…" or "whpk_…"}, …] and prints a list of whether each is accepted.
"""

import base64
import json
import sys
import time

from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from standardwebhooks import Webhook, WebhookVerificationError


def accepts_v1(key, headers, body):
    try:
        Webhook(key).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


def accepts_v1a(key, headers, body):
    public = VerifyKey(base64.b64decode(key.removeprefix("whpk_"), validate=True))
    signed = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    if abs(time.time() - int(headers["webhook-timestamp"])) > 300:
        return False
    for signature in headers["webhook-signature"].split(" "):
        version, encoded = signature.split(",")
        if version == "v1a":
            try:
                public.verify(signed, base64.b64decode(encoded, validate=True))
                return True
            except BadSignatureError:
                pass
    return False


def accepts(check):
    verify = accepts_v1a if check["key"].startswith("whpk_") else accepts_v1
    return verify(check["key"], check["headers"], base64.b64decode(check["body"]))


print(json.dumps([accepts(check) for check in json.load(sys.stdin)]))
