// Markdown: its blocks are told apart here, and rendered by the server.

import { ask } from "./api.js";
import { built, codeBlock, el } from "./dom.js";

const MAX_CHARS = 32768; // that the server renders at once
const FENCE = /^([ \t]*)(`{3,}|~{3,})([^`\n]*)\n?$/;

/**
 * Divide a text at blank lines and around fenced code. The last block is the one that is not
 * finished, and may be empty. A block of code has its `fence`, and `code` without the fences.
 */
export function blocksOf(text) {
  const blocks = [];
  let block = { text: "", fence: "", code: "" };
  let indent = 0;
  const end = () => {
    blocks.push(block);
    block = { text: "", fence: "", code: "" };
  };
  for (const line of text.split(/(?<=\n)/)) {
    const [, margin, mark = "", info = ""] = FENCE.exec(line) ?? [];
    const isWhole = line.endsWith("\n");
    if (block.fence) {
      block.text += line;
      const isEnd = mark.startsWith(block.fence) && !info.trim();
      if (!isEnd) block.code += line.slice(Math.min(indent, line.search(/[^ \t]|$/)));
      else if (isWhole) end();
    } else if (mark && isWhole) {
      if (block.text) end();
      block.text = line;
      block.fence = mark;
      indent = margin.length;
    } else {
      block.text += line;
      if (isWhole && !line.trim()) end();
    }
  }
  return [...blocks, block];
}

/** Return the elements of a text, or null where the server cannot render it now. */
export async function rendered(text) {
  const nodes = [];
  try {
    for (const piece of piecesOf(text)) nodes.push(...(await renderedPiece(piece)));
  } catch {
    return null; // it stays plain
  }
  for (const node of nodes) {
    if (typeof node !== "string") node.dir ||= "auto";
  }
  return nodes;
}

/** Divide a text into pieces that the server takes, and blocks that are too long for it. */
function piecesOf(text) {
  if (text.length <= MAX_CHARS) return [{ text }];
  const pieces = [];
  let room = 0;
  for (const block of blocksOf(text)) {
    const { length } = block.text;
    if (length > MAX_CHARS || length > room) {
      pieces.push({ ...block });
      room = MAX_CHARS - length;
    } else {
      pieces.at(-1).text += block.text;
      room -= length;
    }
  }
  return pieces;
}

async function renderedPiece({ text, fence, code }) {
  if (text.length > MAX_CHARS) {
    return [fence ? codeBlock(el("code", {}, code)) : el("div", { class: "plain" }, text)];
  }
  const response = await ask("v1/lowtide/markdown", { text });
  return (await response.json()).nodes.map(built);
}
