// One answer: asked for, shown as it comes, and measured.

import { ask, eventsOf } from "./api.js";
import { codeBlock, digits, el, percent, seconds, showFacts, size, whole } from "./dom.js";
import { DiffusionView } from "./diffusion.js";
import { live } from "./live.js";
import { blocksOf, rendered } from "./markdown.js";
import { asked } from "./settings.js";

const SHORT_S = 0.03; // a span too short to be timed in a browser

const ENDS = {
  stop: "the model was done",
  length: "no room was left",
  stopped: "stopped by you",
  incomplete: "not complete when it was kept",
  failed: "it failed",
};

/** The view of one version of an answer. */
export class AnswerView {
  #version;
  #body = el("div", { class: "body" });
  #tail = el("div", { class: "plain" });
  #codeText = document.createTextNode("");
  #code = el("code", {}, this.#codeText);
  #openCode = codeBlock(this.#code); // code that is still coming
  #draft = el("span", { class: "draft" });
  #thoughts = el("p", { class: "plain" });
  #thinking = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Thoughts"), this.#thoughts);
  #trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  #speed = el("div", { class: "speed", hidden: true });
  #facts = el("dl", { class: "facts" });
  #diffusion = new DiffusionView();
  #numSettled = 0; // characters of the blocks that are finished
  #rendering = Promise.resolve();
  #isDue = false;

  constructor(version) {
    this.#version = version;
    this.#body.append(this.#tail);
    this.element = el(
      "div",
      { class: "answer" },
      this.#thinking,
      this.#body,
      this.#trouble,
      this.#speed,
      this.#facts,
    );
  }

  /** Show a version that has ended. */
  async show() {
    this.#paintNotes();
    this.#tail.textContent = this.#version.text;
    this.#showEnd();
    await this.#renderAll();
  }

  /** Ask for the answer, and show it until it has ended. Returns false if it failed. */
  async run(messages, signal) {
    const version = this.#version;
    const clock = { startS: now(), firstS: null, numPieces: 0 };
    const before = live.state?.counts;
    this.element.setAttribute("aria-busy", "true");
    try {
      await this.#read(messages, signal, clock);
    } catch (error) {
      version.ended = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) version.trouble = error.message;
    }
    version.facts.totalS = now() - clock.startS;
    this.#draft.textContent = "";
    this.element.removeAttribute("aria-busy");
    this.#paint();
    this.#measure(clock);
    this.#showEnd();
    await Promise.all([this.#renderAll(), this.#countReads(before)]);
    this.#showEnd();
    return version.ended !== "failed";
  }

  async #read(messages, signal, clock) {
    const { facts } = this.#version;
    const response = await ask(
      "v1/chat/completions",
      {
        messages,
        stream: true,
        stream_options: { include_usage: true, include_drafts: true },
        return_progress: true,
        ...asked(),
      },
      signal,
    );
    for await (const [, data] of eventsOf(response)) {
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) {
        facts.numPrompt = chunk.usage.prompt_tokens;
        facts.numKept = chunk.usage.prompt_tokens_details.cached_tokens;
        facts.numNew = chunk.usage.completion_tokens;
      }
      if (chunk.prompt_progress) facts.progress = chunk.prompt_progress;
      if (chunk.type === "diffusion_frame") this.#addFrame(chunk, clock);
      if (chunk.choices[0]) this.#addChoice(chunk.choices[0], clock);
      this.#paintSoon(clock);
    }
    if (!this.#version.ended) throw new Error("The server ended the answer before it was complete.");
  }

  #addFrame(frame, clock) {
    if (this.#diffusion.isEmpty) this.#body.before(this.#diffusion.element);
    clock.firstS ??= now();
    this.#diffusion.add(frame);
    this.#draft.textContent = frame.text;
  }

