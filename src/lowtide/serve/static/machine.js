// What binds, what is going on, and the memory as a stack that moves.

import { byId, digits, el, percent, showFacts, size } from "./dom.js";
import { live } from "./live.js";

const NAMES = {
  dense: "dense weights",
  state: "states",
  kv_cache: "keys and values",
  workspace: "passes",
  ring: "reads",
  slots: "experts",
  free: "free",
};
const ORDER = Object.keys(NAMES);
const TIERS = { gpu: "GPU", host: "Host" };

let before = null; // counts and time of the last state in which passes were counted

export function startMachine() {
  const [button, machine] = [byId("show-machine"), byId("machine")];
  button.addEventListener("click", () => {
    const isShown = machine.classList.toggle("shown");
    button.setAttribute("aria-expanded", isShown);
    if (isShown) machine.scrollIntoView({ block: "start" });
  });
  live.addEventListener("model", () => {
    byId("model").textContent = live.model.model;
    document.title = `${live.model.model} · lowtide`;
    byId("memory").replaceChildren();
    before = null;
  });
  live.addEventListener("state", show);
  live.addEventListener("lost", () => {
    byId("binding").textContent = live.trouble;
    byId("binding-help").textContent = "Not live now; it is tried again.";
  });
}

function show() {
  const { binding, memory } = live.state;
  byId("binding").textContent = binding.sentence;
  byId("binding-help").textContent = binding.help;
  showFacts(byId("now"), facts());
  for (const [name, tier] of Object.entries(memory)) showTier(name, tier);
}

/** What passes did since the last state. */
function facts() {
  const { counts, queue } = live.state;
  const told = [["requests", `${queue.running} running, ${queue.waiting} waiting`]];
  if (before !== null && counts.forwards > before.forwards) {
    const [seconds, tokens] = [counts.seconds - before.seconds, counts.tokens - before.tokens];
    if (seconds > 0) {
      told.push(["passes write", `${digits(tokens / seconds)} tokens/s`]);
      told.push(["disk", `${size((counts.read_bytes - before.read_bytes) / seconds)}/s`]);
    }
    const hits = counts.hits - before.hits;
    const all = hits + counts.misses - before.misses;
    if (all) told.push(["hit rate", percent(hits / all)]);
  }
  before = counts;
  return told;
}

function showTier(name, { budget_bytes, held, used }) {
  const taken = Object.values(held).reduce((sum, bytes) => sum + bytes, 0);
  const parts = { ...held, free: Math.max(0, budget_bytes - taken) };
  let tier = byId(`tier-${name}`);
  if (tier === null) {
    const stack = el("div", { class: "stack", role: "img" });
    const title = el("h3", {}, `${TIERS[name] ?? name}: ${size(budget_bytes)} budget`);
    tier = el("div", { id: `tier-${name}` }, title, stack, el("ul", { class: "legend" }));
    byId("memory").append(tier);
  }
  const [, stack, legend] = tier.children;
  const shown = Object.keys(parts)
    .filter((part) => parts[part] > 0)
    .sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  for (const part of stack.querySelectorAll("[data-part]")) {
    if (!shown.includes(part.dataset.part)) part.remove();
  }
  for (const part of shown) {
    let segment = stack.querySelector(`[data-part="${part}"]`);
    if (segment === null) {
      segment = el("div", { "data-part": part }, el("span"));
      stack.append(segment);
    }
    segment.style.flexGrow = parts[part] / budget_bytes;
    const inUse = part in used ? used[part] / parts[part] : 1;
    segment.firstChild.style.width = `${100 * inUse}%`;
    segment.title = label(part);
  }
  stack.setAttribute("aria-label", shown.map(label).join(", "));
  legend.replaceChildren(
    ...shown.map((part) => el("li", { "data-part": part }, NAMES[part] ?? part, el("span", {}, amount(part)))),
  );

  function label(part) {
    return `${NAMES[part] ?? part} ${amount(part)}`;
  }

  function amount(part) {
    const inUse = used[part];
    const isPartly = inUse !== undefined && inUse < parts[part];
    return isPartly ? `${size(inUse)} of ${size(parts[part])} in use` : size(parts[part]);
  }
}
