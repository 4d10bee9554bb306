// The conversation as it is seen, and the message field.

import { AnswerView } from "./answer.js";
import { chosen, Conversation } from "./conversation.js";
import { byId, copyButton, el, say, whole } from "./dom.js";
import { live } from "./live.js";

const conversation = new Conversation();
const views = new WeakMap(); // of versions, with what is shown of them and not kept
let running = null; // the controller of the answer under way
let follows = true; // new text, unless the user has gone up from the end
let lastY = 0;

export function startChat() {
  byId("composer").addEventListener("submit", send);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  byId("prompt").addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  byId("anew").addEventListener("click", () => {
    if (conversation.turns.length) byId("anew-dialog").showModal();
    else byId("prompt").focus();
  });
  byId("anew-dialog").addEventListener("close", (event) => {
    if (event.target.returnValue !== "anew") return;
    running?.abort();
    conversation.clear();
    show();
    focusPrompt();
  });
  byId("export").addEventListener("click", () => conversation.export(live.model?.model ?? null));
  live.addEventListener("model", showRoom);
  addEventListener("scroll", () => {
    const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 8;
    follows = isAtEnd || (follows && scrollY >= lastY);
    lastY = scrollY;
  });
  addEventListener("pagehide", () => running && conversation.keep());
  show();
  focusPrompt();
}

/** Go on at the message field, except where that would open a keyboard on the screen. */
function focusPrompt() {
  if (matchMedia("(hover: hover)").matches) byId("prompt").focus();
}

function send(event) {
  event.preventDefault();
  if (running) {
    if (event.type === "submit") running.abort();
    return;
  }
  const text = byId("prompt").value.trim();
  if (!text) return;
  byId("prompt").value = "";
  fit();
  conversation.turns.push({ role: "user", text }, { role: "assistant", versions: [], chosen: -1 });
  show();
  answer();
}

/** Ask for one more version of the last turn. */
async function answer() {
  const turn = conversation.last;
  const version = { text: "", thoughts: "", facts: {}, ended: null };
  turn.versions.push(version);
  turn.chosen = turn.versions.length - 1;
  running = new AbortController();
  const view = new AnswerView(version);
  views.set(version, view);
  conversation.keep();
  showLast();
  scrollDown();
  showRunning();
  say("The model answers.");
  const messages = conversation.messagesBefore(turn);
  const isAnswered = await view.run(messages, running.signal);
  running = null;
  showRunning();
  if (conversation.last !== turn) return; // a new conversation was begun meanwhile
  const isKept = conversation.keep();
  showLast();
  showRoom();
  say(isAnswered ? `Answered: ${version.text.slice(0, 300)}` : version.trouble);
  if (!isKept) say("This browser has no room to keep the conversation.");
}

function answerAgain() {
  answer();
  focusPrompt();
}

function show() {
  byId("welcome").hidden = conversation.turns.length > 0;
  byId("turns").replaceChildren(...conversation.turns.map(item));
  showRoom();
  scrollDown();
}

const item = (turn) => (turn.role === "user" ? userItem(turn) : assistantItem(turn));

function viewOf(version) {
  if (!views.has(version)) {
    const view = new AnswerView(version);
    views.set(version, view);
    view.show();
  }
  return views.get(version);
}

function userItem(turn) {
  const made = el("li", { class: "user" }, el("h3", { class: "unseen" }, "You"), el("p", { class: "plain" }, turn.text));
  if (turn === conversation.turns.at(-2)) {
    made.append(el("p", { class: "actions" }, el("button", { type: "button", class: "idle", click: () => edit(turn, made) }, "Edit")));
  }
  return made;
}

function assistantItem(turn) {
  const made = el("li", { class: "assistant" }, el("h3", { class: "unseen" }, "Model"));
  if (turn.chosen < 0) return made;
  made.append(viewOf(chosen(turn)).element);
  const actions = [copyButton(() => chosen(turn).text)];
  if (turn === conversation.last) {
    actions.push(el("button", { type: "button", class: "idle", click: answerAgain }, "Another answer"));
  }
  if (turn.versions.length > 1) actions.push(...versionButtons(turn));
  made.append(el("p", { class: "actions" }, ...actions));
  return made;
}

function versionButtons(turn) {
  const other = (step, name, sign) => {
    const isThere = turn.versions[turn.chosen + step] !== undefined;
    return el(
      "button",
      {
        type: "button",
        class: isThere && "idle", // others stay disabled when an answer ends
        "aria-label": name,
        disabled: !isThere,
        click: ({ target }) => {
          if (!isThere) return;
          turn.chosen += step;
          conversation.keep();
          const made = assistantItem(turn);
          target.closest("li").replaceWith(made);
          showRoom();
          const buttons = [...made.querySelectorAll("[aria-label^=Answer]:not(:disabled)")];
          (buttons.find((each) => each.ariaLabel === name) ?? buttons[0]).focus();
        },
      },
      sign,
    );
  };
  return [
    other(-1, "Answer before", "‹"),
    el("span", { class: "quiet" }, `${turn.chosen + 1} of ${turn.versions.length}`),
    other(1, "Answer after", "›"),
  ];
}

function edit(turn, made) {
  if (running) return;
  const field = el("textarea", { "aria-label": "Edited message", rows: 3, dir: "auto" });
  field.value = turn.text;
  const form = el(
    "form",
    { class: "edit", submit: save },
    field,
    el(
      "p",
      { class: "actions" },
      el("button", { class: "primary" }, "Send again"),
      el("button", { type: "button", click: leave }, "Cancel"),
    ),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
  });
  made.replaceChildren(form);
  field.focus();
  function leave() {
    const shown = userItem(turn);
    made.replaceWith(shown);
    shown.querySelector("button").focus();
  }
  function save(event) {
    event.preventDefault();
    const text = field.value.trim();
    if (!text || running) return;
    turn.text = text;
    conversation.turns[conversation.turns.length - 1] = { role: "assistant", versions: [], chosen: -1 };
    show();
    answer();
    focusPrompt();
  }
}

/** Show the last turn anew: its answer is under way, or has just ended. */
function showLast() {
  byId("turns").lastElementChild.replaceWith(assistantItem(conversation.last));
}

function showRunning() {
  const isRunning = running !== null;
  byId("send").textContent = isRunning ? "Stop" : "Send";
  document.body.classList.toggle("running", isRunning);
  for (const button of document.querySelectorAll("#turns .idle")) button.disabled = isRunning;
}

/** Show how much of the context the conversation takes. */
function showRoom() {
  const context = live.model?.context;
  const used = conversation.numTokens;
  const room = byId("room");
  room.hidden = !context;
  if (!context) return;
  room.setAttribute("aria-valuemax", context);
  room.setAttribute("aria-valuenow", used);
  room.firstElementChild.style.width = `${Math.min(100, (100 * used) / context)}%`;
  byId("room-text").textContent = `${whole(used)} of ${whole(context)} tokens`;
}

function fit() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function scrollDown() {
  follows = true;
  scrollTo({ top: document.body.scrollHeight });
}

new MutationObserver(() => follows && scrollDown()).observe(byId("turns"), {
  childList: true,
  subtree: true,
  characterData: true,
});
