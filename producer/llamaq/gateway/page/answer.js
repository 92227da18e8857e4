"use strict";
// Reads one answer to its end. A lost connection, a restarted server and a full queue only delay it.

const TEMPORARY = new Set([408, 425, 429, 502, 503, 504]);
const MAX_WAIT_S = 15;

// An error that trying again does not solve.
class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The parts of an answer that have arrived.
class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.lastNumber = -1;
    this.response = null;
    this.note = "Sending…";
  }

  get isEnded() {
    return this.response !== null && !["queued", "in_progress"].includes(this.response.status);
  }

  // Adds an event. Events that arrived before are ignored.
  add(event) {
    if (event.type === "comment") {
      if (!this.text && !this.reasoning) this.note = describeWait(event.text);
      return;
    }
    if (event.prompt_progress) {
      if (!this.text && !this.reasoning) this.note = describeProgress(event.prompt_progress);
      return;
    }
    const isNew = event.sequence_number === undefined || event.sequence_number > this.lastNumber;
    if (!isNew) return;
    this.lastNumber = event.sequence_number ?? this.lastNumber;
    if (event.response) this.response = event.response;
    if (event.type === "response.output_text.delta") this.text += event.delta;
    else if (/^response\.reasoning\w*\.delta$/.test(event.type)) this.reasoning += event.delta;
    else return;
    this.note = this.text ? "" : "Thinking…";
  }
}

// Says what a comment of the stream says, in words for the user of the page.
function describeWait(comment) {
  const queued = /^queued, (\d+) ahead/.exec(comment);
  if (!queued) return "Reading the conversation…";
  const n = Number(queued[1]);
  if (n === 0) return "Waiting for a free slot: this request is next";
  return `Waiting for a free slot: ${n} ${n === 1 ? "request is" : "requests are"} ahead`;
}

// Says how much of the prompt is computed.
function describeProgress({processed, total}) {
  return processed < total ? `Reading the conversation: ${Math.floor((100 * processed) / total)} %` : "Reading the conversation…";
}

// Says how an answer ended. The empty text: as it should.
function describeEnd(response) {
  if (response.error) return response.error.message;
  if (response.status === "cancelled") return "Stopped";
  return response.status === "incomplete" ? "Cut: the end of the model's context is reached" : "";
}

async function errorOf(reply) {
  const body = await reply.json().catch(() => ({}));
  const {message, code} = body.error ?? {};
  return new Refused(message ?? `the server answered with the status ${reply.status}`, reply.status, code);
}

// Reads an answer until it has ended.
//   running: {id, key, body}. The id is null until the server has told it. The key makes a repeated request harmless.
//   request(path, options): sends a request, as fetch does.
//   update(answer): is called after each change.
//   sleep(seconds): waits. It throws when the reader has been told to stop, as `request` does.
async function readAnswer(running, {request, update, sleep}) {
  const answer = new Answer();
  for (let failures = 0; ; failures++) {
    let error;
    try {
      const reply = await openStream(running, answer, request);
      for await (const event of readEvents(reply.body)) {
        if (event.type === "error") throw new Error(event.message);
        failures = 0;
        answer.add(event);
        running.id = answer.response?.id ?? running.id;
        update(answer);
        if (answer.isEnded) return answer;
      }
      error = new Error("The connection was closed");
    } catch (caught) {
      if (caught.name === "AbortError" || (caught instanceof Refused && !TEMPORARY.has(caught.status))) throw caught;
      error = caught instanceof Refused ? caught : new Error("The server does not answer");
      error.retryAfter = caught.retryAfter;
    }
    const seconds = Math.max(error.retryAfter ?? 0, Math.min(2 ** failures, MAX_WAIT_S));
    answer.note = `${error.message}. Trying again in ${seconds} s`;
    update(answer);
    await sleep(seconds);
  }
}

async function openStream(running, answer, request) {
  const reply = running.id
    ? await request(`v1/responses/${encodeURIComponent(running.id)}?stream=true&starting_after=${answer.lastNumber}`)
    : await request("v1/responses", {
        method: "POST", body: JSON.stringify(running.body), headers: {"Idempotency-Key": running.key},
      });
  if (reply.ok) return reply;
  const error = await errorOf(reply);
  error.retryAfter = Number(reply.headers.get("Retry-After")) || undefined;
  throw error;
}
