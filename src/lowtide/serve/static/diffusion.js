// A diffusion model at work: its blocks as cells, pass by pass, with a scrubber.

import { el, percent } from "./dom.js";

const PLAY_MS = 250;
const CELLS = 4096; // that are shown at most

/** Colour of a pass: stable while more passes come, and neighbours among the first differ. */
const hueOf = (passes) => 175 + 190 * (1 - 1 / (1 + passes / 4));

/** One answer's frames. `element` shows the latest, or the one that the scrubber is at. */
export class DiffusionView {
  #frames = [];
  #blocks = []; // in order, each its first place and the passes before it
  #made = []; // cells by place in the answer, with what they show
  #cells;
  #scrubber;
  #button;
  #told;
  #follows = true;
  #playing = 0;

  constructor() {
    this.#cells = el("div", { class: "cells", role: "img" });
    this.#scrubber = el("input", { type: "range", min: 1, max: 1, step: 1, "aria-label": "Pass" });
    this.#scrubber.addEventListener("input", () => {
      this.#pause();
      this.#follows = this.#at === this.#frames.length - 1;
      this.#show();
    });
    this.#button = el("button", { type: "button", click: () => this.#toggle() }, "Play");
    this.#told = el("output", { class: "quiet" });
    const key = el("span", { class: "scale", role: "img", "aria-label": "Colours of passes" });
    this.element = el(
      "details",
      { class: "diffusion", open: true },
      el("summary", {}, "How it was written"),
      this.#cells,
      el("div", { class: "scrubber" }, this.#button, this.#scrubber, this.#told),
      el(
        "p",
        { class: "quiet" },
        "First passes ",
        key,
        " later ones; the fainter the less sure; grey: a draft, not written yet.",
      ),
    );
  }

  get isEmpty() {
    return this.#frames.length === 0;
  }

  /** Tokens written so far. */
  get numWritten() {
    const frame = this.#frames.at(-1);
    return frame === undefined ? 0 : frame.start + frame.tokens.length - frame.masked;
  }

  add(frame) {
    if (frame.start !== this.#blocks.at(-1)?.start) {
      this.#blocks.push({ start: frame.start, before: this.#frames.at(-1)?.step ?? 0 });
    }
    this.#frames.push(frame);
    this.#scrubber.max = this.#frames.length;
    if (this.#follows) this.#scrubber.value = this.#frames.length;
  }

  /** Draw what was added; called once for each picture of the screen. */
  draw() {
    this.#show();
  }

  get #at() {
    return Number(this.#scrubber.value) - 1;
  }

  #show() {
    const frame = this.#frames[this.#at];
    if (frame === undefined) return;
    const tokens = this.#tokensAt(this.#at);
    tokens.length = Math.min(tokens.length, CELLS);
    while (this.#made.length > tokens.length) this.#made.pop().cell.remove();
    tokens.forEach((token, place) => this.#showCell(place, token));
    const drafts = tokens.filter((token) => token[1] === 0).length;
    const written = tokens.length - drafts;
    this.#told.textContent = `Pass ${frame.step} of ${this.#frames.at(-1).step}: ${written} written, ${drafts} drafts`;
    this.#cells.setAttribute("aria-label", `${this.#told.textContent}. ${textOf(tokens)}`);
  }

  /** Return the answer's tokens at a frame: those of earlier blocks as they ended, then its own. */
  #tokensAt(at) {
    const { start } = this.#frames[at];
    const ends = new Map();
    for (const frame of this.#frames.slice(0, at)) {
      if (frame.start < start) ends.set(frame.start, frame.tokens);
    }
    return [...ends.values(), this.#frames[at].tokens].flat();
  }

  #showCell(place, [text, step, confidence]) {
    const known = this.#made[place];
    if (known?.text === text && known.step === step && known.confidence === confidence) return;
    const cell = known?.cell ?? el("span", {}, el("span"));
    const shown = cell.firstChild;
    const { before } = this.#blocks.findLast(({ start }) => start <= place);
    const isBreak = text.includes("\n");
    shown.textContent = isBreak ? "↵" : text.replaceAll(" ", "\u00a0") || "\u00a0";
    shown.className = step ? "cell" : "cell guess";
    shown.title = step
      ? `Pass ${step}, ${percent(confidence)} sure`
      : `A draft, ${percent(confidence)} sure`;
    shown.style.setProperty("--hue", hueOf(Math.max(0, step - before - 1)));
    shown.style.setProperty("--sure", confidence);
    cell.replaceChildren(shown, ...(isBreak ? [el("br")] : []));
    if (known === undefined) this.#cells.append(cell);
    this.#made[place] = { cell, text, step, confidence };
  }

  #toggle() {
    if (this.#playing) return this.#pause();
    if (this.#at === this.#frames.length - 1) this.#scrubber.value = 1;
    this.#follows = false;
    this.#button.textContent = "Pause";
    this.#show();
    this.#playing = setInterval(() => {
      this.#scrubber.value = this.#at + 2;
      this.#show();
      if (this.#at === this.#frames.length - 1) this.#pause();
    }, PLAY_MS);
  }

  #pause() {
    clearInterval(this.#playing);
    this.#playing = 0;
    this.#button.textContent = "Play";
  }
}

const textOf = (tokens) => tokens.map(([text, step]) => (step ? text : "▁")).join("");
