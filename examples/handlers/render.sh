#!/bin/sh
# Renders a page for a title: a handler in shell.
#
#     [handler.render]
#     exec = ["examples/handlers/render.sh"]
#     schema = "examples/handlers/render.schema.json"
#
# Payload: {"title": "Hello"}
set -eu

# The schema lets only letters, digits and spaces through, so the title can be cut out of the document as it is.
title=$(sed -n 's/.*"payload":{"title":"\([^"]*\)"}.*/\1/p')
[ -n "$title" ] || exit "$JOURNEYMAN_EXIT_INTERNAL"

echo '{"type":"step","name":"render"}' >&3
printf '<!doctype html>\n<title>%s</title>\n<h1>%s</h1>\n' "$title" "$title" >page.html
echo "rendered $(wc -c <page.html) bytes for run $RUN_ID of $TASK_ID"
echo '{"type":"artifact","name":"public/page.html","path":"page.html"}' >&3
