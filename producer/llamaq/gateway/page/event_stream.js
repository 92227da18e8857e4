"use strict";
// Reads server-sent events.

// Yields the objects of the events, and {type: "comment", text} for each comment.
async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, {stream: true})).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = parseEvent(part);
        if (event) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function parseEvent(text) {
  const lines = text.split("\n");
  const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
  if (data.length) return data.join("\n") === "[DONE]" ? null : JSON.parse(data.join("\n"));
  return lines[0].startsWith(":") ? {type: "comment", text: lines[0].slice(1).trim()} : null;
}
