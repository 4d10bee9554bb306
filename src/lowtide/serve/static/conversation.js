// The conversation: kept in this browser, exported as a file.
//
// A tab goes on with its own one; a new tab begins with the one that was kept last.

const PLACE = "lowtide-conversation";

/**
 * Turns in order. A user's has `text`; an assistant's has `versions` of its answer, each with
 * `text`, `thoughts`, `facts` and what `ended` it, and the number of the `chosen` one.
 */
export class Conversation {
  turns = [];

  constructor() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(PLACE) ?? localStorage.getItem(PLACE));
      if (!Array.isArray(kept?.turns) || !kept.turns.every(isTurn)) return;
      for (const { versions = [] } of kept.turns) {
        // Its page was left, or is another tab's that still writes it.
        for (const version of versions) version.ended ??= "incomplete";
      }
      this.turns = kept.turns;
    } catch {
      // Nothing kept that can be read, or nothing may be kept: begin anew.
    }
  }

  /** Keep the turns. Returns false where the browser has no room for them. */
  keep() {
    try {
      const kept = JSON.stringify({ turns: this.turns });
      sessionStorage.setItem(PLACE, kept);
      localStorage.setItem(PLACE, kept);
      return true;
    } catch {
      return false;
    }
  }

  clear() {
    this.turns = [];
    this.keep();
  }

  /** The number of tokens that the conversation takes: the server's count, else the page's. */
  get numTokens() {
    for (const turn of this.turns.toReversed()) {
      const { numPrompt, progress, numNew, numSeen = 0 } = (turn.versions && chosen(turn)?.facts) ?? {};
      const numRead = numPrompt ?? progress?.total;
      if (numRead) return numRead + (numNew ?? numSeen);
    }
    return 0;
  }

  get last() {
    return this.turns.at(-1);
  }

  /** Return the messages of the turns before `turn`, as the chat API takes them. */
  messagesBefore(turn) {
    const messages = [];
    for (const each of this.turns.slice(0, this.turns.indexOf(turn))) {
      const content = each.role === "user" ? each.text : chosen(each).text;
      if (content) messages.push({ role: each.role, content });
    }
    return messages;
  }

  /** Have the browser save the turns as a file. */
  export(model) {
    const told = { model, exported: new Date().toISOString(), turns: this.turns };
    const file = new Blob([JSON.stringify(told, null, 2)], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(file);
    link.download = "conversation.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

export const chosen = (turn) => turn.versions[turn.chosen];

function isTurn(turn) {
  if (turn?.role === "user") return typeof turn.text === "string";
  const versions = turn?.role === "assistant" && turn.versions;
  return Array.isArray(versions) && typeof versions[turn.chosen]?.text === "string";
}