  #addChoice({ delta, finish_reason: reason }, clock) {
    const version = this.#version;
    if (delta.content) {
      version.text += delta.content;
      this.#draft.textContent = "";
    }
    if (delta.reasoning_content) version.thoughts += delta.reasoning_content;
    if (delta.content || delta.reasoning_content) {
      clock.firstS ??= now();
      clock.numPieces += 1;
    }
    if (reason) version.ended = reason;
  }

  // What is shown

  #paintSoon(clock) {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      if (this.#version.facts.totalS !== undefined) return;
      this.#paint();
      this.#measure(clock);
      this.#showRunning(clock);
    });
  }

  #paint() {
    this.#paintNotes();
    if (!this.#diffusion.isEmpty) this.#diffusion.draw();
    this.#paintBlocks();
  }

  #paintNotes() {
    const { thoughts, trouble } = this.#version;
    this.#thinking.hidden = !thoughts;
    this.#thoughts.textContent = thoughts;
    this.#trouble.hidden = !trouble;
    this.#trouble.textContent = trouble ?? "";
  }

  /** Show finished blocks, each once and for good, and after them the one that is still coming. */
  #paintBlocks() {
    const { text } = this.#version;
    const blocks = blocksOf(text.slice(this.#numSettled));
    const { fence, code, text: rest } = blocks.pop();
    for (const block of blocks) this.#addBlock(block);
    this.#numSettled = text.length - rest.length;
    if (fence) {
      this.#paintCode(code);
    } else {
      this.#tail.replaceChildren(rest, this.#draft);
    }
  }

  /** Show open code; what was shown keeps its place, with its scrolling, selection and focus. */
  #paintCode(code) {
    const shown = this.#codeText;
    if (code.startsWith(shown.data)) shown.appendData(code.slice(shown.length));
    else shown.data = code;
    if (this.#openCode.parentNode === this.#tail) return;
    this.#code.append(this.#draft);
    this.#tail.replaceChildren(this.#openCode);
  }

  #addBlock({ fence, code, text }) {
    if (!text.trim()) return;
    const place = fence ? codeBlock(el("code", {}, code)) : el("div", { class: "plain" }, text.trimEnd());
    this.#tail.before(place);
    if (fence) return;
    this.#rendering = this.#rendering.then(async () => {
      const nodes = await rendered(text);
      if (nodes) place.replaceWith(...nodes);
    });
  }

  /** Render the whole text: lists and references go over paragraphs. */
  async #renderAll() {
    const { text } = this.#version;
    await this.#rendering;
    const nodes = text ? await rendered(text) : [];
    if (nodes) this.#body.replaceChildren(...nodes);
  }

  #measure(clock) {
    const { facts } = this.#version;
    const at = now();
    if (clock.firstS !== null) facts.firstS = clock.firstS - clock.startS;
    const isDiffusion = !this.#diffusion.isEmpty;
    const number = facts.numNew ?? (isDiffusion ? this.#diffusion.numWritten : clock.numPieces);
    facts.numSeen = number;
    facts.predicted = live.model?.predicted ?? null;
    if (!number || clock.firstS === null) return;
    const span = at - clock.firstS;
    const isShort = isDiffusion || span < SHORT_S || number < 3;
    facts.speed = isShort ? number / (at - clock.startS) : (number - 1) / span;
  }

  /** Take what was read from disk and found in memory meanwhile from the engine's counts. */
  async #countReads(before) {
    if (!before) return;
    await live.next(500);
    const { counts } = live.state;
    const { facts } = this.#version;
    const tokens = counts.tokens - before.tokens;
    const hits = counts.hits - before.hits;
    const all = hits + counts.misses - before.misses;
    if (tokens > 0) facts.readBytes = (counts.read_bytes - before.read_bytes) / tokens;
    if (all > 0) facts.hitRate = hits / all;
  }

  #showRunning(clock) {
    const { facts } = this.#version;
    const told = [];
    if (clock.firstS === null) {
      const { processed, total } = facts.progress ?? {};
      const reads = total ? `reads the prompt: ${whole(processed)} of ${whole(total)} tokens` : "waits";
      told.push(["now", reads]);
    }
    this.#showMeasures(told);
  }

  #showEnd() {
    const { facts, ended } = this.#version;
    const told = [];
    if (facts.numNew !== undefined) told.push(["tokens", whole(facts.numNew)]);
    if (facts.numKept !== undefined) {
      told.push(["kept", `${whole(facts.numKept)} of ${whole(facts.numPrompt)}`]);
    }
    if (facts.readBytes !== undefined) told.push(["read a token", size(facts.readBytes)]);
    if (facts.hitRate !== undefined) told.push(["hit rate", percent(facts.hitRate)]);
    if (ended) told.push(["ended", ENDS[ended] ?? ended]);
    this.#showMeasures(told);
  }

  #showMeasures(more) {
    const { facts } = this.#version;
    const told = [];
    if (facts.speed !== undefined) told.push(["speed", `${digits(facts.speed)} tokens/s`]);
    if (facts.firstS !== undefined) told.push(["first token", seconds(facts.firstS)]);
    showFacts(this.#facts, [...told, ...more]);
    showRange(this.#speed, facts);
  }
}

/** Show a measured speed in the predicted range. */
function showRange(element, { predicted, speed }) {
  element.hidden = !predicted || speed === undefined;
  if (element.hidden) return;
  const { least, likely, most } = predicted;
  const end = 1.15 * Math.max(most, speed);
  const told = `predicted ${digits(likely)}, between ${digits(least)} and ${digits(most)} tokens/s`;
  const bar = el(
    "div",
    { class: "range", role: "img", "aria-label": `${digits(speed)} tokens/s; ${told}` },
    el("span", { class: "band" }),
    el("span", { class: "likely" }),
    el("span", { class: "measured" }),
  );
  const places = { "--least": least, "--likely": likely, "--most": most, "--speed": speed };
  for (const [name, value] of Object.entries(places)) {
    bar.style.setProperty(name, `${(100 * value) / end}%`);
  }
  element.replaceChildren(bar, el("span", { class: "quiet" }, told));
}

const now = () => performance.now() / 1000;
