"use strict";
// The conversation as the browser stores it.

const STORE = "llamaq-chat";
const empty = () => ({messages: [], first: 0, running: null, model: null});

class Conversation {
  constructor(storage) {
    this.storage = storage;
    this.load();
  }

  load() {
    let stored = {};
    try { stored = JSON.parse(this.storage.getItem(STORE)) ?? {}; } catch { /* damaged, or no storage is allowed */ }
    Object.assign(this, empty(), stored);
    if (!Array.isArray(this.messages)) Object.assign(this, empty());
  }

  save() {
    const {messages, first, running, model} = this;
    try { this.storage.setItem(STORE, JSON.stringify({messages, first, running, model})); } catch { /* full, or not allowed */ }
  }

  clear() {
    Object.assign(this, empty(), {model: this.model});
    this.save();
  }

  // Adds the user's message and makes the request for its answer.
  ask(text, model) {
    this.messages.push({role: "user", text});
    this.request(model);
  }

  // Makes the request for the answer to the messages so far.
  request(model) {
    this.model = model;
    const sent = this.messages.slice(this.first).filter((message) => message.text);
    const input = sent.map(({role, text}) => ({role, content: text}));
    this.running = {id: null, key: randomKey(), body: {model, input, stream: true, background: true, return_progress: true}};
    this.save();
  }

  // Stores the answer that has ended.
  finish({text, reasoning}, note) {
    this.messages.push({role: "assistant", text, reasoning, note});
    this.running = null;
    this.save();
  }

  // Removes the last answer, so that it can be requested again.
  takeBack() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
  }

  // Removes the last message of the user, and returns its text. Further requests have all messages again.
  withdraw() {
    this.first = 0;
    this.running = null;
    const {text} = this.messages.pop();
    this.save();
    return text;
  }

  // Leaves the oldest exchange out of further requests. Returns false if only the last message is left.
  forgetOldest() {
    const next = this.messages.findIndex((message, index) => index > this.first && message.role === "user");
    if (next < 0) return false;
    this.first = next;
    return true;
  }
}

// `crypto.randomUUID` exists only on pages that were loaded over HTTPS or from localhost.
function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
