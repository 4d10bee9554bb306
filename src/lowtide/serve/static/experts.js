// The map of experts: a row for each layer, a column for each expert.

import { byId, el, whole } from "./dom.js";
import { bytesOf, live } from "./live.js";

const TICK_MS = 100;
const TRAIL_S = 2; // in which what was asked for fades to a third
const STEADY_S = 60; // and what is asked for again and again

const NAMES = { gpu: "in the GPU's memory", host: "in memory", disk: "on disk" };

/** Colours [red, green, blue] of a tier at rest and when asked for. */
const COLOURS = {
  gpu: [
    [104, 76, 20],
    [255, 216, 128],
  ],
  host: [
    [18, 82, 92],
    [150, 244, 246],
  ],
  disk: [
    [46, 50, 66],
    [196, 184, 255],
  ],
};

let canvas;
let cells = null; // the map at one pixel for each expert
let layers = [];
let numExperts = 0;
let tier; // by cell: the name of its tier
let now; // by cell: how brightly it shines, 1 when asked for
let steady; // by cell: how much it was asked for lately
let hits; // by cell, since the page was opened
let lastS; // by cell: when it was asked for
let place = null; // the cell that is told of
let timer = 0;

export function startExperts() {
  canvas = byId("experts");
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerleave", () => tell(null));
  canvas.addEventListener("keydown", move);
  canvas.addEventListener("focus", () => tell(place ?? 0));
  canvas.addEventListener("blur", () => tell(null));
  live.addEventListener("model", begin);
  live.addEventListener("state", update);
  new ResizeObserver(draw).observe(canvas);
}

function begin() {
  ({ layers, num_experts: numExperts } = live.model);
  const count = layers.length * numExperts;
  byId("experts-section").hidden = count === 0;
  tier = new Array(count).fill("disk");
  now = new Float32Array(count);
  steady = new Float32Array(count);
  hits = new Float64Array(count);
  lastS = new Float64Array(count).fill(-Infinity);
  cells = count === 0 ? null : new ImageData(numExperts, layers.length);
}

function update() {
  if (cells === null) return;
  const { residents, hits: asked } = live.state;
  tier.fill("disk");
  for (const name of Object.keys(residents).reverse()) {
    const bits = bytesOf(residents[name]);
    for (let i = 0; i < tier.length; i++) {
      if (bits[i >> 3] & (128 >> (i & 7))) tier[i] = name;
    }
  }
  if (asked) {
    const at = performance.now() / 1000;
    bytesOf(asked).forEach((count, i) => {
      if (count === 0) return;
      now[i] = 1;
      steady[i] = Math.min(1, steady[i] + 0.02);
      hits[i] += count;
      lastS[i] = at;
    });
  }
  legend();
  draw();
  timer ||= setInterval(fade, TICK_MS);
}

/** Let what was asked for fade, until all is dark. */
function fade() {
  const step = Math.exp(-TICK_MS / 1000 / TRAIL_S);
  const slow = Math.exp(-TICK_MS / 1000 / STEADY_S);
  let most = 0;
  for (let i = 0; i < now.length; i++) {
    now[i] *= step;
    steady[i] *= slow;
    most = Math.max(most, now[i], steady[i]);
  }
  if (most < 0.01) {
    clearInterval(timer);
    timer = 0;
  }
  draw();
  if (place !== null) tell(place);
}

function draw() {
  if (cells === null) return;
  for (let i = 0; i < tier.length; i++) {
    const [rest, bright] = COLOURS[tier[i]];
    const share = Math.min(1, now[i] + 0.35 * steady[i]);
    for (let c = 0; c < 3; c++) cells.data[4 * i + c] = rest[c] + share * (bright[c] - rest[c]);
    cells.data[4 * i + 3] = 255;
  }
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const side = width / numExperts;
  const height = Math.round(layers.length * Math.min(16, Math.max(3, side)));
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  paint(canvas.getContext("2d"), side * scale, canvas.height / layers.length);
}

function paint(context, width, height) {
  const small = new OffscreenCanvas(cells.width, cells.height);
  small.getContext("2d").putImageData(cells, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  context.fillStyle = "#0c1316";
  if (width >= 5) {
    for (let i = 1; i < cells.width; i++) context.fillRect(Math.round(i * width) - 1, 0, 1, canvas.height);
  }
  if (height >= 5) {
    for (let i = 1; i < cells.height; i++) context.fillRect(0, Math.round(i * height) - 1, canvas.width, 1);
  }
  if (place !== null) {
    const [row, column] = [Math.floor(place / numExperts), place % numExperts];
    context.strokeStyle = "#fff";
    context.lineWidth = 2;
    context.strokeRect(column * width, row * height, width, height);
  }
}

function legend() {
  const counts = {};
  for (const name of tier) counts[name] = (counts[name] ?? 0) + 1;
  const shown = [...Object.keys(live.state.residents), "disk"];
  byId("tiers").replaceChildren(
    ...shown.map((name) =>
      el("li", { class: `tier ${name}` }, `${whole(counts[name] ?? 0)} ${NAMES[name]}`),
    ),
  );
}

function point(event) {
  if (cells === null) return;
  const column = Math.floor((event.offsetX / canvas.clientWidth) * numExperts);
  const row = Math.floor((event.offsetY / canvas.clientHeight) * layers.length);
  if (column < 0 || row < 0 || column >= numExperts || row >= layers.length) return;
  tell(row * numExperts + column);
}

function move(event) {
  const steps = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: -numExperts,
    ArrowDown: numExperts,
  };
  const step = steps[event.key];
  if (step === undefined || cells === null) return;
  event.preventDefault();
  const next = (place ?? 0) + step;
  if (next >= 0 && next < tier.length) tell(next);
}

function tell(cell) {
  const isNew = cell !== place;
  place = cell;
  const told = byId("expert");
  if (cell === null || cells === null) {
    told.textContent = "";
  } else {
    const [row, column] = [Math.floor(cell / numExperts), cell % numExperts];
    const ago = performance.now() / 1000 - lastS[cell];
    const last = ago === Infinity ? "not asked for since" : `last ${ago.toFixed(1)} s ago`;
    told.textContent = `Layer ${layers[row]}, expert ${column}: ${NAMES[tier[cell]]}, ${whole(hits[cell])} hits, ${last}`;
  }
  if (isNew) draw();
}
