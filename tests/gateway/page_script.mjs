// Tests of the chat page's script, without a browser. test_page_script.py runs them in Node.

import assert from "node:assert/strict";
import {readFileSync} from "node:fs";
import {test} from "node:test";
import vm from "node:vm";

const FOLDER = new URL("../../producer/llamaq/gateway/page/", import.meta.url);

// Returns what the named parts of the script define.
function load(names, ...wanted) {
  const globals = vm.createContext({TextDecoder, crypto, Error, JSON, encodeURIComponent});
  const parts = names.map((name) => readFileSync(new URL(name, FOLDER), "utf8"));
  return vm.runInContext(`${parts.join("\n")}\n({${wanted.join(", ")}})`, globals);
}

// The objects of another context have other prototypes, which deepEqual compares.
const plain = (value) => JSON.parse(JSON.stringify(value));

// ---- Markdown

const {parseMarkdown, parseInline} = load(["markdown.js"], "parseMarkdown", "parseInline");
const blocks = (text) => plain(parseMarkdown(text));
const inline = (text) => plain(parseInline(text));

test("a fence that is still being written is code already", () => {
  assert.deepEqual(blocks("Look:\n```py\nx = 1\n\n# *no*"), [
    {type: "paragraph", text: "Look:"}, {type: "code", language: "py", text: "x = 1\n\n# *no*"},
  ]);
  assert.equal(blocks("~~~~\n```\n~~~~\nend").length, 2);
});

test("lists, headings, quotes, rules and tables are blocks", () => {
  const kinds = blocks("# A\n\n1. b\n   - c\n2. d\n\n> e\n> - f\n\n---\n| a | b |\n| - | - |\n| 1 | 2 |\ntext");
  assert.deepEqual(kinds.map((block) => block.type), ["heading", "list", "quote", "rule", "table", "paragraph"]);
  assert.deepEqual(kinds[1], {type: "list", isOrdered: true, start: 1, items: [
    {text: "b", lists: [{type: "list", isOrdered: false, start: 0, items: [{text: "c", lists: []}]}]},
    {text: "d", lists: []},
  ]});
  assert.deepEqual(kinds[4], {type: "table", head: ["a", "b"], rows: [["1", "2"]]});
  assert.deepEqual(blocks("| no table |"), [{type: "paragraph", text: "| no table |"}]);
});

test("inline marks make parts, and names with underscores stay as they are", () => {
  assert.deepEqual(inline("a **b *c*** `d*e*` snake_case_name 2 * 3 * 4"), [
    "a ", {type: "strong", parts: ["b ", {type: "em", parts: ["c"]}]}, " ", {type: "code", text: "d*e*"},
    " snake_case_name 2 * 3 * 4",
  ]);
});

test("only links to web pages and mail become links", () => {
  assert.deepEqual(inline("[a](https://b.c/d) https://e.f)"), [
    {type: "a", target: "https://b.c/d", parts: ["a"]}, " ", {type: "a", target: "https://e.f", parts: ["https://e.f"]}, ")",
  ]);
  for (const text of ["[a](javascript:alert)", "[a](data:text/html,b)", "<b onclick=c>d</b>"]) {
    assert.deepEqual(inline(text), [text]);
  }
});

test("no text is lost or parsed without end", () => {
  const letters = ["é", "*", "_", "`", "~", "#", ">", "-", "1.", "|", "[", "](", ")", "\n", "  ", "\t", "https://"];
  let seed = 7;
  for (let round = 0; round < 2000; round++) {
    let text = "";
    for (let n = 0; n < 40; n++) text += letters[(seed = (seed * 48271) % 2147483647) % letters.length];
    const shown = JSON.stringify(parseMarkdown(text).map((block) => [block, parseInline(block.text ?? "")]));
    assert.equal(shown.includes("é"), text.includes("é"), text);
  }
  for (const letter of letters) parseMarkdown(`${letter}x`.repeat(3000)).forEach((block) => parseInline(block.text ?? ""));
  parseMarkdown("> ".repeat(5000));
  parseMarkdown(Array.from({length: 500}, (_, n) => `${" ".repeat(n)}- a`).join("\n"));
});

// ---- an answer, across lost connections

const {readAnswer, Refused} = load(["event_stream.js", "answer.js"], "readAnswer", "Refused");
const CREATED = {type: "response.created", sequence_number: 0, response: {id: "resp_1", status: "in_progress"}};
const delta = (delta, sequence_number) => ({type: "response.output_text.delta", delta, sequence_number});
const ended = (status, sequence_number) => ({type: "response.end", sequence_number, response: {id: "resp_1", status}});

// A server that gives one prepared reply after the other, and records the requests.
class Server {
  constructor(...replies) {
    this.replies = replies;
    this.requests = [];
    this.waits = [];
    this.notes = [];
  }

  request = async (path, options = {}) => {
    this.requests.push([options.method ?? "GET", path, options.headers?.["Idempotency-Key"]]);
    const reply = this.replies.shift();
    if (reply instanceof Error) throw reply;
    return reply;
  };

  read(running = {id: null, key: "k", body: {}}) {
    return readAnswer(running, {
      request: this.request,
      update: (answer) => this.notes.push(answer.note),
      sleep: async (seconds) => { this.waits.push(seconds); },
    });
  }
}

// A stream of events in pieces of a few bytes. It breaks at the end if `isCut`.
function streaming(events, {isCut = false} = {}) {
  const lines = events.map((event) => (typeof event === "string" ? `: ${event}` : `event: x\ndata: ${JSON.stringify(event)}`));
  const bytes = new TextEncoder().encode(lines.map((line) => `${line}\n\n`).join(""));
  const pieces = Array.from({length: Math.ceil(bytes.length / 7)}, (_, n) => bytes.slice(7 * n, 7 * n + 7));
  return new Response(new ReadableStream({
    pull(controller) {
      if (pieces.length) controller.enqueue(pieces.shift());
      else if (isCut) controller.error(new TypeError("network error"));
      else controller.close();
    },
  }));
}

