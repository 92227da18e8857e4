"use strict";
// What the page shows: the conversation, the answer that arrives, notices.

const byId = (id) => document.getElementById(id);

function showNotice(text, {isError = true} = {}) {
  byId("notice").textContent = text;
  byId("notice").className = isError ? "error" : "";
  byId("notice").hidden = !text;
  scrollDown();
}

function showAll() {
  byId("messages").replaceChildren(...conversation.messages.map(messageElement));
  byId("welcome").hidden = conversation.messages.length > 0;
  scrollDown();
}

function messageElement(message, index) {
  const article = element("article", {className: message.role});
  article.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  const content = element("div", {className: "content"});
  if (message.role === "user") content.textContent = message.text;
  else showMarkdown(content, message.text);
  article.append(...reasoningElements(message.reasoning), content);
  if (message.role === "assistant") article.append(footerOf(message, index));
  return article;
}

function reasoningElements(reasoning) {
  if (!reasoning) return [];
  return [element("details", {}, element("summary", {textContent: "Reasoning"}),
    element("div", {className: "content", textContent: reasoning}))];
}

function footerOf(message, index) {
  const footer = element("footer");
  if (message.note) footer.append(element("span", {className: "note bad", textContent: message.note}));
  if (message.text) footer.append(copyButton(() => message.text));
  if (index === conversation.messages.length - 1) {
    const again = element("button", {type: "button", className: "small", textContent: "Try again"});
    again.addEventListener("click", askAgain);
    footer.append(again);
  }
  return footer;
}

// Shows an answer while it arrives. Returns the function that shows its next state.
function openAnswer() {
  const content = element("div", {className: "content"});
  const thoughts = element("div", {className: "content"});
  const details = element("details", {hidden: true}, element("summary", {textContent: "Reasoning"}), thoughts);
  const note = element("span", {className: "note", textContent: "Sending…"});
  const article = element("article", {className: "assistant busy"}, details, content, element("footer", {}, note));
  article.setAttribute("aria-label", "Answer");
  article.setAttribute("aria-busy", "true");
  byId("messages").append(article);
  scrollDown();
  let newest = null;
  const show = () => {
    const isAtEnd = byId("chat").scrollHeight - byId("chat").scrollTop - byId("chat").clientHeight < 60;
    showMarkdown(content, newest.text);
    thoughts.textContent = newest.reasoning;
    details.hidden = !newest.reasoning;
    note.textContent = newest.note || "Writing…";
    newest = null;
    if (isAtEnd) scrollDown();
  };
  return (answer) => {
    if (!newest) setTimeout(show, 30);
    newest = answer;
  };
}

function scrollDown() {
  byId("chat").scrollTop = byId("chat").scrollHeight;
}

function setBusy(isBusy) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("stop").disabled = false;
  if (hadFocus) byId(isBusy ? "stop" : "text").focus();
}
