#!/bin/sh
whom=$(sed -n 's/.*"whom":"\([^"]*\)".*/\1/p')
if [ -z "$whom" ]; then
    echo 'payload must have the form {"whom": "…"}'
    exit "$JOURNEYMAN_EXIT_FAILED"
fi
echo "hello $whom"
printf '{"type":"result","name":"public/greeting.json","value":{"hello":"%s"}}\n' "$whom" >&3
