// The drawer of sampling settings: the numbers that the loaded model's answers have.

import { byId, el } from "./dom.js";
import { live } from "./live.js";

const PLACE = "lowtide-settings";

let given = {};

export function startSettings() {
  try {
    given = JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    given = {};
  }
  const dialog = byId("sampling-dialog");
  byId("sampling").addEventListener("click", () => dialog.showModal());
  byId("reset").addEventListener("click", () => {
    given = {};
    keep();
    show();
  });
  live.addEventListener("model", show);
}

/** Return the fields of a request that were set and that the model has. */
export function asked() {
  const fields = {};
  for (const { name, is_diffusion } of live.model?.settings ?? []) {
    const value = given[name];
    if (typeof value !== "number") continue;
    if (is_diffusion) (fields.diffusion ??= {})[name] = value;
    else fields[name] = value;
  }
  return fields;
}

function keep() {
  try {
    localStorage.setItem(PLACE, JSON.stringify(given));
  } catch {
    // They hold until the page is closed.
  }
}

function show() {
  byId("fields").replaceChildren(...live.model.settings.map(field));
}

function field({ name, help, is_integer, low, high, default: own }) {
  const id = `field-${name}`;
  const input = el("input", {
    id,
    type: "number",
    step: is_integer ? 1 : "any",
    min: low,
    max: high,
    placeholder: own ?? "the model's own",
    "aria-describedby": `${id}-help`,
    change,
  });
  input.value = given[name] ?? "";
  function change() {
    const isSet = input.value !== "" && input.checkValidity();
    if (isSet) given[name] = input.valueAsNumber;
    else delete given[name];
    input.reportValidity();
    keep();
  }
  return el(
    "div",
    { class: "field" },
    el("label", { for: id }, name.replaceAll("_", " ")),
    input,
    el("p", { id: `${id}-help`, class: "quiet" }, help),
  );
}
