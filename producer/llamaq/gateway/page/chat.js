"use strict";
// The page: what its fields and buttons do.

const KEY_STORE = "llamaq-key";
const MODELS_AGAIN_MS = 3000;
const conversation = new Conversation(localStorage);
let reading = null; // the AbortController of the answer that is being read

function storedKey() {
  try { return sessionStorage.getItem(KEY_STORE) ?? localStorage.getItem(KEY_STORE); } catch { return null; }
}

// Sends a request. Its paths are relative, so that a proxy may serve the page below a path of its own.
async function request(path, {headers, ...options} = {}) {
  const key = storedKey();
  const authorization = key ? {Authorization: `Bearer ${key}`} : {};
  const all = {"Content-Type": "application/json", ...authorization, ...headers};
  const reply = await fetch(path, {cache: "no-store", ...options, headers: all});
  if (reply.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  return reply;
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, {once: true});
  });
}

// ---- what the user does

async function send() {
  const text = byId("text").value.trim();
  if (!text || reading) return;
  if (!byId("model").value) await refreshModels();
  if (!byId("model").value || reading) return; // the notice says why; the message is kept
  byId("text").value = "";
  fitText();
  conversation.ask(text, byId("model").value);
  showAll();
  await follow();
}

async function askAgain() {
  if (reading || !byId("model").value) return;
  conversation.takeBack();
  conversation.request(byId("model").value);
  showAll();
  await follow();
}

// Reads the running answer to its end and stores it.
async function follow() {
  const {running} = conversation;
  showNotice("");
  setBusy(true);
  const own = reading = new AbortController();
  const show = openAnswer();
  let answer = new Answer();
  const update = (newest) => {
    if (own !== reading) return;
    answer = newest;
    conversation.save();
    show(newest);
  };
  let note;
  try {
    await readAnswer(running, {
      request: (path, options) => request(path, {...options, signal: own.signal}),
      update,
      sleep: (seconds) => sleep(seconds, own.signal),
    });
    note = describeEnd(answer.response);
  } catch (error) {
    note = error.name === "AbortError" ? "Stopped" : explain(error);
  }
  if (own !== reading) return; // the conversation was cleared
  reading = null;
  await finish(answer, note);
}

async function finish(answer, note) {
  const isTooLong = /prompt_too_long|context_length_exceeded|exceeds the (available )?context/.test(note) && !answer.text;
  if (isTooLong && conversation.forgetOldest()) { // and try again with the rest
    conversation.request(conversation.running.body.model);
    showAll();
    await follow();
    return;
  }
  if (isTooLong) takeMessageBack();
  else conversation.finish(answer, note);
  setBusy(false);
  showAll();
  byId("announcement").textContent = note || "The answer is complete";
  if (isTooLong) showNotice("Your message is longer than the model's context: send a shorter one.");
  else if (conversation.first) {
    showNotice("The conversation is longer than the model's context: its oldest messages are not sent.", {isError: false});
  }
}

// Puts the last message back into the field, so that the user can shorten it.
function takeMessageBack() {
  byId("text").value = conversation.withdraw();
  fitText();
  byId("text").focus();
}

function explain(error) {
  if (error.status === 401) return "Enter a valid API key above, then try again";
  if (error.status === 404 && error.code !== "model_not_found") return "The server does not store this answer any more";
  if (error.code === "model_not_found") return "No worker serves this model any more: choose another one";
  return error.message;
}

async function stop() {
  byId("stop").disabled = true;
  const own = reading;
  if (!await cancelOnServer()) own?.abort(); // otherwise the stream brings the end
}

// Returns whether the server has cancelled the running answer.
async function cancelOnServer() {
  const id = conversation.running?.id;
  if (!id) return false;
  const reply = await request(`v1/responses/${encodeURIComponent(id)}/cancel`, {method: "POST"}).catch(() => null);
  return reply !== null && reply.ok;
}

function startAnew() {
  cancelOnServer();
  const own = reading;
  reading = null;
  own?.abort();
  conversation.clear();
  showNotice("");
  setBusy(false);
  showAll();
  byId("text").focus();
}

// ---- models, keys and the beginning

async function loadModels() {
  const reply = await request("v1/models");
  if (!reply.ok) throw await errorOf(reply);
  const {data} = await reply.json();
  const canChat = (model) => !model.capabilities || model.capabilities.includes("chat");
  const options = data.filter(canChat).map((model) => {
    const size = model.meta?.n_ctx ? ` (${model.meta.n_ctx.toLocaleString("en")} tokens)` : "";
    return new Option(model.id + size, model.id);
  });
  const wanted = byId("model").value || conversation.model;
  byId("model").replaceChildren(...(options.length ? options : [new Option("none", "")]));
  if (options.some((option) => option.value === wanted)) byId("model").value = wanted;
  if (options.length) return "";
  if (data.length) return "The models of this server have no chat template, so they cannot chat. Start another one: llamaq worker --model FILE";
  return "No worker is running. Start one: llamaq worker --model FILE";
}

async function refreshModels() {
  let problem;
  try {
    problem = await loadModels();
  } catch (error) {
    if (error.status === 401) return; // the form for the key is shown
    problem = error instanceof Refused ? error.message : "The server does not answer. This page tries again.";
  }
  const shown = byId("notice");
  if (problem || shown.dataset.ofModels) showNotice(problem);
  shown.dataset.ofModels = problem ? "yes" : "";
  if (problem) setTimeout(refreshModels, MODELS_AGAIN_MS);
}

function useKey() {
  const [kept, other] = byId("key-kept").checked ? [localStorage, sessionStorage] : [sessionStorage, localStorage];
  other.removeItem(KEY_STORE);
  kept.setItem(KEY_STORE, byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  begin();
}

function fitText() {
  byId("text").style.height = "auto";
  byId("text").style.height = `${byId("text").scrollHeight + 2}px`;
}

async function begin() {
  showAll();
  await refreshModels();
  if (conversation.running && !reading && byId("key-form").hidden) await follow();
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); useKey(); });
byId("text").addEventListener("input", fitText);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && reading) stop(); });
byId("stop").addEventListener("click", stop);
byId("fresh").addEventListener("click", startAnew);
byId("model").addEventListener("focus", refreshModels);
// Another tab of this browser shows the same conversation.
addEventListener("storage", (event) => {
  if (event.key !== STORE || reading) return;
  conversation.load();
  showAll();
});
begin();
byId("text").focus();
