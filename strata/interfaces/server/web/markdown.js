// A little Markdown as DOM nodes. The model's text only ever becomes text nodes: no HTML is parsed, no link is made.

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*/g;
const BLOCKS = [
  [/^(#{1,6})\s+(.*)$/, (found) => element("h" + Math.min(found[1].length + 2, 6), found[2])],
  [/^\s*(?:---+|\*\*\*+|___+)\s*$/, () => document.createElement("hr")],
];
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) inline(made, text);
  return made;
}

function inline(parent, text) {
  let place = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(place, found.index));
    const name = found[1] ? "code" : found[3] ? "strong" : "em";
    const made = document.createElement(name);
    if (found[1]) made.textContent = found[2];
    else inline(made, found[3] ?? found[4]);
    parent.append(made);
    place = found.index + found[0].length;
  }
  parent.append(text.slice(place));
}

function codeBlock(lines, language) {
  const block = element("div", "", "code");
  const code = document.createElement("code");
  code.textContent = lines.join("\n");
  const copy = element("button", "", "copy");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(code.textContent));
  const pre = document.createElement("pre");
  pre.append(code);
  const name = document.createElement("span");
  name.textContent = language;
  block.append(name, copy, pre);
  return block;
}

function list(lines) {
  const numbered = ITEM.exec(lines[0])[2];
  const made = document.createElement(numbered ? "ol" : "ul");
  if (numbered) made.start = Number(numbered);
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) made.append(element("li", found[3]));
    else inline(made.lastChild, "\n" + line.trim());
  }
  return made;
}

// All of a text, as a fragment.
export function markdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) out.append(element("p", paragraph.join("\n")));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = /^\s{0,3}(```+|~~~+)\s*(\S*)/.exec(line);
    if (fence) {
      flush();
      const body = [];
      while (++at < lines.length && !lines[at].trim().startsWith(fence[1])) body.push(lines[at]);
      out.append(codeBlock(body, fence[2]));
    } else if (ITEM.test(line)) {
      flush();
      const items = [line];
      while (at + 1 < lines.length && (ITEM.test(lines[at + 1]) || /^\s+\S/.test(lines[at + 1]))) items.push(lines[++at]);
      out.append(list(items));
    } else if (!line.trim()) {
      flush();
    } else {
      const block = BLOCKS.find(([pattern]) => pattern.test(line));
      if (block) flush();
      if (block) out.append(block[1](block[0].exec(line)));
      else paragraph.push(line);
    }
  }
  flush();
  return out;
}
