// Elements, and numbers in words.

export const byId = (id) => document.getElementById(id);

/** Make an element. Attributes that are functions listen; children are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const TAGS = new Set(
  "p h3 h4 h5 h6 ul ol li blockquote pre code em strong s a br hr table thead tbody tr th td".split(
    " ",
  ),
);
const ATTRIBUTES = {
  href: /^https?:\/\//i,
  start: /^\d+$/,
  class: /^align-(left|right|center)$/,
};

/** Make an element of the server's markdown: names and attributes beyond these stay text. */
export function built(node) {
  if (typeof node === "string") return node;
  const [tag, attributes, ...children] = node;
  if (!TAGS.has(tag)) return children.map(textOf).join("");
  const made = el(tag, {}, ...children.map(built));
  for (const [name, value] of Object.entries(attributes)) {
    if (ATTRIBUTES[name]?.test(value)) made.setAttribute(name, value);
  }
  if (tag === "a") {
    made.setAttribute("rel", "noopener noreferrer");
    made.setAttribute("target", "_blank");
  }
  if (tag === "pre") return codeBlock(...made.childNodes);
  return tag === "table" ? el("div", { class: "wide", tabindex: "0" }, made) : made;
}

/** Make a block of code, which scrolls and can be copied. */
export function codeBlock(...children) {
  const code = el("pre", { tabindex: "0" }, ...children);
  return el("div", { class: "code", dir: "ltr" }, copyButton(() => code.textContent), code);
}

function textOf(node) {
  return typeof node === "string" ? node : node.slice(2).map(textOf).join("");
}

export function copyButton(text) {
  const button = el("button", { type: "button", click: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return button;
}

/** Say something to a screen reader. */
export function say(text) {
  byId("status").textContent = text;
}

/** Replace a list of facts: pairs of a name and a value. */
export function showFacts(list, facts) {
  list.replaceChildren(
    ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

export const whole = (number) => Math.round(number).toLocaleString("en");

export function digits(number) {
  return number >= 100 ? whole(number) : String(Number(number.toPrecision(number >= 10 ? 3 : 2)));
}

export const percent = (share) => `${digits(100 * share)}%`;

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit ? bytes.toFixed(bytes < 100 ? 1 : 0) : whole(bytes)} ${units[unit]}`;
}

export function seconds(value) {
  return value < 1 ? `${whole(1000 * value)} ms` : `${digits(value)} s`;
}
