"use strict";
// Makes elements. Texts are set as textContent or as text nodes.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function inlineElements(text) {
  return parseInline(text).map(inlineElement);
}

function inlineElement(part) {
  if (typeof part === "string") return part;
  if (part.type === "code") return element("code", {textContent: part.text});
  const link = part.type === "a" ? {href: part.target, target: "_blank", rel: "noopener noreferrer"} : {};
  return element(part.type, link, ...part.parts.map(inlineElement));
}

function blockElement(block) {
  switch (block.type) {
    case "code": return codeElement(block);
    case "heading": return element("h3", {}, ...inlineElements(block.text));
    case "rule": return element("hr");
    case "quote": return element("blockquote", {}, ...block.blocks.map(blockElement));
    case "list": return listElement(block);
    case "table": return tableElement(block);
    default: return element("p", {}, ...inlineElements(block.text));
  }
}

function listElement(list) {
  const items = list.items.map((item) => element("li", {}, ...inlineElements(item.text), ...item.lists.map(listElement)));
  return list.isOrdered ? element("ol", {start: list.start}, ...items) : element("ul", {}, ...items);
}

function tableElement(table) {
  const row = (kind) => (cells) => element("tr", {}, ...cells.map((cell) => element(kind, {}, ...inlineElements(cell))));
  return element("table", {}, element("thead", {}, row("th")(table.head)), element("tbody", {}, ...table.rows.map(row("td"))));
}

function codeElement({language, text}) {
  const code = element("code", {textContent: text});
  const caption = element("figcaption", {}, element("span", {textContent: language || "text"}), copyButton(() => text));
  return element("figure", {}, caption, element("pre", {tabIndex: 0}, code));
}

function copyButton(textOf) {
  const button = element("button", {type: "button", className: "small", textContent: "Copy"});
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(textOf())) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

// Browsers give pages that were not loaded over HTTPS no clipboard object.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", {value: text, className: "hidden"});
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}

// Shows Markdown, and keeps the elements of blocks that have not changed, so that a selection survives the next token.
function showMarkdown(place, text) {
  const blocks = parseMarkdown(text);
  place.shown ??= [];
  blocks.forEach((block, index) => {
    const source = JSON.stringify(block);
    if (place.shown[index] === source) return;
    place.shown[index] = source;
    const made = blockElement(block);
    if (place.children[index]) place.children[index].replaceWith(made);
    else place.append(made);
  });
  while (place.children.length > blocks.length) place.lastElementChild.remove();
  place.shown.length = blocks.length;
}
