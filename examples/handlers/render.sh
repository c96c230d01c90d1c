#!/bin/sh
# Renders a page for a title: a handler in shell.
#
#     [handler.render]
#     exec = ["examples/handlers/render.sh"]
#     schema = "examples/handlers/render.schema.json"
#
# Payload: {"title": "Hello"}
set -eu

# The schema allows only letters, digits and spaces, so the title needs no unescaping.
title=$(sed -n 's/.*"payload":{"title":"\([^"]*\)"}.*/\1/p')
[ -n "$title" ] || exit "$JOURNEYMAN_EXIT_INTERNAL"

echo '{"type":"step","name":"render"}' >&3
printf '<!doctype html>\n<title>%s</title>\n<h1>%s</h1>\n' "$title" "$title" >page.html
echo "rendered $(wc -c <page.html) bytes for run $RUN_ID of $TASK_ID"
echo '{"type":"artifact","name":"public/page.html","path":"page.html"}' >&3
