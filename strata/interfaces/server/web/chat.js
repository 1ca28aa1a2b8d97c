// The conversation: what was said, the answer as it comes, and the way to stop it.

import { ApiError, postStream } from "./api.js";
import { element, markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const NEAR_THE_END = 80; // pixels: who has scrolled up further is reading and is left there

class Turn {
  constructor(role) {
    this.text = "";
    this.thought = "";
    this.node = element("article", "", role);
    this.node.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    this.body = element("div", "", "body");
    this.meta = element("div", "", "meta");
    this.node.append(this.body, this.meta);
    $("empty").hidden = true;
    $("log").append(this.node);
  }

  add(delta) {
    this.text += delta.content ?? "";
    this.thought += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.text += (call.function.name ?? "") + (call.function.arguments ?? "");
    this.stale ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.stale = undefined;
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;
    if (this.thought) this.drawThought();
    this.body.replaceChildren(markdown(this.text));
    if (follow) log.scrollTop = log.scrollHeight;
  }

  drawThought() {
    if (!this.fold) {
      this.fold = element("details", "", "reasoning");
      this.fold.append(element("summary", "Reasoning"), element("div"));
      this.node.prepend(this.fold);
    }
    this.fold.lastChild.textContent = this.thought.trim();
    if (!this.touched) this.fold.open = !this.text;
    this.touched ||= Boolean(this.text);
  }

  note(text, className = "") {
    this.meta.textContent = text;
    this.meta.className = `meta ${className}`;
  }
}

export class Chat {
  constructor(onKeyNeeded) {
    this.messages = [];
    this.onKeyNeeded = onKeyNeeded;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    });
    const prompt = $("prompt");
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    prompt.addEventListener("input", () => this.fit());
  }

  fit() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 220)}px`;
  }

  clear() {
    this.stop();
    this.messages = [];
    for (const turn of document.querySelectorAll("#log article")) turn.remove();
    $("empty").hidden = false;
    $("prompt").focus();
  }

  stop() {
    this.running?.abort();
  }

  send() {
    const text = $("prompt").value.trim();
    if (!text) return;
    $("prompt").value = "";
    this.fit();
    const turn = new Turn("user");
    turn.text = text;
    turn.body.textContent = text;
    this.messages.push({ role: "user", content: text });
    this.answer();
  }

  body() {
    const system = $("system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const asked = { messages, stream: true, stream_options: { include_usage: true } };
    if ($("temperature").value) asked.temperature = Number($("temperature").value);
    if ($("most").value) asked.max_tokens = Number($("most").value);
    return asked;
  }

  async answer() {
    const turn = new Turn("assistant");
    $("log").scrollTop = $("log").scrollHeight;
    const controller = (this.running = new AbortController());
    this.busy(true);
    const times = { begin: performance.now() };
    try {
      for await (const chunk of postStream("v1/chat/completions", this.body(), controller.signal)) {
        for (const choice of chunk.choices) {
          turn.add(choice.delta);
          if (turn.text || turn.thought) times.first ??= performance.now();
          turn.finish = choice.finish_reason ?? turn.finish;
        }
        turn.usage = chunk.usage ?? turn.usage;
      }
      turn.note(summary(turn, times));
    } catch (error) {
      this.failed(turn, error);
    } finally {
      turn.draw();
      if (this.running === controller) {
        this.running = undefined;
        this.busy(false);
      }
    }
    if (turn.text && turn.node.isConnected) this.messages.push({ role: "assistant", content: turn.text });
  }

  failed(turn, error) {
    if (error.name === "AbortError") return turn.note("stopped");
    turn.note(error instanceof ApiError ? error.message : "The server cannot be reached.", "error");
    if (!turn.text) this.messages.pop(); // it was not answered: it may be asked again
    if (error.status === 401) this.onKeyNeeded();
  }

  busy(on) {
    $("send").textContent = on ? "Stop" : "Send";
    $("send").classList.toggle("stop", on);
    $("log").setAttribute("aria-busy", String(on));
  }
}

function summary(turn, times) {
  if (!turn.usage || !times.first) return turn.finish === "length" ? "cut off: no room left" : "";
  const count = turn.usage.completion_tokens;
  const seconds = (performance.now() - times.first) / 1000;
  const parts = [`${count} tokens`];
  if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
  parts.push(`first after ${((times.first - times.begin) / 1000).toFixed(2)} s`);
  const cached = turn.usage.prompt_tokens_details?.cached_tokens;
  parts.push(`prompt ${turn.usage.prompt_tokens}` + (cached ? ` (${cached} from the cache)` : ""));
  if (turn.finish === "length") parts.push("cut off at the most tokens");
  return parts.join(" · ");
}