const refusal = (status, code, headers = {}) =>
  new Response(JSON.stringify({error: {message: `message of ${status}`, code}}), {status, headers});

test("a lost connection and a dead server delay an answer, and no character is lost or repeated", async () => {
  const server = new Server(
    streaming([CREATED, "queued, 2 ahead", delta("Grüße ", 9)], {isCut: true}),
    new TypeError("Failed to fetch"),
    refusal(503),
    streaming([delta("aus", 12)]), // a server that shuts down closes the stream
    streaming([delta("aus", 12), delta(" Köln", 17), ended("completed", 18)]),
  );
  const answer = await server.read();
  assert.equal(answer.text, "Grüße aus Köln");
  assert.equal(answer.response.status, "completed");
  assert.deepEqual(server.requests, [
    ["POST", "v1/responses", "k"],
    ...[9, 9, 9, 12].map((n) => ["GET", `v1/responses/resp_1?stream=true&starting_after=${n}`, undefined]),
  ]);
  assert.deepEqual(server.waits, [1, 2, 4, 1]);
  assert.ok(server.notes.includes("Waiting for a free slot: 2 requests are ahead"));
  assert.ok(server.notes.includes("The server does not answer. Trying again in 2 s"));
});

test("a long prompt shows how much of it is read", async () => {
  const progress = (processed) => ({
    type: "response.in_progress", sequence_number: 0, response: CREATED.response,
    prompt_progress: {total: 3000, cache: 10, processed, time_ms: 5},
  });
  const server = new Server(streaming(
    [CREATED, progress(10), progress(1999), progress(3000), delta("a", 1), progress(500), ended("completed", 2)]
  ));
  assert.equal((await server.read()).text, "a");
  assert.deepEqual(server.notes.slice(1, 4), [
    "Reading the conversation: 0 %", "Reading the conversation: 66 %", "Reading the conversation…",
  ]);
  assert.equal(server.notes.at(-1), "");
});

test("a request whose reply was lost is repeated with the same key", async () => {
  const server = new Server(new TypeError("Failed to fetch"), streaming([CREATED, delta("a", 4), ended("cancelled", 5)]));
  assert.equal((await server.read()).response.status, "cancelled");
  assert.deepEqual(server.requests, [["POST", "v1/responses", "k"], ["POST", "v1/responses", "k"]]);
});

test("a full queue is waited for as long as the server says", async () => {
  const server = new Server(refusal(429, "queue_full", {"Retry-After": "7"}), streaming([CREATED, ended("completed", 1)]));
  await server.read();
  assert.deepEqual(server.waits, [7]);
  assert.ok(server.notes.includes("message of 429. Trying again in 7 s"));
});

test("other errors end the answer with the server's words", async () => {
  for (const status of [400, 401, 404]) {
    await assert.rejects(new Server(refusal(status, "c")).read(), (error) =>
      error instanceof Refused && error.message === `message of ${status}` && error.status === status && error.code === "c");
  }
});

test("reasoning is kept apart from the text", async () => {
  const thought = {type: "response.reasoning_text.delta", delta: "hm", sequence_number: 3};
  const answer = await new Server(streaming([CREATED, thought, delta("a", 4), ended("completed", 5)])).read();
  assert.deepEqual([answer.reasoning, answer.text], ["hm", "a"]);
});

// ---- the stored conversation

const {Conversation} = load(["conversation.js"], "Conversation");

class Storage {
  values = new Map();
  getItem(name) { return this.values.get(name) ?? null; }
  setItem(name, value) { this.values.set(name, value); }
}

test("a conversation is found again, with its running answer", () => {
  const storage = new Storage();
  const first = new Conversation(storage);
  first.ask("Hello", "default");
  const second = new Conversation(storage);
  assert.deepEqual(plain(second.running), plain(first.running));
  second.finish({text: "Hi", reasoning: ""}, "");
  second.ask("More", "default");
  assert.deepEqual(plain(new Conversation(storage).running.body.input), [
    {role: "user", content: "Hello"}, {role: "assistant", content: "Hi"}, {role: "user", content: "More"},
  ]);
  assert.match(second.running.key, /^[0-9a-f]{32}$/);
});

test("damaged and missing storage begins a new conversation", () => {
  for (const text of ["{", "7", "null", '{"messages": 7}']) {
    const storage = new Storage();
    storage.setItem("llamaq-chat", text);
    assert.deepEqual(plain(new Conversation(storage).messages), []);
  }
  const refusing = {getItem() { throw new Error("no"); }, setItem() { throw new Error("no"); }};
  new Conversation(refusing).ask("Hello", "default");
});

test("the oldest exchanges are left out of requests until only the last message is left", () => {
  const conversation = new Conversation(new Storage());
  for (const text of ["a", "b"]) {
    conversation.ask(text, "default");
    conversation.finish({text: `answer ${text}`, reasoning: ""}, "");
  }
  conversation.ask("c", "default");
  assert.ok(conversation.forgetOldest());
  conversation.request("default");
  assert.deepEqual(plain(conversation.running.body.input.map((message) => message.content)), ["b", "answer b", "c"]);
  assert.ok(conversation.forgetOldest());
  assert.ok(!conversation.forgetOldest());
  assert.equal(conversation.withdraw(), "c");
  assert.deepEqual([conversation.messages.length, conversation.first, conversation.running], [4, 0, null]);
});
