"use strict";
// Turns the Markdown of a model into elements. Text becomes text nodes only, never HTML.

const MAX_INLINE_CHARS = 20000; // a longer paragraph is shown as it is
const MAX_DEPTH = 6;

// Returns the blocks of a text: {type, ...}.
function parseMarkdown(text, depth = 0) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) { at++; continue; }
    const parse = BLOCKS.find(([pattern]) => pattern.test(lines[at]));
    const [block, next] = (parse ? parse[1] : parseParagraph)(lines, at, depth) ?? parseParagraph(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

const FENCE = /^\s{0,12}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s{0,3}>\s?/;
const ITEM = /^(\s{0,24})([-*+]|\d{1,9}[.)])\s+(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;
const BLOCKS = [[FENCE, parseFence], [HEADING, parseHeading], [RULE, parseRule], [QUOTE, parseQuote], [ITEM, parseList],
  [ROW, parseTable]];
const startsBlock = (line) => BLOCKS.some(([pattern]) => pattern.test(line));

// A fence without its end contains the rest of the text: it is still being written.
function parseFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  const inner = [];
  for (at++; at < lines.length && !closes(lines[at]); at++) inner.push(lines[at]);
  return [{type: "code", language, text: inner.join("\n")}, at + 1];
}

function parseHeading(lines, at) {
  return [{type: "heading", text: HEADING.exec(lines[at])[2]}, at + 1];
}

function parseRule(lines, at) {
  return [{type: "rule"}, at + 1];
}

function parseQuote(lines, at, depth) {
  const inner = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at++) inner.push(lines[at].replace(QUOTE, ""));
  if (depth >= MAX_DEPTH) return [{type: "paragraph", text: inner.join("\n")}, at];
  return [{type: "quote", blocks: parseMarkdown(inner.join("\n"), depth + 1)}, at];
}

// Items of one list have the same indentation. Deeper items make a list within the item before them.
function parseList(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const list = {type: "list", isOrdered: /\d/.test(marker), start: Number.parseInt(marker) || 0, items: []};
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (item && item[1].length > indent.length && list.items.length && depth < MAX_DEPTH) {
      const [inner, next] = parseList(lines, at, depth + 1);
      list.items.at(-1).lists.push(inner);
      at = next;
    } else if (item && (item[1].length === indent.length || depth >= MAX_DEPTH)) {
      if (/\d/.test(item[2]) !== list.isOrdered) break;
      list.items.push({text: item[3], lists: []});
      at++;
    } else if (!item && lines[at].trim() && !startsBlock(lines[at])) {
      list.items.at(-1).text += "\n" + lines[at].trim();
      at++;
    } else if (!lines[at].trim() && ITEM.exec(lines[at + 1] ?? "")?.[1].length >= indent.length) {
      at++; // an empty line between two items
    } else break;
  }
  return [list, at];
}

function parseTable(lines, at) {
  if (!/^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/.test(lines[at + 1] ?? "")) return null;
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
  const table = {type: "table", head: cells(lines[at]), rows: []};
  for (at += 2; at < lines.length && ROW.test(lines[at]); at++) table.rows.push(cells(lines[at]));
  return [table, at];
}

function parseParagraph(lines, at) {
  const first = at;
  for (at++; at < lines.length && lines[at].trim() && !startsBlock(lines[at]); at++);
  return [{type: "paragraph", text: lines.slice(first, at).join("\n")}, at];
}

const INLINE = new RegExp([
  /(?<ticks>`+)(?<code>[^`]|[^`][^]*?[^`])\k<ticks>(?!`)/,
  /\*\*(?<strong>\S|\S[^]*?\S)\*\*(?!\*)/,
  /(?<![\w*])(?<mark>[*_])(?<em>[^\s*_]|[^\s*_][^*]*?[^\s*_])\k<mark>(?![\w*])/,
  /\[(?<label>[^\]\n]+)\]\((?<target>[^()\s]+)\)/,
  /(?<url>\bhttps?:\/\/[^\s<>"'`)\]]+)/,
].map((pattern) => pattern.source).join("|"), "g");

// Returns the parts of a paragraph: texts, and {type, text|parts}.
function parseInline(text, depth = 0) {
  if (depth >= MAX_DEPTH || text.length > MAX_INLINE_CHARS) return [text];
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > end) parts.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const {code, strong, em, label, target, url} = found.groups;
    if (code !== undefined) parts.push({type: "code", text: code});
    else if (strong !== undefined) parts.push({type: "strong", parts: parseInline(strong, depth + 1)});
    else if (em !== undefined) parts.push({type: "em", parts: parseInline(em, depth + 1)});
    else if (url !== undefined) parts.push({type: "a", target: url, parts: [url]});
    else if (/^(https?:\/\/|mailto:)/i.test(target)) parts.push({type: "a", target, parts: [label]});
    else parts.push(found[0]);
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}
